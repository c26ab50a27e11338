"""Step scales: any strategy T, times one public number for each step.

    C = T D,    D = diag(scales),    y_t = (T^-1 z)_t / scales_t

A step with a large scale gets little noise, and uses more of the budget. What a schedule of learning rates, or an
average of the weights, makes little of, can so be given more noise. It takes no memory and one multiplication a step.

Engines multiply by the float32 number `gains[t]`, no less than (1 + 2^-24) / scales_t: also after they have multiplied
it by the deviation, and rounded that, no step has less noise than with the exact scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.base import ScaledRecurrence, Strategy, falling_coefficients
from bandmf.strategies.toeplitz import BandedToeplitz
from bandmf.streaming import StreamingOperator, diagonal, oaconvolve

LEAST, MOST = 1e-100, 1e100  # of a scale


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Strategy):
    """`strategy` with its column t times scales[t] > 0; one that is scaled already is scaled further.

    >>> from bandmf.strategies.toeplitz import BandedToeplitz
    >>> strategy = Scaled(BandedToeplitz([1.0, 0.5], steps=3, normalize_columns=False), scales=[4.0, 2.0, 1.0])
    >>> strategy.materialize()
    array([[4., 0., 0.],
           [2., 2., 0.],
           [0., 1., 1.]])
    >>> strategy.inverse().materialize()
    array([[ 0.25,  0.  ,  0.  ],
           [-0.25,  0.5 ,  0.  ],
           [ 0.25, -0.5 ,  1.  ]])
    """

    strategy: Strategy
    scales: FloatArray

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise _check.fail("strategy", self.strategy, "must be a strategy")
        scales = _check.array("scales", self.scales, 1)
        if len(scales) != self.strategy.steps:
            raise ValueError(f"scales: there are {len(scales)} of them, but the strategy has steps={self.steps}")
        if isinstance(self.strategy, Scaled):
            scales = self.strategy.scales * scales
            object.__setattr__(self, "strategy", self.strategy.strategy)
        for extreme in (scales.min(), scales.max()):
            _check.real("scales", float(extreme), LEAST, MOST, remedy="only ratios matter")
        scales.setflags(write=False)
        object.__setattr__(self, "scales", scales)

    def __repr__(self) -> str:
        return f"Scaled({self.strategy!r})"

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.strategy.steps

    @property
    def bands(self) -> int:
        return self.strategy.bands

    @property
    def buffers(self) -> int:
        return self.strategy.buffers

    @property
    def gains(self) -> np.ndarray:
        """What engines multiply the noise of each step by: 1 / scales in float32, rounded up."""
        exact = (1 + 2.0**-24) * (1 + 2.0**-50) / self.scales
        with np.errstate(over="ignore"):  # refused before noise is made of it, see single_precision
            nearest = exact.astype(np.float32)
        return np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)

    @property
    def recurrence(self) -> ScaledRecurrence:
        unscaled = self.strategy.recurrence
        assert not isinstance(unscaled, ScaledRecurrence)
        return ScaledRecurrence(unscaled, self.gains)

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        return self.strategy.columns(start, stop) * self.scales[start:stop, None]

    def materialize(self) -> FloatArray:
        return self.strategy.materialize() * self.scales

    def column_norms(self) -> FloatArray:
        return self.strategy.column_norms() * self.scales

    def nonnegative(self) -> sparse.csc_array | None:
        unscaled = self.strategy.nonnegative()
        return None if unscaled is None else sparse.csc_array(unscaled * self.scales)

    def spaced_norm(self, separation: int, count: int) -> float | None:
        """Where scales do not increase either: a pattern that starts later, or has gaps, has less of everything."""
        found = factors(self)
        falling = None if found is None else falling_coefficients(found[0])
        if found is None or falling is None or np.any(np.diff(found[1]) > 0):
            return None
        return _spaced_norm(falling, found[1], separation, count)

    def separated_bound(self, separation: int, count: int) -> float | None:
        if (found := factors(self)) is None:
            return None
        return _spaced_norm(_falling(np.abs(found[0])), _falling(found[1]), separation, count)

    def sensitivity_error(self, separation: int, count: int) -> float:
        return float(self.scales.max()) * self.strategy.sensitivity_error(separation, count)

    def inverse(self) -> StreamingOperator:
        return diagonal(1 / self.scales) @ self.strategy.inverse()


def factors(strategy: Strategy) -> tuple[FloatArray, FloatArray] | None:
    """(theta, d) where C[i, j] = theta[i - j] d[j], with a d for every step; None where C is not of that form."""
    if isinstance(strategy, Scaled):
        found = factors(strategy.strategy)
        return None if found is None else (found[0], found[1] * strategy.scales)
    if isinstance(strategy, BandedToeplitz) and strategy.normalize_columns:
        plain = replace(strategy, normalize_columns=False)
        return plain.coefficients, 1 / plain.column_norms()
    theta = strategy.toeplitz()
    return None if theta is None else (theta, np.ones(strategy.steps))


def _falling(numbers: FloatArray) -> FloatArray:
    """The least non-increasing sequence above these numbers."""
    return np.maximum.accumulate(numbers[::-1])[::-1]


def _spaced_norm(theta: FloatArray, d: FloatArray, separation: int, count: int) -> float:
    """|sum of columns 0, s, 2 s, ...| of the matrix with these factors."""
    weights = np.zeros(len(d))
    weights[: count * separation : separation] = d[: count * separation : separation]
    return float(np.linalg.norm(oaconvolve(weights, theta)[: len(d)]))


def unscaled(strategy: Strategy) -> Strategy:
    """T of a Scaled strategy T D; any other strategy is returned unchanged."""
    return strategy.strategy if isinstance(strategy, Scaled) else strategy
