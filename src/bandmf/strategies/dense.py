"""Dense strategies: any lower-triangular C, n <= a few thousand steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.streaming import StreamingOperator, banded_inverse


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Strategy):
    """A strategy given by its full lower-triangular matrix.

    >>> Dense([[1.0, 0.0], [0.5, 1.0]]).bands
    2
    """

    matrix: FloatArray

    def __post_init__(self) -> None:
        matrix = _check.array("matrix", self.matrix, 2)
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix: must be square, not of shape {matrix.shape}")
        if np.any(np.triu(matrix, 1)):
            raise ValueError("matrix: must be lower triangular, or noise would depend on the future")
        if (zero := np.flatnonzero(np.diag(matrix) == 0)).size:
            raise ValueError(f"matrix[{zero[0]}, {zero[0]}]=0.0: the diagonal of C must not be zero")
        _check.moderate("matrix's columns", matrix.T)
        object.__setattr__(self, "matrix", matrix)

    @property
    def steps(self) -> int:  # type: ignore[override]
        return len(self.matrix)

    @property
    def bands(self) -> int:
        return self.steps

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        n, chosen = self.steps, range(self.steps)[start:stop]
        compact = np.zeros((len(chosen), n))
        for place, j in enumerate(chosen):
            compact[place, : n - j] = self.matrix[j:, j]
        return compact

    def materialize(self) -> FloatArray:
        return self.matrix

    def _row(self, i: int) -> FloatArray:
        row = np.zeros(self.steps)
        row[: i + 1] = self.matrix[i, i::-1]
        return row

    @property
    def recurrence(self) -> OutputRecurrence:
        return OutputRecurrence(self._row, self.bands)

    def inverse(self) -> StreamingOperator:
        return banded_inverse(self._row, self.bands, self.steps)
