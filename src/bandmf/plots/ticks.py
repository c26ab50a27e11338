"""Logarithmic axes with plain numbers on them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.axes import Axes

from bandmf._text import short

_FEWEST = 3  # ticks on an axis
_DIGITS = (
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    (*(1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5, 2.8), *(half / 2 for half in range(6, 20))),
)


def plain(axis: Axes, side: str, values: Iterable[float], ending: str = "") -> None:
    """Ticks at the powers of ten within the values of a logarithmic axis; at some powers of two where those are few.

    Where these are few as well, at 1, 1.5, 2, 3, 5 and so on. `ending` follows each number, as in "2x".
    """
    shown = [value for value in values if value and value > 0]
    low, high = min(shown), max(shown)
    ticks = _decades(low, high)
    if len(ticks) < _FEWEST:
        octaves = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        ticks = [2.0**k for k in octaves][:: 2 if len(octaves) > 6 else 1]
    elif len(ticks) > 9:
        ticks = ticks[::2]
    if len(ticks) < _FEWEST:
        ticks = _fine(low, high)
    which = axis.xaxis if side == "x" else axis.yaxis
    which.set_ticks(ticks, [short(tick) + ending for tick in ticks])
    which.set_ticks([], minor=True)


def fours(axis: Axes, most: float, none: float | None = None) -> None:
    """Ticks of x at 1, 4, 16, 64 and so on; "none" at a place of its own."""
    ticks = {4.0**k: short(4.0**k) for k in range(16) if 4**k <= most}
    ticks = ticks if none is None else {none: "none", **ticks}
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.set_xticks([], minor=True)


def _decades(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**k for k in exponents if low / 1.5 <= 10.0**k <= high * 1.5]


def _fine(low: float, high: float) -> list[float]:
    """Round numbers a little apart.

    >>> _fine(0.9, 3.2), _fine(0.8, 1.3)
    ([1.0, 1.5, 2.0, 3.0], [0.8, 0.9, 1.0, 1.2])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in _DIGITS:
        every = (float(f"{digit}e{k}") for k in powers for digit in digits)
        found = [value for value in every if low / 1.02 <= value <= high * 1.02]
        if len(found) >= _FEWEST:
            break
    return found
