"""The house style: panels, lines, and names at the ends of lines instead of legends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bandmf.plots.colors import COLORS, bold, color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FONT = 9  # points
_PLACE = 1.03  # where names begin, in widths of the panel


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


def line_of(name: str) -> dict[str, Any]:
    """How the line of a mechanism is drawn: BandMF's stands out."""
    if bold(name):
        return {"color": color(name), "linewidth": 2.8, "marker": "o", "markersize": 5, "zorder": 3}
    return {"color": color(name), "linewidth": 1.2, "marker": "o", "markersize": 3, "zorder": 2}


class End(NamedTuple):
    """The end of a line, and what it is called."""

    x: float
    y: float
    text: str
    color: str
    bold: bool = False


def end_of(name: str, x: float, y: float, text: str = "") -> End:
    """The end of the line of a mechanism."""
    return End(x, y, text or name, color(name), bold(name))


def end_labels(axis: Axes, ends: Sequence[End]) -> None:
    """Names at the right of the panel, at the height of the lines' ends, moved apart where they would overlap.

    To be called when everything else is drawn: the limits of the axes stay as they are from here.
    """
    axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())
    to_axes = axis.transData + axis.transAxes.inverted()
    places = [tuple(to_axes.transform((end.x, end.y))) for end in ends]
    height = axis.figure.bbox.height / axis.figure.dpi * 0.8 * 72  # points; titles and labels take the rest
    free = spread([y for _, y in places], 1.25 * _FONT / height)
    for end, (x, y), place in zip(ends, places, free, strict=True):
        leader = [min(x + 0.01, 1), _PLACE - 0.008], [y, place]
        style: dict[str, Any] = {"color": end.color, "linewidth": 0.6, "alpha": 0.6, "clip_on": False}
        axis.add_artist(Line2D(*leader, transform=axis.transAxes, **style))
        axis.text(
            _PLACE,
            place,
            end.text,
            color=end.color,
            fontsize=_FONT,
            fontweight="bold" if end.bold else "normal",
            va="center",
            transform=axis.transAxes,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in the same order that are at least a gap apart, as near to these as that permits, and not below 0.

    >>> [round(height, 3) for height in spread([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[float]] = []  # [sum, count]: neighbors that touch move together
    for rank, i in enumerate(order):
        blocks.append([heights[i] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    means = [total / count for total, count in blocks for _ in range(int(count))]
    found = [0.0] * len(heights)
    for rank, i in enumerate(order):
        found[i] = max(0.0, means[rank]) + rank * gap
    return found
