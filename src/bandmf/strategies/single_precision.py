"""Strategies whose noise is the noise that engines make: engines multiply by float32 numbers.

For a BLT or a banded inverse, a coefficient that is rounded changes C at every later step: C, and with it the
sensitivity, can grow by far more than 2^-24. So the parameters are rounded before anything is computed of them.

For a banded C, engines multiply by the rounded 1 / C[i, i] and C[i, j] / C[i, i]: no entry of the C that they have in
effect is above 1 + 2^-23 + 2^-46 times the exact one (in the normal range of float32). The noise they add is multiplied
by a rounded deviation, which is less than the exact one by at most 2^-24 of it. `MARGIN` is for both.
"""

from __future__ import annotations

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.banded_inverse import BandedInverse
from bandmf.strategies.base import Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.stamping import Stamped

MARGIN = 1 + 2.0**-22  # of the deviation of the noise
_MOST_CANCELLING = 2.0**8  # coefficients, in units of the newest one's: what they cancel is lost to rounding
_LEAST = 2.0**-100  # what is smaller counts nothing, and products with it leave the normal range


def in_float32(strategy: Strategy) -> Strategy:
    """The strategy with parameters that float32 holds exactly; the very same one where it has them.

    >>> in_float32(BandedInverse([1.0, -0.1], steps=3)).inverse_coefficients
    array([ 1. , -0.1])
    >>> float(in_float32(BandedInverse([1.0, -0.1], steps=3)).inverse_coefficients[1])
    -0.10000000149011612
    """
    if isinstance(strategy, BufferedToeplitz):
        scales, decays = _rounded("scales", strategy.scales), _rounded("decays", strategy.decays)
        if np.array_equal(scales, strategy.scales) and np.array_equal(decays, strategy.decays):
            return strategy
        return BufferedToeplitz(scales, decays, strategy.steps)
    if isinstance(strategy, BandedInverse):
        given = strategy.inverse_coefficients
        coefficients = _rounded("inverse_coefficients", given, abs(float(given[0])))
        same = np.array_equal(coefficients, strategy.inverse_coefficients)
        return strategy if same else BandedInverse(coefficients, strategy.steps)
    if isinstance(strategy, Stamped):
        epoch = in_float32(strategy.epoch)
        return strategy if epoch is strategy.epoch else Stamped(epoch, strategy.epochs)
    return strategy


def _rounded(name: str, numbers: FloatArray, least: float = 1.0) -> FloatArray:
    """The numbers in float32, if noise can be computed with them in float32."""
    largest = float(np.abs(numbers).max())
    _check.real(f"largest of {name}", largest, 0, 1e30, remedy="noise is computed in float32: scale it")
    # Large numbers that cancel leave noise only a coarse grid of values, from which a sum can be read off.
    cancelling = float(np.abs(numbers).sum()) / least
    _check.real(
        f"sum of |{name}|", cancelling, 0, _MOST_CANCELLING, remedy="it is too large for noise in float32"
    )
    rounded = numbers.astype(np.float32).astype(np.float64)
    return np.where(np.abs(rounded) < _LEAST, 0.0, rounded)
