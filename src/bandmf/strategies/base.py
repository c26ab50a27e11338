"""What every strategy is: an immutable lower-triangular C, and the recurrence that streams C^-1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy import sparse

from bandmf import band_columns
from bandmf._types import FloatArray
from bandmf.streaming import StreamingOperator


@dataclass(frozen=True)
class OutputRecurrence:
    """Banded C: y_i = (z_i - sum_{0 < r < bands} row(i)[r] y_{i-r}) / row(i)[0]; keeps past outputs."""

    row: Callable[[int], FloatArray]
    bands: int


@dataclass(frozen=True)
class InputRecurrence:
    """Banded C^-1: y_i = sum_{r < bands} row(i)[r] z_{i-r}; past inputs are drawn again, or kept."""

    row: Callable[[int], FloatArray]
    bands: int


@dataclass(frozen=True)
class BufferRecurrence:
    """Buffered Toeplitz C: y_i = z_i - sum_k scales_k x_k, then x_k <- decays_k x_k + y_i; keeps the x_k."""

    scales: FloatArray
    decays: FloatArray


Recurrence = OutputRecurrence | InputRecurrence | BufferRecurrence


@dataclass(frozen=True)
class ScaledRecurrence:
    """C = T D: what `unscaled` makes at step i, by C = T, times the float32 number gains[i]; keeps the unscaled."""

    unscaled: Recurrence
    gains: np.ndarray


class Strategy(ABC):
    """A noise-correlation strategy C for `steps` steps: the noise added at training is C^-1 z."""

    steps: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}(steps={self.steps}, bands={self.bands})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Through the constructor, whose arrays are read-only: a copy must not be writeable."""
        return type(self), tuple(getattr(self, part.name) for part in fields(self))  # type: ignore[arg-type]

    @property
    @abstractmethod
    def bands(self) -> int:
        """Non-zero diagonals of C."""

    @property
    @abstractmethod
    def recurrence(self) -> Recurrence | ScaledRecurrence:
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

    def toeplitz(self) -> FloatArray | None:
        """The first column where C is plain Toeplitz, without any zeros at its end; else None."""
        return None

    def spaced_norm(self, separation: int, count: int) -> float | None:
        """|sum of columns 0, s, 2 s, ...|: the worst pattern where C is Toeplitz with coefficients that are
        non-negative and do not increase; None where it is not."""
        theta = self.toeplitz()
        falling = None if theta is None else falling_coefficients(theta)
        return None if falling is None else spaced_toeplitz_norm(falling, self.steps, separation, count)

    def nonnegative(self) -> sparse.csc_array | None:
        """C as a sparse matrix where it has few entries and none is negative; else None."""
        return None

    def separated_bound(self, separation: int, count: int) -> float | None:
        """An upper bound on the sensitivity that this family knows of itself, or None."""
        return None

    def sensitivity_error(self, separation: int, count: int) -> float:
        """What the rounding of C's computed entries may take from the sensitivity, where that can be much."""
        return 0.0

    def materialize(self) -> FloatArray:
        """C as a steps x steps matrix: for small sizes."""
        return band_columns.materialize(self.columns())


def falling_coefficients(theta: FloatArray) -> FloatArray | None:
    """The least non-increasing, non-negative sequence above theta, where theta is that itself to rounding."""
    majorant = np.maximum.accumulate(np.maximum(theta, 0.0)[::-1])[::-1]
    return majorant if np.all(majorant - theta <= 1e-15 * np.abs(theta).max()) else None


def spaced_toeplitz_norm(theta: FloatArray, steps: int, separation: int, count: int) -> float:
    """|sum of columns 0, s, 2 s, ...| of the Toeplitz matrix with these coefficients, in O(steps)."""
    length = min(steps, (count - 1) * separation + len(theta))
    padded = np.zeros(-(-length // separation) * separation)
    padded[: len(theta)] = theta[:length]
    # Row m holds steps m s ... (m + 1) s - 1: running sums down the rows add up one column after another.
    total = np.cumsum(padded.reshape(-1, separation), axis=0)
    if len(total) > count:
        total[count:] -= total[:-count].copy()
    return float(np.linalg.norm(total.ravel()[:length]))
