"""Results -> figures. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from bandmf._check import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG, SVG or PDF, by the ending of the name."""
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return Path(path)


def panels(count: int, width: float = 5.2, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A row of panels in the house style, without any window."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_prop_cycle(color=COLOURS)
    return figure, axes


def strategy(columns: dict[int, FloatArray], errors: dict[str, FloatArray], title: str) -> Figure:
    """Coefficients of some columns (by step), and per-step squared errors, by strategy."""
    figure, (left, right) = panels(2)
    for step, column in columns.items():
        left.plot(np.arange(len(column)), column, marker="o", markersize=3, label=f"column {step}")
    left.set(xlabel="steps after the column's own", ylabel="entry of C", title=title)
    left.legend(frameon=False)
    for name, error in errors.items():
        right.plot(np.arange(len(error)), np.sqrt(error), label=name)
    right.set(xlabel="step", ylabel="error of the running sum", title="Noise in the sum of gradients so far")
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    return figure


def bands(curve: list[tuple[int, float]], chosen: int, title: str) -> Figure:
    """Error against bands, with the choice marked; curve holds (bands, error of mean gradients)."""
    figure, (axis,) = panels(1)
    axis.loglog(*zip(*curve, strict=True), marker="o", markersize=4)
    axis.plot(
        chosen, dict(curve)[chosen], "o", color=COLOURS[1], markersize=10, label=f"chosen: {chosen} bands"
    )
    ends = {min(curve): "DP-SGD", max(curve): "no amplification"}
    for (place, error), name in ends.items():
        side = "left" if place == 1 else "right"
        axis.annotate(name, (place, error), xytext=(0, 8), textcoords="offset points", ha=side, fontsize=9)
    axis.set(xlabel="bands", ylabel="RMSE of mean gradients", title=title)
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    return figure
