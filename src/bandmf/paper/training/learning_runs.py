"""Trains the models of the learning experiment: what a strategy's error does to the loss on new text.

All strategies get noise of the same RMSE, level by level, so they are compared at equal RMSE without interpolation;
their noise multipliers are what the levels ask for. A point trains one model for every level and learning rate, all
at once; rates are tuned on the validation part of the text by whoever reads the rows, and judged on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bandmf import max_error, optimize, rmse, sensitivity
from bandmf.demo import text
from bandmf.paper.table import Row, Value
from bandmf.paper.training.machines import own_torch_settings
from bandmf.paper.training.many_models import Training, train
from bandmf.paper.training.tiny_transformer import Sizes, mean_losses
from bandmf.strategies import Strategy

BLT_BUFFERS = 5
CLIP_NORM = 1.0


def spread(low: float, high: float, count: int) -> tuple[float, ...]:
    """So many numbers in equal ratios."""
    return tuple(float(f"{value:.4g}") for value in np.geomspace(low, high, count))


@dataclass(frozen=True)
class Setting:
    """How much is trained, and on what."""

    text: str
    steps: int
    batch: int
    bands: tuple[int, ...]  # 0 is the BLT
    levels: tuple[float, ...]  # RMSE in clip norms
    rates: dict[str, tuple[float, ...]]
    seeds: int
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4

    def sizes(self, alphabet: str) -> Sizes:
        return Sizes(len(alphabet), self.context, self.width, self.layers, self.heads)


SETTINGS = {
    "full": Setting(
        text="tiny Shakespeare",
        steps=2048,
        batch=32,
        bands=(1, 8, 64, 512, 0),
        levels=spread(0.1, 100, 7),
        rates={"momentum": spread(0.001, 2.048, 12), "adam": spread(0.0001, 0.4096, 13)},
        seeds=3,
    ),
    "tiny": Setting(
        text="topics",
        steps=12,
        batch=4,
        bands=(1, 4, 0),
        levels=(0.1, 10.0),
        rates={"momentum": (0.1, 1.0), "adam": (0.001, 0.01)},
        seeds=2,
        context=8,
        width=8,
        layers=1,
        heads=2,
    ),
}


def points_of(setting: str) -> list[dict[str, Value]]:
    """Seed by seed, so that a run that is cut off has few seeds of everything."""
    chosen = SETTINGS[setting]
    return [
        {"setting": setting, "bands": bands, "optimizer": optimizer, "seed": seed}
        for seed in range(chosen.seeds)
        for optimizer in chosen.rates
        for bands in chosen.bands
    ]


@own_torch_settings()
def compute(
    setting: str,
    bands: int,
    optimizer: str,
    seed: int,
    folder: str | None = None,
    rates: tuple[float, ...] | None = None,
) -> list[Row]:
    """The losses of one strategy and optimizer at all levels and rates; `folder` holds the text.

    `rates` are the setting's if none are given; a model's losses depend on its own rate alone, up to rounding.
    """
    chosen, device = SETTINGS[setting], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content, strategy = text.load(chosen.text, folder), strategy_of(chosen.steps, bands)
    error, largest = rmse(strategy), max_error(strategy)
    grid = [(level, rate) for level in chosen.levels for rate in rates or chosen.rates[optimizer]]
    multipliers = torch.tensor([level / error for level, _ in grid], device=device)
    each_rate = torch.tensor([rate for _, rate in grid], device=device)
    sizes = chosen.sizes(content.alphabet)
    training = Training(sizes, strategy, optimizer, chosen.batch, CLIP_NORM, seed)
    numbers = torch.tensor(content.train, device=device)
    flat = train(training, numbers, multipliers * sensitivity(strategy), each_rate)
    found = [
        mean_losses(sizes, flat, pieces(part, chosen.context).to(device), chosen.batch).tolist()
        for part in (content.validation, content.test)
    ]
    return [
        {
            "setting": setting,
            "strategy": name_of(bands),
            "bands": strategy.bands,
            "optimizer": optimizer,
            "seed": seed,
            "rmse": level,
            "max_error": level * largest / error,
            "noise_multiplier": level / error,
            "learning_rate": rate,
            "validation_loss": finite(validation),
            "evaluation_loss": finite(evaluation),
        }
        for (level, rate), validation, evaluation in zip(grid, *found, strict=True)
    ]


def name_of(bands: int) -> str:
    """What a strategy is called in rows and pictures."""
    return {0: "BLT", 1: "1 band"}.get(bands, f"{bands} bands")


@cache
def strategy_of(steps: int, bands: int) -> Strategy:
    """The strategy of least RMSE on running sums: banded Toeplitz, or a BLT."""
    if bands == 0:
        return optimize.buffered_toeplitz(steps, BLT_BUFFERS).strategy
    return optimize.banded_toeplitz(steps, bands).strategy


def pieces(numbers: np.ndarray, context: int) -> Tensor:
    """A text as examples side by side; each begins with the last character of the one before."""
    return torch.tensor(numbers).unfold(0, context + 1, context).contiguous()


def finite(loss: float) -> float:
    """Infinite where training diverged."""
    return loss if np.isfinite(loss) else float("inf")
