"""Logarithmic axes with plain numbers on them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.axes import Axes


def plain(axis: Axes, side: str, values: Iterable[float]) -> None:
    """Ticks at the powers of ten within the values of a logarithmic axis; at some powers of two where those are few."""
    shown = [value for value in values if value and value > 0]
    low, high = min(shown), max(shown)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**k for k in decades if low / 1.5 <= 10.0**k <= high * 1.5]
    if len(ticks) < 3:
        octaves = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        ticks = [2.0**k for k in octaves][:: 2 if len(octaves) > 6 else 1]
    elif len(ticks) > 9:
        ticks = ticks[::2]
    which = axis.xaxis if side == "x" else axis.yaxis
    which.set_ticks(ticks, [_text(tick) for tick in ticks])
    which.set_ticks([], minor=True)


def _text(value: float) -> str:
    """1,000 but 10M: long numbers would run into each other.

    >>> [_text(value) for value in (0.001, 16, 4096, 1e7, 1e9)]
    ['0.001', '16', '4,096', '10M', '1,000M']
    """
    if value >= 1e6:
        return f"{value / 1e6:,.0f}M"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
