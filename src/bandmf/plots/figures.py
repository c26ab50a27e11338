"""The pictures of comparisons, strategies, benchmarks and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps

from bandmf._types import FloatArray
from bandmf.plots.colors import GRAY, MECHANISMS
from bandmf.plots.style import End, end_labels, end_of, line_of, panels
from bandmf.plots.ticks import fours, plain
from bandmf.strategies import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST = 256  # entries of a column
_NONE = 0.5  # where "none" is drawn on a logarithmic axis


def columns(shown: Strategy) -> Figure:
    """Some columns of a strategy."""
    figure, (axis,) = panels(1, width=6.2)
    _draw_columns(axis, shown)
    return figure


def _draw_columns(axis: Axes, shown: Strategy) -> None:
    """The first column, one in the middle, and one that the end cuts off; all of them bent the same way are one."""
    n, bands = shown.steps, shown.bands
    places = list(dict.fromkeys((0, n // 2, max(0, n - bands // 2 - 1))))
    shades = colormaps["Blues"](np.linspace(0.9, 0.5, len(places)))
    ends = []
    for shade, place in zip(shades, places, strict=True):
        column = shown.columns(place, place + 1)[0][: min(_LONGEST, n - place)]
        marker = "o" if len(column) <= 64 else ""
        axis.plot(np.arange(len(column)), column, marker=marker, markersize=3, color=shade)
        ends.append(End(len(column) - 1, float(column[-1]), f"column {place:,}", shade))
    title = f"{type(shown).__name__}, {n:,} steps, {bands:,} bands"
    axis.set(xlabel="steps after the column's own", ylabel="entry of C", title=title)
    end_labels(axis, ends)


def strategy(shown: Strategy, errors: dict[str, FloatArray]) -> Figure:
    """Some columns of a strategy, and per-step squared errors: its own, then others."""
    figure, (left, right) = panels(2, width=6.2)
    _draw_columns(left, shown)
    ends = []
    for place, (name, error) in enumerate(errors.items()):
        color, width = (MECHANISMS["BandMF"], 2.8) if place == 0 else (GRAY, 1.2)
        right.plot(np.arange(len(error)), np.sqrt(error), color=color, linewidth=width)
        ends.append(End(len(error) - 1, float(np.sqrt(error[-1])), name, color, place == 0))
    right.set(xlabel="step", ylabel="error of the running sum", title="Noise in the sum of gradients so far")
    right.set_ylim(bottom=0)
    right.xaxis.set_major_formatter("{x:,.0f}")
    end_labels(right, ends)
    return figure


def mechanisms(epsilons: Sequence[float], curves: dict[str, list[float]], title: str) -> Figure:
    """RMSE of every mechanism over the best one's, against epsilon."""
    figure, (axis,) = panels(1, width=8.2, height=5.0)
    for name, ratios in curves.items():
        axis.loglog(epsilons, ratios, **line_of(name))
    axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axis.set_xticks([], minor=True)
    plain(axis, "y", [ratio for ratios in curves.values() for ratio in ratios], "x")
    axis.set(xlabel="epsilon", ylabel="RMSE over the best mechanism's", title=title)
    end_labels(axis, [end_of(name, epsilons[-1], ratios[-1]) for name, ratios in curves.items()])
    return figure


def memory(curves: dict[str, list[tuple[int, float]]], title: str) -> Figure:
    """RMSE against the vectors that the noise keeps: none at the left, then on a log scale."""
    figure, (axis,) = panels(1, width=7.8, height=4.4)
    for name, points in curves.items():
        axis.loglog([max(count, _NONE) for count, _ in points], [error for _, error in points], **line_of(name))
    most = max(count for points in curves.values() for count, _ in points)
    fours(axis, most, none=_NONE)
    plain(axis, "y", [error for points in curves.values() for _, error in points])
    axis.set(xlabel="vectors of the model's size that the noise keeps", ylabel="RMSE", title=title)
    far = {name: points for name, points in curves.items() if points[-1][0] > most / 4}
    end_labels(axis, [end_of(name, *points[-1]) for name, points in far.items()])
    for name, points in curves.items():
        if name not in far:  # its name goes beside a point in the middle
            place, error = sorted(points, key=lambda point: point[1])[len(points) // 2]
            _beside(axis, name, max(place, _NONE), error)
    return figure


def _beside(axis: Axes, name: str, x: float, y: float) -> None:
    end = end_of(name, x, y)
    axis.annotate(end.text, (x, y), (8, 0), textcoords="offset points", color=end.color, fontsize=9, va="center")


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
    figure, (left, right) = panels(2, width=6.4, height=4.2)
    widths = sorted({width for points in curves.values() for width, *_ in points})
    for axis, column, label in ((left, 1, "milliseconds per step"), (right, 2, "peak memory, in gradients")):
        ends = []
        for name, points in curves.items():
            values = [float(point[column]) for point in points]
            if name == "independent noise":
                axis.axhline(values[0], linestyle="--", color=GRAY, linewidth=1.2)
            else:
                axis.plot([point[0] for point in points], values, **line_of(name))
            ends.append(end_of(name, widths[-1], values[-1]))
        axis.set(xscale="log", yscale="log", xlabel="bands", ylabel=label)
        axis.set_xticks(widths, [f"{width:,}" for width in widths])
        axis.set_xticks([], minor=True)
        plain(axis, "y", [float(point[column]) for points in curves.values() for point in points])
        end_labels(axis, ends)
    left.set_title(title)
    return figure


def accuracy(curves: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]], title: str) -> Figure:
    """Test accuracy against step, by mechanism: the mean of all runs, and each run faintly."""
    figure, (axis,) = panels(1, width=7.0, height=4.0)
    ends = []
    for name, runs in curves.items():
        style = line_of(name)
        for steps, values in runs:
            axis.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.8)
        mean = np.mean([values for _, values in runs], axis=0)
        axis.plot(runs[0][0], mean, **style)
        ends.append(end_of(name, runs[0][0][-1], float(mean[-1]), f"{name} {mean[-1]:.1%}"))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set(xlabel="step", ylabel="test accuracy", title=title)
    end_labels(axis, ends)
    return figure
