"""Checks the CUDA noise engine against the oracle and times it against its peers, in one run on one GPU.

    PYTHONPATH=src python benchmarks/noise_gpu.py --json results.json      (about four minutes on an H200)

Every figure is a mean over whole look-ahead periods, timed with CUDA events after a warm-up. jax_privacy is
run from its own source where it can be imported, in a process of its own (`--peer`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import triton

from bandmf.noise import normals
from bandmf.noise.region import Region
from bandmf.noise.schedule import INNER, Step
from bandmf.randomness.key import Key
from bandmf.strategies import Banded, BandedInverse, BandedToeplitz, BufferedToeplitz, Dense, Identity, tree_aggregation
from bandmf.torch import Engine
from bandmf.torch.noise.executor import Slice, Vectors
from bandmf.torch.noise.triton_executor import TritonExecutor

D = 100_000_000
BANDS = (1, 8, 16, 32, 64, 128)
DEVICE = torch.device("cuda:0")


def toeplitz(bands: int, steps: int = 100_000) -> BandedToeplitz:
    return BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), steps)


def check() -> dict[str, float]:
    """The largest difference from the oracle, C^-1 z in double precision, for every family and way to run."""
    rng = np.random.default_rng(0)
    compact = rng.uniform(0.05, 0.2, (40, 9)) + np.eye(1, 9)
    compact[np.add.outer(np.arange(40), np.arange(9)) >= 40] = 0
    families = {
        "identity": Identity(40),
        "toeplitz b=2": toeplitz(2, 40),
        "toeplitz b=16": toeplitz(16, 60),
        "toeplitz b=128": toeplitz(128, 300),
        "banded b=9": Banded(compact),
        "dense": Dense(np.tril(rng.normal(size=(30, 30))) * 0.05 + np.eye(30)),
        "banded inverse": BandedInverse([1, -0.5, 0.2, 0.1], 30),
        "tree": tree_aggregation(32),
        "buffered": BufferedToeplitz([0.3, 0.1], [0.9, 0.5], 30),
    }
    worst: dict[str, float] = {}
    for name, strategy in families.items():
        for kind, dtype, lookahead in (
            ("triton", torch.float32, None),
            ("triton", torch.float32, 1),
            ("triton", torch.bfloat16, None),
            ("torch", torch.float32, None),
        ):
            label = f"{name} {kind} {str(dtype)[6:]} T={lookahead}"
            worst[label] = difference(strategy, kind, dtype, lookahead=lookahead)
            # In bfloat16, the thread that replaces a kept number is not the one that read it.
            for kept in (1, None) if name == "banded inverse" else ():
                worst[f"{label} kept={kept}"] = difference(strategy, kind, dtype, kept_inputs=kept)
    worst["NaN and infinity refused"] = float(all(refuses(value) for value in (np.nan, np.inf, -np.inf)))
    return worst


def refuses(value: float) -> bool:
    engine = Engine(Identity(2))
    state, gradient = engine.init({"w": (5000,)}, device=DEVICE), torch.zeros(5000, device=DEVICE)
    gradient[4321] = value
    try:
        engine.add(state, {"w": gradient}, 1.0)
    except ValueError:
        return state.step == 0
    return False


def difference(strategy, kind: str, dtype: torch.dtype, **options) -> float:
    key = Key()
    engine = Engine(strategy, key, kernels=kind, **options)
    shapes = {"w": (3, 1777), "b": (5,), "c": (4096,)}
    state = engine.init(shapes, device=DEVICE)
    secret, oracle, worst = key.derive("noise").secret, strategy.inverse(), 0.0
    memory = {name: oracle.init((int(np.prod(shape)),)) for name, shape in shapes.items()}
    for i in range(strategy.steps):
        gradients = {name: torch.ones(shape, dtype=dtype, device=DEVICE) for name, shape in shapes.items()}
        state = engine.add(state, gradients, 0.7)
        for tensor, name in enumerate(sorted(shapes)):
            z = normals.reference(secret, i, tensor, 0, int(np.prod(shapes[name])))
            y, memory[name] = oracle.step(memory[name], z)
            expected = 1 + 0.7 * y
            got = gradients[name].double().cpu().numpy().reshape(-1)
            error = np.abs(got - expected)
            if dtype == torch.bfloat16:
                error = error / np.maximum(np.abs(expected), 1) * 2.0**-16  # in units of float32's rounding
            worst = max(worst, float(error.max()))
    return worst


def check_far() -> dict[str, float]:
    """Coordinates past 2^31 and steps past 2^32; and a history of more than 2^31 numbers."""
    secret, start, step = bytes(range(32)), 2**33 + 100, 2**35 + 3
    result = {}
    for cipher_rounds in (12, 20):
        got = torch.zeros(5000, device=DEVICE)
        nothing = torch.empty(0, 5000, device=DEVICE)
        far = Vectors([Slice(7, Region.span(start, start + 5000), nothing, nothing)], nothing, nothing)
        TritonExecutor(secret, cipher_rounds, far).ready(Step(((step, 1.0),), ()), [got], 1.0)()
        expected = normals.reference(secret, step, 7, start, start + 5000, cipher_rounds)
        worst = np.abs(got.cpu().numpy() - expected).max()
        result[f"coordinate 2^33, step 2^35, {cipher_rounds} cipher rounds"] = float(worst)
    strategy, key = toeplitz(32, 80), Key()
    engine = Engine(strategy, key)
    state, oracle = engine.init({"w": (D,)}, device=DEVICE), strategy.inverse()
    memory, worst, secret = oracle.init((5000,)), 0.0, key.derive("noise").secret
    gradient = torch.empty(D, device=DEVICE)
    for i in range(80):
        gradient.zero_()
        state = engine.add(state, {"w": gradient}, 1.0)
        y, memory = oracle.step(memory, normals.reference(secret, i, 0, D - 5000, D))
        worst = max(worst, float(np.abs(gradient[-5000:].cpu().numpy() - y).max()))
    result["history of 3.1e9 numbers, last coordinates"] = worst
    return result


def timed(function, repeats: int, warm: int) -> float:
    """Mean milliseconds per call."""
    for _ in range(warm):
        function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy, in TB/s."""
    a, b = torch.rand(2**30, device=DEVICE), torch.empty(2**30, device=DEVICE)
    return 2 * 4 * 2**30 / timed(lambda: b.copy_(a), 20, 5) / 1e9


def time_engine(bands: int, **options) -> dict[str, float]:
    """Milliseconds per step, with everything of one training step but the gradient's own computation."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = Engine(toeplitz(bands) if bands > 1 else Identity(100_000), **options)
    gradient = torch.zeros(D, device=DEVICE)
    state = engine.init({"w": gradient})
    period = engine.schedule.lookahead

    def step() -> None:
        engine.add(state, {"w": gradient}, 1e-3)

    # Fill the ring, so that no read is skipped; the repeats are whole periods.
    warm = -(-max(bands, 8) // period) * period
    milliseconds = timed(step, period * max(2, 24 // period), warm)
    peak = (torch.cuda.max_memory_allocated() - before) / (4 * D)
    limit = bands - 1 + (period if period > 1 else 0) + 2
    return {"ms": milliseconds, "T": period, "peak_vectors": peak, "limit_vectors": limit}


def time_without_history() -> dict[str, dict[str, float]]:
    """Strategies for balls-in-bins: a few buffers, or nothing but draws; the weights' values do not change the time."""
    inverse = BandedInverse([1.0, *(-0.05 for _ in range(15))], 100_000)
    buffered = BufferedToeplitz([0.1, 0.08, 0.05, 0.02], [0.999, 0.98, 0.9, 0.5], 100_000)
    ways = {
        "BLT(4)": (buffered, {}),
        "inverse(16), 0 vectors": (inverse, {"kept_inputs": 0}),
        "inverse(16), 4 vectors": (inverse, {"kept_inputs": 4}),
        "inverse(16), 15 vectors": (inverse, {"kept_inputs": 15}),
    }
    gradient = torch.zeros(D, device=DEVICE)
    baseline = timed(lambda: gradient.add_(torch.randn(D, device=DEVICE), alpha=1e-3), 30, 5)
    rows = {}
    for name, (strategy, options) in ways.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = Engine(strategy, check_finite=False, **options)
        state = engine.init({"w": gradient})
        held = (torch.cuda.memory_allocated() - before) / (4 * D)
        ms = timed(lambda engine=engine, state=state: engine.add(state, {"w": gradient}, 1e-3), 24, 24)
        rows[name] = {"ms": ms, "ratio": ms / baseline, "vectors": held}
        del state
    return rows


def time_roll(bands: int) -> float:
    """What one writes first in torch: roll the history, draw, combine, add."""
    history = torch.zeros(bands - 1, D, device=DEVICE)
    weights = torch.rand(bands - 1, device=DEVICE) / bands
    gradient = torch.zeros(D, device=DEVICE)

    def step() -> None:
        nonlocal history
        y = torch.randn(D, device=DEVICE) - weights @ history
        history = torch.roll(history, 1, 0)
        history[0] = y
        gradient.add_(y, alpha=1e-3)

    return timed(step, 5, 2)


def peer(kind: str, bands: int) -> None:
    """Times JAX in this process: jax_privacy's own code, the same roll written out, or bandmf.jax."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    coefficients = jnp.asarray(1 / np.sqrt(np.arange(1, bands + 1)), jnp.float32)
    gradient = jnp.zeros(D, jnp.float32)
    if kind == "jax_privacy":
        noise_addition, toeplitz_module = import_jax_privacy()
        matrix = toeplitz_module.inverse_as_streaming_matrix(coefficients)
        privatizer = noise_addition.matrix_factorization_privatizer(matrix, stddev=1e-3, prng_key=1)
        state, update = privatizer.init(gradient), jax.jit(privatizer.update, donate_argnums=(0, 1))
    else:
        from bandmf.jax import Engine as JaxEngine

        engine = JaxEngine(toeplitz(bands, 1000))
        state = engine.init({"w": (D,)})
        update = jax.jit(lambda g, s: engine.add(s, g, 1e-3), donate_argnums=(0, 1))
        gradient = {"w": gradient}
    begin = time.perf_counter()
    for _ in range(2):
        gradient, state = jax.block_until_ready(update(gradient, state))
    compile_seconds = time.perf_counter() - begin
    count, begin = 16, time.perf_counter()
    for _ in range(count):
        gradient, state = update(gradient, state)
    jax.block_until_ready((gradient, state))
    ms = (time.perf_counter() - begin) / count * 1e3
    peak = jax.devices()[0].memory_stats().get("peak_bytes_in_use", 0) / (4 * D)
    print(json.dumps({"ms": ms, "peak_vectors": peak, "compile_s": compile_seconds}))


def import_jax_privacy():
    """jax_privacy's noise code alone: its package also imports an accountant, which timing does not need."""
    import types
    from unittest.mock import MagicMock

    folder = next(Path(".venv/lib").glob("python*/site-packages"))
    sys.path.append(str(folder))
    package = types.ModuleType("jax_privacy")
    package.__path__ = [str(folder / "jax_privacy")]
    sys.modules["jax_privacy"] = package
    sys.modules.setdefault("dp_accounting", MagicMock())
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz as toeplitz_module

    return noise_addition, toeplitz_module


def run_peer(kind: str, bands: int) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--peer", kind, "--bands", str(bands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def tune() -> dict[str, float]:
    """Milliseconds per step for other look-aheads, to choose T and the inner level."""
    result = {}
    for bands in (16, 32, 64, 128):
        for lookahead in sorted({6, 8, 11, 12, 16} & set(range(1, bands))):
            for inner in (4, 16):
                INNER["cuda"] = inner
                result[f"b={bands} T={lookahead} inner={inner}"] = time_engine(
                    bands, check_finite=False, lookahead=lookahead
                )["ms"]
    INNER["cuda"] = 4
    return result


def measure(quick: bool) -> dict[str, object]:
    gradient, bandwidth = torch.zeros(D, device=DEVICE), copy_bandwidth()
    baseline = timed(lambda: gradient.add_(torch.randn(D, device=DEVICE), alpha=1e-3), 30, 5)
    rows: list[dict[str, object]] = []
    for bands in BANDS:
        ahead = time_engine(bands, check_finite=False)
        row: dict[str, object] = {"bands": bands, **ahead, "ratio": ahead["ms"] / baseline}
        row["checked_ms"] = time_engine(bands)["ms"]
        row["rounds12_ms"] = time_engine(bands, check_finite=False, cipher_rounds=12)["ms"]
        single = time_engine(bands, check_finite=False, lookahead=1)["ms"]
        bytes_moved = 4 * D * (bands - 1 + (1 if bands > 1 else 0) + 2)
        row["single_ms"] = single
        row["single_bandwidth"] = bytes_moved / single / 1e9 / bandwidth
        if bands in (8, 16):
            row["torch_roll_ms"] = time_roll(bands)
        rows.append(row)
    torch.cuda.empty_cache()
    for row in rows:
        if row["bands"] in (16, 64) and not quick:
            row["jax_privacy"] = run_peer("jax_privacy", row["bands"])
            row["bandmf_jax"] = run_peer("bandmf", row["bands"])
    return {"copy_TB_s": bandwidth, "randn_add_ms": baseline, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer")
    parser.add_argument("--bands", type=int)
    given = parser.parse_args()
    if given.peer:
        peer(given.peer, given.bands)
        return
    result: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "d": D,
    }
    sections = {
        "check": check,
        "far": check_far,
        "tune": tune,
        "without history": time_without_history,
        "measure": lambda: measure(given.quick),
    }
    if not given.tune:
        del sections["tune"]
    for name, section in sections.items():
        begin = time.perf_counter()
        try:
            result[name] = section()
        except Exception as error:  # one failed section must not lose the others' figures
            import traceback

            traceback.print_exc()
            result[name] = f"failed: {error}"
        seconds = time.perf_counter() - begin
        print(f"== {name} ({seconds:.0f} s)", json.dumps(result[name], indent=1), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
