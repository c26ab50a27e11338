"""The picture of a plan: the error of what could be planned, what was chosen, and what memory permits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bandmf.plots.colors import BANDMF, GRAY, MECHANISMS
from bandmf.plots.style import End, end_labels, panels
from bandmf.plots.ticks import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bandmf.planning.candidate import Candidate
    from bandmf.planning.plan import Plan

_NEAR = 2.05  # a line joins neighbors of at most so many times the bands; a longer one would invent what lies between


class Level(NamedTuple):
    """A mechanism whose error does not depend on bands."""

    name: str
    error: float
    chosen: bool


def bands(
    curve: Sequence[tuple[int, float]],
    title: str,
    *,
    chosen: int | None,
    names: dict[int, str],
    levels: Sequence[Level] = (),
    limit: int | None = None,
) -> Figure:
    """Error over that of the plan against bands, with the choice marked.

    `curve` holds (bands, error); those in `names` are labeled; `limit` is the most bands that fit into memory.
    """
    figure, (axis,) = panels(1, width=7.2, height=4.4)
    color = MECHANISMS[BANDMF]
    for piece in _pieces(curve):
        axis.plot(*zip(*piece, strict=True), color=color, linewidth=2.4, marker="o", markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="bands", ylabel="RMSE over the plan's", title=title)
    axis.margins(x=0.06, y=0.14)
    places, errors = [place for place, _ in curve], [error for _, error in curve]
    right = max(places, default=1)
    lines = [End(right, level.error, level.name, _shade(level), level.chosen) for level in levels]
    for level in levels:
        width = 2.4 if level.chosen else 1.2
        axis.axhline(level.error, color=_shade(level), linewidth=width, linestyle="-" if level.chosen else "--")
    if curve:
        plain(axis, "x", places)
        _name(axis, curve, names, chosen)
    else:  # nothing here depends on bands
        axis.set(xticks=[], xlabel="")
        axis.set_xticks([], minor=True)
    plain(axis, "y", [*errors, *(level.error for level in levels)], "x")
    if limit is not None and limit < right:
        _draw_limit(axis, limit)
    end_labels(axis, lines)
    return figure


def _pieces(curve: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The curve in pieces without long gaps."""
    pieces: list[list[tuple[int, float]]] = []
    for place, error in curve:
        if not pieces or place > _NEAR * pieces[-1][-1][0]:
            pieces.append([])
        pieces[-1].append((place, error))
    return pieces


def _shade(level: Level) -> str:
    kind = "BLT in bins" if level.name.startswith("BLT") else "Banded inverse in bins"
    return MECHANISMS["BandMF in bins" if "bands" in level.name else kind]


def _draw_limit(axis: Axes, limit: int) -> None:
    """What lies to the right does not fit."""
    edge = limit * 1.06  # to the right of the last point that fits
    axis.axvspan(edge, axis.get_xlim()[1], color=GRAY, alpha=0.12, linewidth=0)
    axis.axvline(edge, color=GRAY, linewidth=1)
    text = f" memory limit: {limit:,} bands"
    axis.text(edge, 0.98, text, transform=axis.get_xaxis_transform(), color=GRAY, fontsize=9, va="top")


def _name(
    axis: Axes, curve: Sequence[tuple[int, float]], names: dict[int, str], chosen: int | None
) -> None:
    color, low, high = MECHANISMS[BANDMF], curve[0][0], curve[-1][0]
    for place, error in curve:
        side = "left" if place == low else "right" if place == high else "center"
        if place == chosen:
            axis.plot(place, error, "o", color="white", markeredgecolor=color, markeredgewidth=2.6, markersize=11)
            axis.annotate(
                f"chosen: {place:,} band{'s' if place > 1 else ''}", (place, error), (0, -17),
                textcoords="offset points", ha=side, fontsize=9, fontweight="bold", color=color,
            )  # fmt: skip
        if place in names:
            ink = MECHANISMS["DP-SGD"] if names[place] == "DP-SGD" else GRAY
            axis.annotate(
                names[place], (place, error), (0, 9), textcoords="offset points", ha=side, fontsize=9, color=ink
            )


def plan(made: Plan, weighed: Sequence[Candidate]) -> Figure:
    """The picture of a plan and of all candidates that are to be in it."""
    banded = sorted((c for c in weighed if c.sampling != "balls-in-bins"), key=lambda c: c.bands)
    curve = [(c.bands, c.rmse / made.rmse) for c in banded]
    levels = [
        Level(c.name, c.rmse / made.rmse, c.noise_multiplier == made.noise_multiplier)
        for c in weighed
        if c.sampling == "balls-in-bins"
    ]
    names = {1: "DP-SGD"} if made.amplified else {1: "independent noise"}
    if made.amplified and made.examples is not None and made.examples / made.batch_size <= made.steps:
        names[int(made.examples / made.batch_size)] = "no amplification"
    limit = None if made.max_vectors is None else made.max_vectors + 1
    delta = f"{made.delta:g}".replace("e-0", "e-")
    title = f"epsilon={made.epsilon:g}, delta={delta}, {made.steps:,} steps"
    chosen = None if made.in_bins else made.bands
    return bands(curve, title, chosen=chosen, names=names, levels=levels, limit=limit)
