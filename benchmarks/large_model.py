"""A model beside which the noise of cyclic plans does not fit: GPT-2 large, AdamW, batches of 16 x 512, on one GPU.

    python benchmarks/large_model.py --plans FOLDER                  certify the plans (once, on any machine)
    python benchmarks/large_model.py --plans FOLDER --device cuda    time and memory of each

Bins have different sizes, about 16, cut into physical batches of 24; times are for 16 examples.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bandmf
from bandmf.planning import Plan
from bandmf.torch import Training
from clipping import CLIP_NORM, Work
from models import MODELS
from table import show

BUDGET = {"epsilon": 8.0, "delta": 1e-6, "examples": 128 * 16, "batch_size": 16, "steps": 1024}
NOISE = {"BLT(4) in bins": {"mechanism": "blt"}, "inverse(16) in bins": {"mechanism": "banded-inverse"}}


def make_plans(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in NOISE.items():
        bandmf.plan(**BUDGET, **options).save(folder / f"{name}.json")


def measure(step: Callable[[], int | None], steps: int) -> dict[str, float]:
    """Milliseconds for 16 examples; a step says how many it took."""
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    begin, examples = time.perf_counter(), 0
    for _ in range(steps):
        examples += step() or 16
    torch.cuda.synchronize()
    ms = (time.perf_counter() - begin) / examples * 16 * 1e3
    return {"ms": ms, "peak GB": torch.cuda.max_memory_allocated() / 1e9}


def private_step(work: Work, plan: Plan) -> Callable[[], int]:
    model, optimizer = work.fresh()
    data = torch.utils.data.TensorDataset(*work.data(plan.examples or 0))
    taken = 0  # examples of the last step, which only a benchmark may look at

    def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nonlocal taken
        x, y = batch
        taken += len(x)
        return work.losses(work.scores(model, x), x, y)

    training = Training(model, losses, optimizer, data, plan, clip_norm=CLIP_NORM, verify=False, micro_batch=24)

    def step() -> int:
        nonlocal taken
        taken = 0
        training.advance()
        return taken

    return step


def row(name: str, make: Callable[[], Callable[[], int | None]], steps: int) -> dict[str, object]:
    """One way to train, or why it is impossible."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        return {"step": name, **measure(make(), steps)}
    except torch.OutOfMemoryError as error:
        needed = str(error).split(".")[1].strip()
        return {"step": f"{name}: out of memory ({needed})", "ms": float("nan"), "peak GB": float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device is None:
        make_plans(arguments.plans)
        return
    plans = {path.stem: Plan.load(path) for path in sorted(arguments.plans.glob("*.json"))}
    work = Work(MODELS["gpt2-large"], arguments.device, "bf16")
    rows = [row("not private", work.public, arguments.steps)]
    cyclic = Work(dataclasses.replace(MODELS["gpt2-large"], bands=32), arguments.device, "bf16")
    for name, plan in {**plans, "32 cyclic bands": cyclic.plan()}.items():
        rows.append(row(name, lambda plan=plan: private_step(work, plan), arguments.steps))
    show("GPT-2 large, batches of 16 x 512, AdamW, bf16", rows, ("torch",), arguments.json)


if __name__ == "__main__":
    main()
