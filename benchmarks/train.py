"""What private training costs: time per step of a transformer, without privacy, with Opacus, with bandmf.

python benchmarks/train.py                    on the CPU (a few minutes)
python benchmarks/train.py --device cuda      on a GPU, with a larger model
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import bandmf
import bandmf.torch
from bandmf.planning import Plan
from bandmf.strategies import BandedToeplitz
from table import show

BANDS = (1, 8, 32, 128)
EXAMPLES, LENGTH, WORDS = 8192, 64, 512


class Transformer(nn.Module):
    """Encoder layers with attention written in linear layers, which every clipping method supports."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    *(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)),
                    *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)),
                ]
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.word(text)
        for norm1, mix, out, norm2, up, down in self.layers:
            q, k, v = mix(norm1(x)).chunk(3, dim=-1)
            x = x + out(nn.functional.scaled_dot_product_attention(q, k, v))
            x = x + down(nn.functional.gelu(up(norm2(x))))
        return self.head(x.mean(1))


def median_times(kinds: dict[str, Callable[[], None]], steps: int, device: str) -> dict[str, float]:
    """The median time of a step of each kind, in milliseconds.

    The kinds take turns, so that a slow moment of the machine hits all alike; the first turns are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(steps + 3):
        for name, step in kinds.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Work:
    """The model, the data, and one training step of each kind."""

    def __init__(self, device: str, width: int, layers: int, batch: int) -> None:
        self.device, self.size, self.batch = device, (width, layers), batch
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(WORDS, (EXAMPLES, LENGTH), generator=generator)
        self.labels = torch.randint(WORDS, (EXAMPLES,), generator=generator)

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Transformer(*self.size).to(self.device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(self.device)), y.to(self.device)).backward()
        optimizer.step()

    def public(self) -> Callable[[], None]:
        model, optimizer = self.fresh()
        return lambda: self.train(model, optimizer, self.text[: self.batch], self.labels[: self.batch])

    def opacus(self) -> Callable[[], None]:
        """Opacus' own DP-SGD: its hooks, clipping and independent noise, on a batch of the expected size."""
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        model, optimizer = self.fresh()
        model = GradSampleModule(model)
        optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=self.batch)
        return lambda: self.train(model, optimizer, self.text[: self.batch], self.labels[: self.batch])

    def bandmf(self, bands: int) -> Callable[[], None]:
        """A whole logical step, sampling and loading included."""
        model, optimizer = self.fresh()
        data = torch.utils.data.TensorDataset(self.text, self.labels)

        def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        plan = self.plan(bands)
        training = bandmf.torch.Training(model, losses, optimizer, data, plan, clip_norm=1.0, verify=False)
        return lambda: training.advance() and None

    def plan(self, bands: int) -> Plan:
        """Any plan will do for timing: sigma is one, the strategy's entries do not matter."""
        steps = 1024
        strategy = BandedToeplitz(1 / (1 + torch.arange(bands).double().numpy()), steps)
        return Plan(
            workload=bandmf.workloads.prefix(steps),
            batch_size=self.batch,
            examples=EXAMPLES,
            epsilon=math.inf,  # it promises nothing: only time is measured here
            delta=1e-5,
            adjacency="add-remove",
            strategy=strategy,
            noise_multiplier=1.0,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    size = (768, 6, 64) if arguments.device == "cuda" else (128, 2, 64)
    work = Work(arguments.device, *size)
    kinds: dict[str, Callable[[], None]] = {"not private": work.public(), "Opacus DP-SGD": work.opacus()}
    kinds |= {f"bandmf, {bands} bands": work.bandmf(bands) for bands in BANDS}
    medians = median_times(kinds, arguments.steps, arguments.device)
    base = medians["bandmf, 1 bands"]
    rows = [
        {"what": name, "ms per step": value, "over DP-SGD (bandmf, 1 band)": f"{value / base - 1:+.1%}"}
        for name, value in medians.items()
    ]
    parameters = sum(p.numel() for p in work.fresh()[0].parameters())
    title = f"Training a transformer of {parameters / 1e6:.2f} million parameters, batch {work.batch}"
    show(f"{title}, {arguments.device}", rows, ("torch",), arguments.json)


if __name__ == "__main__":
    main()
