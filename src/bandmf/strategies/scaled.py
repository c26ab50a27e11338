"""Step scales: any strategy T, times one public number for each step.

    C = T D,    D = diag(scales),    y_t = (T^-1 z)_t / scales_t

A step with a large scale gets little noise, and uses more of the budget. What a schedule of learning rates, or an
average of the weights, makes little of, can so be given more noise. It takes no memory and one multiplication a step.

Engines multiply by the float32 number `gains[t]`, no less than (1 + 2^-24) / scales_t: also after they have multiplied
it by the deviation, and rounded that, no step has less noise than with the exact scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.base import ScaledRecurrence, Strategy
from bandmf.streaming import StreamingOperator, diagonal

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

    def sensitivity_error(self, separation: int, count: int) -> float:
        return float(self.scales.max()) * self.strategy.sensitivity_error(separation, count)

    def inverse(self) -> StreamingOperator:
        return diagonal(1 / self.scales) @ self.strategy.inverse()


def unscaled(strategy: Strategy) -> Strategy:
    """T of a Scaled strategy T D; any other strategy is returned unchanged."""
    return strategy.strategy if isinstance(strategy, Scaled) else strategy
