"""BLT, the buffered linear Toeplitz strategy (McMahan, Krichene, Xu, Zhang 2024; McMahan et al. 2024).

    C[i, j] = c_{i-j},    c_0 = 1,    c_t = sum_k scales_k decays_k^(t-1)

C is full, yet C and C^-1 stream with one buffer for each decay: y_i = z_i - sum_k scales_k x_k, then
x_k <- decays_k x_k + y_i. Norms and errors on time-invariant workloads have closed forms at any n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.strategies.base import BufferRecurrence, Strategy, spaced_toeplitz_norm
from bandmf.streaming import Matrices, StreamingOperator, impulse_response, squared_norm, state_space

_MOST_COEFFICIENTS = 2**27
_ROUNDING = 2.0**-53


@dataclass(frozen=True, eq=False, repr=False)
class BufferedToeplitz(Strategy):
    """The BLT with these output scales and decays; as many buffers as decays.

    >>> strategy = BufferedToeplitz(scales=[0.5], decays=[0.5], steps=3)
    >>> strategy.materialize()
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    >>> strategy.inverse().materialize()
    array([[ 1. ,  0. ,  0. ],
           [-0.5,  1. ,  0. ],
           [ 0. , -0.5,  1. ]])
    """

    scales: FloatArray
    decays: FloatArray
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _check.whole("steps", self.steps))
        for name in ("scales", "decays"):
            object.__setattr__(self, name, _check.array(name, getattr(self, name), 1))
        if self.scales.any():
            _check.moderate("scales", self.scales)
        if len(self.scales) != len(self.decays):
            raise ValueError(f"scales: there are {len(self.scales)} of them, but {len(self.decays)} decays")
        if np.any(np.abs(self.decays) > 1):
            worst = float(self.decays[np.argmax(np.abs(self.decays))])
            raise _check.fail("decays", worst, "must lie in [-1, 1], or C grows without bound")

    def __repr__(self) -> str:
        return f"BufferedToeplitz(steps={self.steps}, buffers={self.buffers})"

    @property
    def bands(self) -> int:
        return self.steps

    @property
    def buffers(self) -> int:
        return len(self.decays)

    @property
    def recurrence(self) -> BufferRecurrence:
        return BufferRecurrence(self.scales, self.decays)

    def matrices(self) -> Matrices:
        """(F, G, H, D) of C: the buffers are fed by C's input."""
        return Matrices(np.diag(self.decays), np.ones(self.buffers), self.scales, 1.0)

    def inverse(self) -> StreamingOperator:
        C = self.matrices()
        return state_space(lambda i: C, self.buffers, self.steps).inverse()

    def toeplitz(self) -> FloatArray:
        _check.whole("steps", self.steps, 1, _MOST_COEFFICIENTS, remedy="use closed forms at this length")
        return impulse_response(self.matrices(), self.steps)

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        return band_columns.toeplitz_columns(self.toeplitz(), self.steps, start, stop)

    def column_norms(self) -> FloatArray:
        return np.sqrt(np.cumsum(self.toeplitz() ** 2))[::-1]

    @property
    def cancels(self) -> bool:
        """Whether terms of a coefficient have different signs: closed forms are then lost to rounding."""
        return bool(np.any(self.scales < 0) or np.any(self.decays < 0))

    def coefficient_errors(self) -> FloatArray:
        """Bounds of the rounding errors in `toeplitz()`, from the second coefficient on: they do not increase."""
        powers = np.abs(self.decays)[:, None] ** np.arange(self.steps - 1)
        sizes: FloatArray = np.abs(self.scales) @ powers
        return 2 * (self.steps + self.buffers + 8) * _ROUNDING * sizes

    def sensitivity_error(self, separation: int, count: int) -> float:
        if not self.cancels or self.steps == 1:
            return 0.0
        errors = self.coefficient_errors()
        return spaced_toeplitz_norm(np.append(errors[0], errors), self.steps, separation, count)

    def largest_column_norm(self) -> float:
        if self.cancels:
            return float(np.linalg.norm(self.toeplitz()))
        return math.sqrt(squared_norm(self.matrices(), self.steps))

    def equal_column_norms(self) -> bool:
        return self.steps == 1 or not self.scales.any()

    def spaced_norm(self, separation: int, count: int) -> float | None:
        if self.cancels or np.sum(self.scales) > 1:  # the coefficients may still fall all the way: look at them
            return super().spaced_norm(separation, count)
        C, total, buffers = self.matrices(), 0.0, np.zeros(self.buffers)
        for m in range(count):
            length = self.steps - m * separation if m == count - 1 else separation
            total += (1 + float(self.scales @ buffers)) ** 2
            after = Matrices(C.transition, C.transition @ buffers + 1, C.output, 0.0)
            total += squared_norm(after, length)
            buffers = after.input * self.decays ** (length - 1)
        return math.sqrt(total)
