"""Banded Toeplitz strategies: C[i, j] = theta[i - j], and Identity, their simplest member (DP-SGD).

Only the last bands - 1 columns of such a matrix are cut off by the end and have a smaller norm; with
`normalize_columns` every column is divided by its norm (the paper's column normalization), so that no
privacy budget is left unused at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray, IntArray
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.streaming import StreamingOperator, banded_inverse


@dataclass(frozen=True, eq=False, repr=False)
class BandedToeplitz(Strategy):
    """C[i, j] = coefficients[i - j]; with `normalize_columns` each column is scaled to norm one.

    >>> BandedToeplitz([1.0, 0.5], steps=3, normalize_columns=False).materialize()
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    """

    coefficients: FloatArray
    steps: int
    normalize_columns: bool = True

    def __post_init__(self) -> None:
        steps = _check.whole("steps", self.steps)
        theta = _check.moderate("coefficients", _check.array("coefficients", self.coefficients, 1))
        _check.whole("bands", len(theta), 1, steps, f"steps={steps}")
        _check.choice("normalize_columns", self.normalize_columns, (True, False))
        if theta[0] == 0:
            raise ValueError("coefficients[0]=0.0: the diagonal of C must not be zero")
        object.__setattr__(self, "coefficients", theta)
        object.__setattr__(self, "steps", steps)

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        compact = band_columns.toeplitz_columns(self.coefficients, self.steps, start, stop)
        if self.normalize_columns:
            first, end, _ = slice(start, stop).indices(self.steps)
            compact /= self._norms(np.arange(first, end))[:, None]
        return compact

    def column_norms(self) -> FloatArray:
        if self.normalize_columns:
            return np.ones(self.steps)
        return self._norms(np.arange(self.steps))

    def largest_column_norm(self) -> float:
        return 1.0 if self.normalize_columns else float(np.linalg.norm(self.coefficients))

    def equal_column_norms(self) -> bool:
        return self.normalize_columns or self.bands == 1

    def toeplitz(self) -> FloatArray | None:
        return None if self.normalize_columns else self.coefficients

    def _norms(self, j: IntArray) -> FloatArray:
        """Norms of columns j before any normalization."""
        cumulative = np.sqrt(np.cumsum(self.coefficients**2))
        return cumulative[np.minimum(self.steps - j, self.bands) - 1]

    def _row(self, i: int) -> FloatArray:
        j = i - np.arange(self.bands)
        row = np.where(j >= 0, self.coefficients, 0.0)
        return row / self._norms(np.maximum(j, 0)) if self.normalize_columns else row

    @property
    def recurrence(self) -> OutputRecurrence:
        return OutputRecurrence(self._row, self.bands)

    def inverse(self) -> StreamingOperator:
        return banded_inverse(self._row, self.bands, self.steps)


@dataclass(frozen=True, eq=False, repr=False)
class Identity(Strategy):
    """C = I: independent noise, which is DP-SGD.

    >>> Identity(3).materialize()
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]])
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _check.whole("steps", self.steps))

    @property
    def bands(self) -> int:
        return 1

    def largest_column_norm(self) -> float:
        return 1.0

    def equal_column_norms(self) -> bool:
        return True

    def toeplitz(self) -> FloatArray:
        return np.ones(1)

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        return np.ones((len(range(self.steps)[start:stop]), 1))

    @property
    def recurrence(self) -> OutputRecurrence:
        return OutputRecurrence(lambda i: np.ones(1), 1)

    def inverse(self) -> StreamingOperator:
        return banded_inverse(self.recurrence.row, 1, self.steps)
