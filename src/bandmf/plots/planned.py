"""The picture of a plan: the error of what could be planned, what was chosen, and what memory permits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bandmf._text import counted, number
from bandmf.planning.setup import IN_BINS
from bandmf.plots.colors import BANDMF, GRAY, MECHANISMS
from bandmf.plots.style import End, end_labels, panels
from bandmf.plots.ticks import fours, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bandmf.planning.candidate import Candidate
    from bandmf.planning.plan import Plan

_NEAR = 2.05  # a line joins neighbors of at most so many times the bands; a longer one would invent what lies between

_MARGIN = 1.2  # above and below, in times the error


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
    color, right = MECHANISMS[BANDMF], max((place for place, _ in curve), default=1)
    for piece in _pieces(curve):
        axis.plot(*zip(*piece, strict=True), color=color, linewidth=2.4, marker="o", markersize=4)
    for level in levels:
        style = {"linewidth": 2.4} if level.chosen else {"linewidth": 1.2, "linestyle": "--"}
        axis.axhline(level.error, color=_shade(level), **style)
    axis.set(xscale="log", yscale="log", xlabel="bands", ylabel="RMSE over the plan's", title=title)
    axis.margins(x=0.06)
    errors = [*(error for _, error in curve), *(level.error for level in levels)]
    axis.set_ylim(min(errors) / _MARGIN, max(errors) * _MARGIN)
    plain(axis, "y", errors, "x")
    if curve:
        fours(axis, right)
        axis.set_xlim(axis.get_xlim())
        _name(axis, curve, names, chosen)
    else:  # nothing here depends on bands
        axis.set(xlim=(0.5, 1), xticks=[], xlabel="")
        axis.set_xticks([], minor=True)
    if limit is not None and limit < right:
        _draw_limit(axis, limit)
    ends = [
        End(axis.get_xlim()[1], error, f"chosen: {name}" if taken else name, _shade(level), taken)
        for level in levels
        for name, error, taken in (level,)
    ]
    end_labels(axis, ends)
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
    low, high = axis.get_xlim()
    axis.axvspan(edge, high, color=GRAY, alpha=0.12, linewidth=0)
    axis.axvline(edge, color=GRAY, linewidth=1)
    side, gap = ("left", 5) if edge**3 < low * high**2 else ("right", -5)  # where there is room for words
    axis.annotate(
        f"memory limit: {counted(limit, 'band')}", (edge, 0.97), (gap, 0),
        xycoords=axis.get_xaxis_transform(), textcoords="offset points", color=GRAY, fontsize=9, ha=side, va="top",
    )  # fmt: skip


def _name(axis: Axes, curve: Sequence[tuple[int, float]], names: dict[int, str], chosen: int | None) -> None:
    """Words beside points: the chosen one below the line, which falls from the left."""
    color, (low, _), (high, _) = MECHANISMS[BANDMF], curve[0], curve[-1]
    before = [curve[0][1], *(error for _, error in curve)]
    for (place, error), earlier in zip(curve, before, strict=False):
        if place == chosen:
            axis.plot(place, error, "o", color="white", markeredgecolor=color, markeredgewidth=2.6, markersize=11)
            axis.annotate(
                f"chosen: {counted(place, 'band')}", (place, error), (-8, -9),
                textcoords="offset points", ha="left" if place == low else "right", va="top", fontsize=9,
                fontweight="bold", color=color,
            )  # fmt: skip
        if place in names:
            rising = error >= earlier
            axis.annotate(
                names[place], (place, error), (0, 8 if rising else -8), textcoords="offset points", fontsize=9,
                ha="right" if place == high and place != low else "left", va="bottom" if rising else "top",
                color=MECHANISMS["DP-SGD"] if names[place] == "DP-SGD" else GRAY,
            )  # fmt: skip


def plan(made: Plan, candidates: Sequence[Candidate]) -> Figure:
    """The picture of a plan and of all candidates that are to be in it."""
    if not candidates:
        raise ValueError("candidates=(): there is nothing to draw; make the plan with bandmf.plan")
    banded = sorted((c for c in candidates if c.sampling not in IN_BINS), key=lambda c: c.bands)
    curve = [(c.bands, c.rmse / made.rmse) for c in banded]
    levels = [Level(c.name, c.rmse / made.rmse, made.is_chosen(c)) for c in candidates if c.sampling in IN_BINS]
    names = {1: "DP-SGD"} if made.amplified else {1: "independent noise"}
    if made.amplified and made.examples is not None and made.examples / made.batch_size <= made.steps:
        names[int(made.examples / made.batch_size)] = "no amplification"
    limit = None if made.max_vectors is None else made.max_vectors + 1
    title = f"epsilon={number(made.epsilon)}, delta={number(made.delta)}, {made.steps:,} steps"
    chosen = None if made.in_bins else made.bands
    return bands(curve, title, chosen=chosen, names=names, levels=levels, limit=limit)
