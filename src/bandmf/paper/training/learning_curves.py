"""Losses against error, by strategy: learning rates tuned on one part of the text, losses read off on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bandmf import plots
from bandmf._types import FloatArray
from bandmf.paper.table import Table
from bandmf.paper.training import machines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDED, BUFFERED = ("1 band", "8 bands", "64 bands", "512 bands"), "BLT"
OPTIMIZERS = {"adam": "Adaptive optimizer (Adam)", "momentum": "Non-adaptive optimizer (SGD with momentum)"}


@dataclass(frozen=True)
class Curves:
    """Evaluation losses of every strategy at the same errors."""

    errors: FloatArray
    losses: dict[str, FloatArray]  # by strategy, (seeds, errors)
    at_end: int  # of how many settings the best rate is the first or last of those tried
    settings: int

    def mean(self, name: str) -> FloatArray:
        return self.losses[name].mean(axis=0)

    @property
    def height(self) -> float:
        """From the lowest to the highest loss of the banded strategies."""
        means = [self.mean(name) for name in BANDED]
        return float(np.ptp(means))


def strategies(table: Table) -> list[str]:
    """From few bands to many; a BLT has as many as steps."""
    bands = dict(zip(table.column("strategy"), table.column("bands"), strict=True))
    return sorted(bands, key=bands.__getitem__)


def seeds(table: Table) -> list[int]:
    """Those that every strategy was trained with."""
    groups = [table.where(strategy=name).values("seed") for name in strategies(table)]
    return sorted(set.intersection(*map(set, groups))) if groups else []


def tuned(rows: Table, seeds: list[int]) -> tuple[Table, int]:
    """At each RMSE the rows of the rate with the least mean validation loss, one for each seed, by RMSE and seed.

    Rates count that were tried with every seed. Also: at how many RMSE the rate is an end of those tried.
    """
    rates = sorted(set.intersection(*(set(rows.where(seed=seed).values("learning_rate")) for seed in seeds)))
    rows = Table(row for row in rows if row["seed"] in seeds)
    found, at_end = Table(), 0
    for level in rows.values("rmse"):
        here = rows.where(rmse=level)
        means = [np.mean(here.where(learning_rate=rate).column("validation_loss")) for rate in rates]
        best = int(np.argmin(means))
        at_end += best in (0, len(rates) - 1)
        for seed in seeds:
            found += here.where(learning_rate=rates[best], seed=seed)
    return found, at_end


def curves_of(table: Table, optimizer: str, error: str) -> Curves:
    """All strategies of one optimizer at equal `error`: "rmse", as trained, or "max_error".

    Max errors differ between strategies of equal RMSE: losses are interpolated, over the logarithm of the error, at
    those of the first strategy that all others reach.
    """
    rows = table.where(optimizer=optimizer)
    common, at_end, settings = seeds(rows), 0, 0
    places, losses = {}, {}
    for name in strategies(rows):
        chosen, ends = tuned(rows.where(strategy=name), common)
        at_end, settings = at_end + ends, settings + len(chosen) // len(common)
        places[name] = np.array(chosen.column(error)[:: len(common)], dtype=float)
        losses[name] = np.array(chosen.column("evaluation_loss"), dtype=float).reshape(-1, len(common)).T
    least, most = max(p[0] for p in places.values()), min(p[-1] for p in places.values())
    errors = next(iter(places.values()))
    errors = errors[(errors >= least * (1 - 1e-9)) & (errors <= most * (1 + 1e-9))]
    aligned = {
        name: np.array([np.interp(np.log(errors), np.log(places[name]), one) for one in losses[name]])
        for name in losses
    }
    return Curves(errors, aligned, at_end, settings)


def judged(table: Table) -> Table | None:
    """The rows that tell, or None: all strategies at full size, with both optimizers and two seeds at least."""
    rows = machines.rows_of(table, "full")
    for optimizer in OPTIMIZERS:
        here = rows.where(optimizer=optimizer)
        if set(strategies(here)) != {*BANDED, BUFFERED} or len(seeds(here)) < 2:
            return None
    return rows


def draw(axis: Axes, table: Table, optimizer: str, error: str) -> None:
    """A line for each strategy: the mean over seeds, and their range."""
    rows = table.where(optimizer=optimizer)
    common = seeds(rows)
    for color, name in zip(plots.COLORS, strategies(rows), strict=False):
        chosen, _ = tuned(rows.where(strategy=name), common)
        places = chosen.column(error)[:: len(common)]
        losses = np.reshape(chosen.column("evaluation_loss"), (-1, len(common)))
        axis.plot(places, losses.mean(axis=1), color=color, marker="o", markersize=3.5, label=name)
        axis.fill_between(places, losses.min(axis=1), losses.max(axis=1), color=color, alpha=0.2, linewidth=0)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(ylabel="evaluation cross entropy (nats)", title=OPTIMIZERS[optimizer])
