"""What clipping costs: a whole private step against the step of the same loop without privacy, and against Opacus.

python benchmarks/clipping.py                              small models on the CPU (some minutes)
python benchmarks/clipping.py --device cuda                models of real size on a GPU
python benchmarks/clipping.py --device cuda --models gpt2-small gpt2-medium --precisions bf16

The kinds take turns in one run, so that a slow moment of the machine hits all alike. Every kind takes AdamW's step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bandmf
from bandmf.noise.schedule import INNER, Schedule
from bandmf.planning import Plan
from bandmf.strategies import BandedToeplitz
from bandmf.torch import Training
from bandmf.torch.losses import classification, language_model
from models import MODELS, Setting
from table import show

CLIP_NORM = 1.0
STEPS = 4096


@dataclass
class Kind:
    """One way to train: a step, and the memory that it holds between steps, noise and data set aside."""

    step: Callable[[], None]
    held: float


class Work:
    """A model, its data, and one training step of each kind."""

    def __init__(self, setting: Setting, device: str, precision: str) -> None:
        self.setting, self.device, self.precision = setting, device, precision
        self.aside = 0  # bytes of noise and of the data set, which do not count

    def fresh(self, for_opacus: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.setting.make(for_opacus).to(self.device).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-4, foreach=True)

    def autocast(self) -> Any:
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def scores(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            found = model(**self.setting.inputs(x))
        return getattr(found, "logits", found)

    def losses(self, scores: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return language_model(scores, x) if self.setting.text else classification(scores, y)

    def data(self, examples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, so that loading costs no kind anything."""
        x, y = self.setting.data(examples)
        return x.to(self.device), y.to(self.device)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data(self.setting.batch)

    def public(self) -> Callable[[], None]:
        return self.ordinary(*self.fresh())

    def ordinary(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        x, y = self.batch()

        def step() -> None:
            optimizer.zero_grad()
            self.losses(self.scores(model, x), x, y).mean().backward()
            optimizer.step()

        return step

    def bandmf(self, clipping: str = "auto") -> Callable[[], None]:
        """A whole private step: loading, clipping, the ledger, noise of so many bands, and the optimizer."""
        model, optimizer = self.fresh()
        plan = self.plan()
        data = torch.utils.data.TensorDataset(*self.data(plan.examples))

        def losses(model: nn.Module, batch: Any) -> torch.Tensor:
            x, y = batch
            return self.losses(self.scores(model, x), x, y)

        training = Training(model, losses, optimizer, data, plan, clip_norm=CLIP_NORM, clipping=clipping, verify=False)
        # Past noise and sums prepared ahead, of which each is a vector of the model's size.
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.aside = 4 * trained * Schedule(plan.strategy, inner=INNER[self.device]).vectors
        self.aside += sum(each.nbytes for each in data.tensors) if self.device == "cuda" else 0
        return lambda: training.advance() and None

    def plan(self) -> Plan:
        """Any will do for timing; with parts of equal size and probability one, all batches have the same size."""
        bands = self.setting.bands
        strategy = BandedToeplitz([1 / (1 + k) for k in range(bands)], STEPS)
        return Plan(
            workload=bandmf.workloads.prefix(STEPS), batch_size=self.setting.batch,
            examples=bands * self.setting.batch, epsilon=math.inf, delta=1e-5, adjacency="zero-out",
            strategy=strategy, noise_multiplier=1.0,
        )  # fmt: skip

    def opacus_hooks(self) -> Callable[[], None]:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        model, optimizer = self.fresh(for_opacus=True)
        model = GradSampleModule(model)
        optimizer = DPOptimizer(
            optimizer, noise_multiplier=1.0, max_grad_norm=CLIP_NORM, expected_batch_size=self.setting.batch
        )
        return self.ordinary(model, optimizer)

    def opacus_ghost(self, replaced: bool = True) -> Callable[[], None]:
        """With transformers' Conv1D replaced by nn.Linear, for which Opacus has a rule, or the model as it is."""
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        model, optimizer = self.fresh(for_opacus=replaced)
        model = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=1.0, max_grad_norm=CLIP_NORM, expected_batch_size=self.setting.batch
        )
        x, y = self.batch()

        def step() -> None:
            optimizer.zero_grad()
            losses = self.losses(self.scores(model, x), x, y)
            DPTensorFastGradientClipping(model, optimizer, losses, "mean").backward()
            optimizer.step()

        return step


KINDS: dict[str, Callable[[Work], Callable[[], None]]] = {
    "not private": Work.public,
    "bandmf": Work.bandmf,
    "bandmf vmap": lambda work: work.bandmf("vmap"),
    "opacus ghost": Work.opacus_ghost,
    "opacus ghost, model as it is": lambda work: work.opacus_ghost(replaced=False),
    "opacus hooks": Work.opacus_hooks,
}


def measure(work: Work, kinds: list[str], steps: int) -> list[dict[str, Any]]:
    """Median time of a step, and peak memory, of each kind; what fails says why."""
    made: dict[str, Kind] = {}
    failed: dict[str, str] = {}
    for name in kinds:
        before = allocated(work.device)
        try:
            step = KINDS[name](work)
            for _ in range(3):
                step()
            aside = work.aside if name.startswith("bandmf") else 0
            made[name] = Kind(step, allocated(work.device) - before - aside)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:60]}"
            gc.collect()
    times: dict[str, list[float]] = {name: [] for name in made}
    peaks: dict[str, float] = {}
    for _ in range(steps):
        for name, kind in made.items():
            start_peak, start = allocated(work.device, reset=True), now(work.device)
            kind.step()
            times[name].append(1e3 * (now(work.device) - start))
            peaks[name] = kind.held + peak(work.device) - start_peak
    medians = {name: statistics.median(values) for name, values in times.items()}
    base, memory = medians["not private"], max(peaks["not private"], 1)
    rows = [
        {"model": work.setting.name, "precision": work.precision, "step": name, "ms": medians[name],
         "over not private": f"{medians[name] / base:.2f}x", "peak GB": peaks[name] / 1e9,
         "memory": f"{peaks[name] / memory:.2f}x"}
        for name in made
    ]  # fmt: skip
    empty = {"ms": math.nan, "over not private": "", "peak GB": math.nan, "memory": ""}
    base_row = {"model": work.setting.name, "precision": work.precision}
    return rows + [{**base_row, "step": f"{name} ({why})", **empty} for name, why in failed.items()]


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated(device: str, reset: bool = False) -> float:
    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def peak(device: str) -> float:
    return float(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--precisions", nargs="*", help="fp32, tf32, bf16")
    usual = ["bandmf", "opacus ghost", "opacus hooks"]
    parser.add_argument("--kinds", nargs="*", default=usual, choices=list(KINDS), help="beside: not private")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    names = arguments.models or [n for n, s in MODELS.items() if s.device == arguments.device]
    precisions = arguments.precisions or (["tf32", "bf16"] if arguments.device == "cuda" else ["fp32"])
    rows = []
    for name in names:
        for precision in precisions:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            kinds = list(dict.fromkeys(["not private", *arguments.kinds]))
            rows += measure(Work(MODELS[name], arguments.device, precision), kinds, arguments.steps)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    if arguments.device != "cuda":  # torch counts memory on GPUs only
        rows = [{k: v for k, v in row.items() if k not in ("peak GB", "memory")} for row in rows]
    show(f"A training step, {arguments.device}", rows, ("torch",), arguments.json)


if __name__ == "__main__":
    main()
