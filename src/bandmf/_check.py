"""Argument checks: one sentence with the value, the permitted range and what to do.

>>> whole("bands", 0, 1, 100, "steps=100")
Traceback (most recent call last):
ValueError: bands=0: must be a whole number between 1 and steps=100
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bandmf._types import FloatArray

_LONGEST = 200  # characters of a value that an error repeats


def fail(name: str, value: object, requirement: str, remedy: str = "") -> ValueError:
    """The error that every check raises: `name=value: must be ...; remedy`."""
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return ValueError(f"{name}={shown}: {requirement}" + (f"; {remedy}" if remedy else ""))


def whole(name: str, value: Any, low: int = 1, high: int | None = None, high_name: str = "", remedy: str = "") -> int:
    """`value` as an int in [low, high]; 3.0 is whole, 3.5, True and NaN are not."""
    limit = f"between {low} and {high_name or high}" if high is not None else f"at least {low}"
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value == int(value):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    raise fail(name, value, f"must be a whole number {limit}", remedy)


def real(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    remedy: str = "",
) -> float:
    """`value` as a finite float between low and high (either end open on request); rejects NaN."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        if above and below:
            return float(value)
    left = "(" if open_low or low == -math.inf else "["
    right = ")" if open_high or high == math.inf else "]"
    raise fail(name, value, f"must be a finite number in {left}{low:g}, {high:g}{right}", remedy)


def choice(name: str, value: Any, options: Sequence[object]) -> Any:
    """`value` if it is one of `options`."""
    # `is` first: False == 0 must not let a 0 through where False is an option.
    for option in options:
        alike = type(value) is type(option) or (isinstance(value, str) and isinstance(option, str))
        if value is option or (alike and value == option):
            return option
    listed = ", ".join(repr(option) for option in options)
    raise fail(name, value, f"must be one of {listed}" if len(options) > 1 else f"must be {listed}")


def moderate(name: str, entries: FloatArray) -> FloatArray:
    """The entries, if their squares neither vanish nor overflow; along the last axis, only ratios matter."""
    largest = np.abs(entries).max(axis=-1)
    if not np.all((largest > 1e-100) & (largest < 1e100)):
        worst = float(largest.flat[int(np.argmax(np.abs(np.log10(np.maximum(largest, 1e-300)))))])
        raise fail(f"largest of {name}", worst, "must lie between 1e-100 and 1e100", "scale it: only ratios matter")
    return entries


def array(name: str, value: Any, dimensions: int) -> FloatArray:
    """`value` as a fresh, read-only, finite float64 array with so many dimensions."""
    try:
        result = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be an array of numbers ({error})") from None
    if result.ndim != dimensions or result.size == 0:
        raise ValueError(
            f"{name}: must be a non-empty array with {dimensions} dimension(s), not of shape {result.shape}"
        )
    if not np.isfinite(result).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(result))[0])
        raise ValueError(f"{name}: every entry must be finite, but entry {where} is {result[where]}")
    result.setflags(write=False)
    return result
