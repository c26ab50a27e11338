"""Results -> figures. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from bandmf._types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colors: told apart by every kind of color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


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
        axis.set_prop_cycle(color=COLORS)
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


def bands(curve: list[tuple[int, float]], chosen: int, names: dict[int, str], title: str) -> Figure:
    """Error against bands, with the choice marked; curve holds (bands, error of mean gradients).

    Points with `names`, by their bands, are labeled.
    """
    figure, (axis,) = panels(1)
    axis.loglog(*zip(*curve, strict=True), marker="o", markersize=4)
    axis.plot(
        chosen, dict(curve)[chosen], "o", color=COLORS[1], markersize=10, label=f"chosen: {chosen} bands"
    )
    for place, error in curve:
        if place in names:
            side = "left" if place == 1 else "right"
            axis.annotate(
                names[place], (place, error), xytext=(0, 8), textcoords="offset points", ha=side, fontsize=9
            )
    axis.set(xlabel="bands", ylabel="RMSE of mean gradients", title=title)
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    return figure


def mechanisms(epsilons: tuple[float, ...], curves: dict[str, list[float]], title: str) -> Figure:
    """RMSE of every mechanism over the best one's, against epsilon."""
    figure, (axis,) = panels(1, width=7.5, height=4.6)
    styles = ("-", "--", ":")
    by_last = sorted(curves.items(), key=lambda item: -item[1][-1])
    for place, (name, ratios) in enumerate(by_last):
        style = styles[place // len(COLORS) % len(styles)]
        axis.loglog(epsilons, ratios, style, marker="o", markersize=3.5, label=name)
    axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="epsilon", ylabel="RMSE over the best mechanism's", title=title)
    axis.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    return figure


def memory(curves: dict[str, list[tuple[int, float]]], title: str) -> Figure:
    """RMSE against the vectors that the noise keeps: none at the left, then on a log scale."""
    figure, (axis,) = panels(1, width=7.5, height=4.4)
    none = 0.5  # where "none" is drawn
    for name, points in curves.items():
        vectors, errors = zip(*points, strict=True)
        places = [max(count, none) for count in vectors]
        axis.loglog(places, errors, marker="o", markersize=4, label=name)
    most = max(count for points in curves.values() for count, _ in points)
    ticks = [none, *(4**i for i in range(12) if 4**i <= most)]
    axis.set_xticks(ticks, ["none", *(f"{tick:g}" for tick in ticks[1:])])
    axis.set_xticks([], minor=True)
    every = [error for points in curves.values() for _, error in points]
    lowest, highest = min(every), max(every)
    marks = [
        mark
        for mark in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200)
        if lowest / 1.3 <= mark <= highest
    ]
    axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axis.set_yticks([], minor=True)
    axis.set(xlabel="noise history, in vectors of the model's size", ylabel="RMSE", title=title)
    axis.legend(frameon=False, fontsize=9)
    return figure


def best_bands(epochs: list[int], epsilons: list[float], bands: list[list[int]], title: str) -> Figure:
    """The map of best bands over epochs (columns) and epsilon (rows)."""
    figure, (axis,) = panels(1, width=6.4, height=4.2)
    axis.grid(visible=False)
    axis.imshow(np.log2(bands), aspect="auto", cmap="viridis", origin="lower")
    light = np.log2(bands) < 0.6 * np.log2(np.max(bands))
    for row, values in enumerate(bands):
        for column, value in enumerate(values):
            ink = "white" if light[row, column] else "black"
            axis.text(column, row, str(value), ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(epochs)), [str(k) for k in epochs])
    axis.set_yticks(range(len(epsilons)), [f"{epsilon:g}" for epsilon in epsilons])
    axis.set(xlabel="epochs", ylabel="epsilon", title=title)
    return figure


def noise_costs(curves: dict[str, list[tuple[int, float, float]]], title: str) -> Figure:
    """Time and memory of noise against bands; curves hold (bands, milliseconds, vectors), by name.

    "independent noise" has nothing to do with bands: a level line.
    """
    figure, (left, right) = panels(2)
    for name, points in curves.items():
        widths, *values = zip(*points, strict=True)
        for axis, value in zip((left, right), values, strict=True):
            if name == "independent noise":
                axis.axhline(value[0], linestyle="--", color="#777777", label=name)
            else:
                axis.plot(widths, value, marker="o", markersize=3.5, label=name)
    for axis, label in ((left, "milliseconds per step"), (right, "peak memory, in gradients")):
        axis.set(xscale="log", yscale="log", xlabel="bands", ylabel=label)
    left.set_title(title)
    right.legend(frameon=False, fontsize=8)
    return figure


def accuracy(curves: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]], title: str) -> Figure:
    """Test accuracy against step, by mechanism: the mean of all runs, and each run faintly."""
    figure, (axis,) = panels(1, width=6.2, height=4.0)
    for color, (name, runs) in zip(COLORS, curves.items(), strict=False):
        for steps, values in runs:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        mean = np.mean([values for _, values in runs], axis=0)
        axis.plot(runs[0][0], mean, color=color, marker="o", markersize=4, label=f"{name}: {mean[-1]:.1%}")
    axis.set(xlabel="step", ylabel="test accuracy", title=title)
    axis.legend(frameon=False, loc="lower right")
    return figure
