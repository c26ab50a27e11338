"""Strategies with a banded inverse: C^-1 is Toeplitz with the few coefficients r_0 ... r_{p-1}.

    y_i = sum_{t < p} r_t z_{i-t},        C(x) = 1 / r(x)

    BISR, banded inverse square root (Kalinin, McKenna, Upadhyay, Lampert 2025):  the first p coefficients of
        (1 - x)^(1/2) = 1 - x/2 - x^2/8 - x^3/16 - 5 x^4/128 - ...
    lambda-CGD (Kalinin, McKenna, Pagh, Lampert 2026):  r = (1, -lambda)

Nothing is stored between steps: the past z are drawn again from the key (unless the noise engine is told to keep
them). C itself is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.strategies.base import InputRecurrence, Strategy
from bandmf.strategies.square_root import square_root_coefficients
from bandmf.streaming import StreamingOperator, banded, lfilter

_NEGLIGIBLE = 1e-30  # of the largest: what later coefficients of C could add is far below rounding
_MOST_COEFFICIENTS = 2**27


@dataclass(frozen=True, eq=False, repr=False)
class BandedInverse(Strategy):
    """The strategy whose inverse has these Toeplitz coefficients.

    >>> strategy = BandedInverse([1.0, -0.5], steps=3)
    >>> strategy.materialize()
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    >>> strategy.recurrence.row(2), strategy.recurrence.row(0)
    (array([ 1. , -0.5]), array([1., 0.]))
    """

    inverse_coefficients: FloatArray
    steps: int

    def __post_init__(self) -> None:
        steps = _check.whole("steps", self.steps)
        r = _check.array("inverse_coefficients", self.inverse_coefficients, 1)
        _check.moderate("inverse_coefficients", r)
        _check.whole("inverse_bands", len(r), 1, steps, f"steps={steps}")
        if r[0] == 0:
            raise ValueError("inverse_coefficients[0]=0.0: the diagonal of C^-1 must not be zero")
        object.__setattr__(self, "inverse_coefficients", r)
        object.__setattr__(self, "steps", steps)

    def __repr__(self) -> str:
        return f"BandedInverse(steps={self.steps}, inverse_bands={self.inverse_bands})"

    @property
    def inverse_bands(self) -> int:
        """Non-zero diagonals of C^-1."""
        return len(self.inverse_coefficients)

    @property
    def bands(self) -> int:
        return self.steps if self.inverse_bands > 1 else 1

    def _row(self, i: int) -> FloatArray:
        return np.where(np.arange(self.inverse_bands) <= i, self.inverse_coefficients, 0.0)

    @property
    def recurrence(self) -> InputRecurrence:
        return InputRecurrence(self._row, self.inverse_bands)

    def inverse(self) -> StreamingOperator:
        return banded(self._row, self.inverse_bands, self.steps)

    @property
    def buffers(self) -> int:
        """None: the streaming operator keeps the last inputs, the noise engine draws them again."""
        return 0

    def toeplitz(self) -> FloatArray:
        """1 / r(x), to where it has died out."""
        r, terms = self.inverse_coefficients, min(self.steps, 64 * self.inverse_bands)
        while True:
            with np.errstate(over="ignore", invalid="ignore"):
                theta = lfilter([1.0], r, np.eye(1, terms)[0])
            if not np.isfinite(theta).all():
                raise _check.fail("steps", self.steps, "C overflows there", "1 / r(x) must not grow")
            if np.abs(theta[-self.inverse_bands :]).max() <= _NEGLIGIBLE * np.abs(theta).max():
                return theta[: np.flatnonzero(theta)[-1] + 1]
            if terms == self.steps:
                return theta
            terms = _check.whole("terms", min(self.steps, 4 * terms), 1, _MOST_COEFFICIENTS)

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        theta = self.toeplitz()[: self.bands]
        theta = np.pad(theta, (0, self.bands - len(theta)))
        return band_columns.toeplitz_columns(theta, self.steps, start, stop)

    def column_norms(self) -> FloatArray:
        squares = np.cumsum(self.toeplitz() ** 2)
        return np.sqrt(np.pad(squares, (0, self.steps - len(squares)), mode="edge"))[::-1]

    def largest_column_norm(self) -> float:
        return float(np.linalg.norm(self.toeplitz()))

    def equal_column_norms(self) -> bool:
        return self.steps == 1 or not self.inverse_coefficients[1:].any()


def banded_inverse_square_root(steps: int, bands: int) -> BandedInverse:
    """BISR: the inverse of FHU, cut off after `bands` coefficients.

    >>> banded_inverse_square_root(16, 5).inverse_coefficients
    array([ 1.       , -0.5      , -0.125    , -0.0625   , -0.0390625])
    """
    steps = _check.whole("steps", steps)
    bands = _check.whole("bands", bands, 1, steps, f"steps={steps}")
    # (1 - x)^(1/2) = (1 - x) (1 - x)^(-1/2)
    return BandedInverse(np.diff(square_root_coefficients(bands), prepend=0.0), steps)


def lambda_cgd(steps: int, correlation: float) -> BandedInverse:
    """lambda-CGD: y_i = z_i - correlation z_{i-1}; each step takes back a part of the noise before it.

    >>> lambda_cgd(3, 0.5).inverse().materialize()
    array([[ 1. ,  0. ,  0. ],
           [-0.5,  1. ,  0. ],
           [ 0. , -0.5,  1. ]])
    """
    steps = _check.whole("steps", steps)
    correlation = _check.real("correlation", correlation, 0, 1)
    return BandedInverse(np.array([1.0, -correlation])[:steps], steps)
