"""Strategies whose noise is the noise that engines make: engines multiply by float32 numbers.

For a BLT or a banded inverse, a coefficient that is rounded changes C at every later step: C, and with it the
sensitivity, can grow by far more than 2^-24. So the parameters are rounded before anything is computed of them.

For a banded C, engines multiply by the rounded 1 / C[i, i] and C[i, j] / C[i, i]: no entry of the C that they have in
effect is above 1 + 2^-23 + 2^-46 times the exact one (in the normal range of float32, which the limits here are for).
The noise they add is multiplied by a rounded deviation, which is less than the exact one by at most 2^-24 of it.
`MARGIN` is for both.
"""

from __future__ import annotations

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.banded_inverse import BandedInverse
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.dense import Dense
from bandmf.strategies.rounding import rounding_error
from bandmf.strategies.scaled import Scaled
from bandmf.strategies.stamping import Stamped
from bandmf.strategies.toeplitz import BandedToeplitz

MARGIN = 1 + 2.0**-22  # of the deviation of the noise
LEAST, MOST = 1e-30, 1e30  # of what noise is multiplied by: float32 has normal numbers from 1e-38 to 3e38
SCALES = 1e-7, 1e7  # of steps: the noise is multiplied by their inverses, too
_COARSEST = 2.0**-13  # of the noise, by which rounding may change it
_NEGLIGIBLE = 2.0**-100  # what is smaller counts nothing, and products with it leave the normal range


def check_noise(strategy: Strategy) -> None:
    """Fail unless float32 holds the strategy's parameters, and its noise to more than a few digits."""
    if in_float32(strategy) is not strategy:
        raise ValueError(
            "strategy: has parameters that float32 does not hold, and engines would make other noise; make a new plan "
            "with bandmf.plan, which rounds them first"
        )
    if not (error := rounding_error(strategy)) <= _COARSEST:
        raise _check.fail(
            "rounding error of the noise",
            float(f"{error:.3g}"),
            f"must be at most {_COARSEST:.3g} of it, but large numbers cancel, and what float32 leaves has so few "
            "values that a sum could be read off",
            "use a strategy with a smaller C^-1 or C, or fewer steps",
        )


def check_range(name: str, number: float) -> float:
    """The number, if noise can be multiplied by it in float32."""
    return _check.real(name, number, LEAST, MOST, remedy="noise is computed in float32: scale it")


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
        newest = check_range("|inverse_coefficients[0]|", abs(float(given[0])))
        coefficients = _rounded("inverse_coefficients", given, newest)
        return strategy if np.array_equal(coefficients, given) else BandedInverse(coefficients, strategy.steps)
    if isinstance(strategy, Scaled):
        for name, extreme in (("smallest", strategy.scales.min()), ("largest", strategy.scales.max())):
            _check.real(f"{name} of scales", float(extreme), *SCALES, remedy="only ratios matter")
        unscaled = in_float32(strategy.strategy)
        return strategy if unscaled is strategy.strategy else Scaled(unscaled, strategy.scales)
    if isinstance(strategy, Stamped):
        epoch = in_float32(strategy.epoch)
        return strategy if epoch is strategy.epoch else Stamped(epoch, strategy.epochs)
    if isinstance(strategy.recurrence, OutputRecurrence):
        diagonal = _diagonal(strategy)
        check_range("least of C's diagonal", float(diagonal.min()))
        check_range("largest of C's diagonal", float(diagonal.max()))
    return strategy


def _rounded(name: str, numbers: FloatArray, newest: float = 1.0) -> FloatArray:
    """The numbers in float32, without those that count nothing beside the newest one's."""
    largest = float(np.abs(numbers).max())
    _check.real(f"largest of {name}", largest, 0, MOST, remedy="noise is computed in float32: scale it")
    rounded = numbers.astype(np.float32).astype(np.float64)
    least = _NEGLIGIBLE * min(1.0, max(newest, 2.0**-20))
    return np.where(np.abs(rounded) < least, 0.0, rounded)


def _diagonal(strategy: Strategy) -> FloatArray:
    """The sizes that C's diagonal takes; the extreme ones suffice."""
    if isinstance(strategy, BandedToeplitz):
        theta = np.abs(strategy.coefficients)
        return np.array([theta[0] / np.linalg.norm(theta), 1.0]) if strategy.normalize_columns else theta[:1]
    if isinstance(strategy, Dense):
        return np.abs(np.diag(strategy.matrix))
    return np.abs(strategy.columns()[:, 0])
