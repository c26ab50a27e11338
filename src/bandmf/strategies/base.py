"""What every strategy is: an immutable lower-triangular C, and the recurrence that streams C^-1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bandmf._check import FloatArray
from bandmf.streaming import StreamingOperator


@dataclass(frozen=True)
class OutputRecurrence:
    """Banded C: y_i = (z_i - sum_{0 < r < bands} row(i)[r] y_{i-r}) / row(i)[0]; keeps past outputs."""

    row: Callable[[int], FloatArray]
    bands: int


@dataclass(frozen=True)
class InputRecurrence:
    """Banded C^-1: y_i = sum_{r < bands} row(i)[r] z_{i-r}; past inputs are drawn again, nothing is kept."""

    row: Callable[[int], FloatArray]
    bands: int


@dataclass(frozen=True)
class BufferRecurrence:
    """Buffered Toeplitz C: y_i = z_i - sum_k scales_k x_k, then x_k <- decays_k x_k + y_i; keeps the x_k."""

    scales: FloatArray
    decays: FloatArray


Recurrence = OutputRecurrence | InputRecurrence | BufferRecurrence


class Strategy(ABC):
    """A noise-correlation strategy C for `steps` steps: the noise added at training is C^-1 z."""

    steps: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}(steps={self.steps}, bands={self.bands})"

    @property
    @abstractmethod
    def bands(self) -> int:
        """Non-zero diagonals of C."""

    @property
    @abstractmethod
    def recurrence(self) -> Recurrence:
        """How C^-1 z is streamed."""

    @abstractmethod
    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """Columns start..stop of C: entry [j, r] is C[start + j + r, start + j], zero past the end."""

    @abstractmethod
    def inverse(self) -> StreamingOperator:
        """C^-1 as an operator that turns white noise into correlated noise."""

    @property
    def buffers(self) -> int:
        """Vectors of state that the streaming inverse keeps."""
        return self.inverse().buffers

    def column_norms(self) -> FloatArray:
        """The Euclidean norm of every column."""
        return np.linalg.norm(self.columns(), axis=1)

    def largest_column_norm(self) -> float:
        """The sensitivity under single participation."""
        return float(self.column_norms().max())

    def equal_column_norms(self) -> bool:
        """Whether all columns have the same norm, to rounding."""
        norms = self.column_norms()
        return bool(norms.max() - norms.min() <= 1e-15 * norms.max())

    def materialize(self) -> FloatArray:
        """C as a steps x steps matrix: for small sizes."""
        columns = self.columns()
        C = np.zeros((self.steps, self.steps))
        for r in range(self.bands):
            np.fill_diagonal(C[r:], columns[: self.steps - r, r])
        return C


def rows_from_columns(columns: FloatArray, i: int) -> FloatArray:
    """Row i of C, newest first (C[i, i], C[i, i-1], ...), from its compact columns; zero before the start."""
    bands = columns.shape[1]
    row = np.zeros(bands)
    reach = min(bands, i + 1)
    row[:reach] = columns[i - np.arange(reach), np.arange(reach)]
    return row
