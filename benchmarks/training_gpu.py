"""Training on a GPU: what verify costs, whether killed runs go on, whether the newest JAX takes steps and how soon.

PYTHONPATH=src python benchmarks/training_gpu.py --json results.json         (about four minutes on an H200)
PYTHONPATH=src python benchmarks/training_gpu.py --tiny                      (seconds, on any machine)
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bandmf import Key, workloads
from bandmf.planning import Plan
from bandmf.strategies import BandedToeplitz

KILLS = 5


def plan_of(steps: int, examples: int, batch: int, bands: int = 4) -> Plan:
    """A plan that promises nothing: only time and restarts are looked at."""
    return Plan(
        workload=workloads.prefix(steps), examples=examples, batch_size=batch, epsilon=math.inf, delta=1e-6,
        adjacency="add-remove", strategy=BandedToeplitz([1 / math.sqrt(1 + k) for k in range(bands)], steps),
        noise_multiplier=0.5,
    )  # fmt: skip


# --- what verify costs ------------------------------------------------------------------------------------


def gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, int] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64} if tiny else {}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_positions=128, use_cache=False, **sizes)).train()


def text_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    device = batch["input_ids"].device.type
    with torch.autocast(device, torch.bfloat16):
        logits = model(input_ids=batch["input_ids"]).logits
    words = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten(), reduction="none"
    )
    return words.view(len(logits), -1).mean(1)


def time_verify(device: str, tiny: bool) -> dict[str, float]:
    """Seconds of verify, and of a private step, for GPT-2 small with texts of 128 tokens in batches of 64."""
    from bandmf.torch import Training, verify

    batch, length = (4, 16) if tiny else (64, 128)
    model = gpt2(tiny).to(device)
    vocabulary = model.config.vocab_size
    data = [{"input_ids": torch.randint(vocabulary, (length,))} for _ in range(4 * batch)]
    seconds = []
    for _ in range(3):
        begin = _now(device)
        verify(model, text_losses, data[:4]).refuse()
        seconds.append(_now(device) - begin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    training = Training(model, text_losses, optimizer, data, plan_of(12, len(data), batch), clip_norm=1.0, verify=False)
    for _ in range(4):
        training.advance()
    begin = _now(device)
    for _ in range(8):
        training.advance()
    step = (_now(device) - begin) / 8
    return {
        "verify_first_s": seconds[0],
        "verify_s": min(seconds),
        "step_s": step,
        "steps": min(seconds) / step,
        "first_steps": seconds[0] / step,
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# --- kills ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def train_for_kills(folder: Path, device: str, tiny: bool) -> None:
    """The child: trains a small residual network, from wherever its folder is; leaves its weights there."""
    from bandmf import ledger
    from bandmf.torch import Training

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    steps, width = (12, 8) if tiny else (60, 64)
    ledger._fresh_run_id = lambda: "5a" * 16  # the same run in another folder
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, width, 3, padding=1), *(Residual(width) for _ in range(4))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(512, 3, 32, 32, generator=generator)
    data = torch.utils.data.TensorDataset(images, torch.randint(10, (512,), generator=generator))

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    training = Training(
        model, losses, torch.optim.AdamW(model.parameters(), lr=1e-3), data, plan_of(steps, 512, 64),
        clip_norm=1.0, folder=folder, save_every=5, key=Key(bytes(32)), verify=False,
    )  # fmt: skip
    for _ in training:
        pass
    torch.save(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), folder / "final.pt")


def kill_and_compare(device: str, tiny: bool, kills: int) -> dict[str, Any]:
    """A run that is killed at random moments beside one that is not."""
    log, dice, landed = [], random.Random(1), 0
    with tempfile.TemporaryDirectory() as scratch:
        clean, killed = Path(scratch) / "clean", Path(scratch) / "killed"
        begin = time.perf_counter()
        _child(clean, device, tiny, None)
        whole = time.perf_counter() - begin
        print(f"one run takes {whole:.1f} s", flush=True)
        for _ in range(kills):
            code, text = _child(killed, device, tiny, dice.uniform(0.6, 0.95) * whole)
            print(f"killed: {code}", flush=True)
            landed += code == -signal.SIGKILL
            log += [line for line in text.splitlines() if "bandmf" in line]
        code, text = _child(killed, device, tiny, None)
        log += [line for line in text.splitlines() if "bandmf" in line]
        if code:
            return {"kills": landed, "failed": text[-2000:], "log": log}
        one, other = torch.load(clean / "final.pt"), torch.load(killed / "final.pt")
        return {
            "kills": landed,
            "equal": torch.equal(one, other),
            "difference": float((one - other).abs().max()),
            "log": log,
        }


def _child(folder: Path, device: str, tiny: bool, seconds: float | None) -> tuple[int, str]:
    limit = seconds or 120  # also where nothing kills it: a child that hangs is a failure
    command = [sys.executable, __file__, "--child", str(folder), "--device", device, *(["--tiny"] * tiny)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        _, text = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        _, text = process.communicate()
    return process.returncode, text


# --- JAX --------------------------------------------------------------------------------------------------


def jax_steps() -> dict[str, Any]:
    """A few steps one by one and in one program: the same weights?"""
    import jax
    import jax.numpy as jnp
    import optax

    from bandmf import ledger
    from bandmf.jax import Training

    ledger._fresh_run_id = lambda: "5a" * 16
    dice = np.random.default_rng(0)
    data = (dice.normal(size=(256, 8)).astype("float32"), dice.normal(size=256).astype("float32"))
    first = {"a": dice.normal(size=(8, 16)).astype("float32") / 3, "b": dice.normal(size=16).astype("float32") / 4}

    def loss(weights: Any, example: Any, key: Any) -> Any:
        x, y = example
        kept = jax.random.bernoulli(key, 0.9, (16,))
        return (jnp.tanh(x @ weights["a"]) * kept @ weights["b"] - y) ** 2

    found = {}
    for at_once in (1, 4):
        training = Training(loss, optax.adam(1e-2), data, plan_of(12, 256, 32), clip_norm=1.0, key=Key(bytes(32)))
        for state in training.steps(training.init(first), at_once=at_once):
            weights = jax.device_get(state.weights)
        assert training.finished
        found[at_once] = weights
    difference = max(float(np.abs(found[1][name] - found[4][name]).max()) for name in first)
    return {"jax": jax.__version__, "device": str(jax.devices()[0]), "difference_at_once": difference}


def public_ways(loss: Any, adam: Any, weights: Any, some: Any) -> dict[str, Iterator[Any]]:
    """The same step again and again without privacy: the gradient of the mean alone, and with the update."""
    import jax
    import optax

    def mean(weights: Any, some: Any) -> Any:
        return jax.vmap(loss, (None, 0))(weights, some).mean()

    def update(weights: Any, state: Any, some: Any) -> Any:
        updates, state = adam.update(jax.grad(mean)(weights, some), state, weights)
        return optax.apply_updates(weights, updates), state

    def repeated(function: Any, start: Any) -> Iterator[Any]:
        compiled, given = jax.jit(function), start()
        while True:
            yield compiled(*given)

    return {
        "gradient": repeated(jax.grad(mean), lambda: (weights, some)),
        "public_step": repeated(update, lambda: (weights, adam.init(weights), some)),
    }


def private(training: Any, weights: Any) -> Iterator[Any]:
    for state in training.steps(training.init(weights)):
        yield state.weights


def jax_compile(tiny: bool) -> dict[str, Any]:
    """CPU seconds by which the first private step takes longer than the second, beside steps without privacy.

    That is tracing and compilation. A small transformer and Adam; the mean's gradient, alone and with the update, is of
    as many texts as one turn of the private step has rows.
    """
    import jax
    import optax

    from bandmf.jax import Training
    from train_jax import first_weights, loss

    text = np.random.default_rng(1).integers(0, 256, (512, 65))
    weights = first_weights(32 if tiny else 256, 2 if tiny else 6)
    adam = optax.adam(1e-3)
    seconds: dict[str, list[float]] = {"gradient": [], "public_step": [], "private_step": []}
    for _ in range(3):
        training = Training(loss, adam, text, plan_of(12, 512, 32), clip_norm=1.0)
        ways = {
            **public_ways(loss, adam, weights, text[: training._source.size]),
            "private_step": private(training, weights),
        }
        for name, steps in ways.items():
            jax.clear_caches()
            begin = time.process_time()
            jax.block_until_ready(next(steps))
            first = time.process_time()
            jax.block_until_ready(next(steps))
            seconds[name].append((first - begin) - (time.process_time() - first))
    best = {f"{name}_cpu_s": min(each) for name, each in seconds.items()}
    for name in ("gradient", "public_step"):
        best[f"over_{name}"] = best["private_step_cpu_s"] / best[f"{name}_cpu_s"]
    return {"jax": jax.__version__, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=["verify", "kills", "jax", "jax_compile"])
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        train_for_kills(given.child, given.device, given.tiny)
        return
    results: dict[str, Any] = {"command": " ".join(sys.argv), "torch": torch.__version__, "device": given.device}
    if given.device == "cuda":
        results["machine"] = torch.cuda.get_device_name()
    parts = {
        "verify": lambda: time_verify(given.device, given.tiny),
        "kills": lambda: kill_and_compare(given.device, given.tiny, 1 if given.tiny else KILLS),
        "jax": jax_steps,
        "jax_compile": lambda: jax_compile(given.tiny),
    }
    for name in given.parts:
        try:
            results[name] = parts[name]()
        except Exception as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
