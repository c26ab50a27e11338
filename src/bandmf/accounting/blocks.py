"""Products of a banded matrix with many vectors at once: dense pieces of its columns, multiplied by the library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray

_LEAST = 64  # columns multiplied at once


@dataclass(frozen=True, eq=False)
class Blocks:
    """A lower-triangular C, n x n. Arrays of several vectors have one in each column.

    >>> C = blocks(np.array([[1.0, 0.5], [1.0, 0.0]]))
    >>> C.times(np.ones((2, 1))).ravel(), C.transposed_times(np.ones((2, 1))).ravel()
    (array([1. , 1.5]), array([1.5, 1. ]))
    """

    parts: tuple[FloatArray, ...]  # of C': so many columns of C x the rows that they reach
    steps: int

    @property
    def width(self) -> int:
        """The longest sum in a product."""
        return self.parts[0].shape[1]

    def times(self, x: FloatArray) -> FloatArray:
        """C x."""
        result = np.zeros((self.steps, x.shape[1]))
        for begin, part in self._placed():
            result[begin : begin + part.shape[1]] += part.T @ x[begin : begin + len(part)]
        return result

    def transposed_times(self, x: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """C' x: <c_i, x> for every column c_i."""
        result = np.empty((self.steps, x.shape[1])) if out is None else out
        for begin, part in self._placed():
            np.matmul(part, x[begin : begin + part.shape[1]], out=result[begin : begin + len(part)])
        return result

    def _placed(self) -> list[tuple[int, FloatArray]]:
        size = len(self.parts[0])
        return [(number * size, part) for number, part in enumerate(self.parts)]


def size_of(bands: int) -> int:
    """Columns in a block that suit so many bands."""
    return max(_LEAST, bands)


def blocks(columns: FloatArray) -> Blocks:
    """The matrix with these compact columns (see band_columns)."""
    n, bands = columns.shape
    size, parts = size_of(bands), []
    for begin in range(0, n, size):
        part = columns[begin : begin + size]
        block = np.zeros((len(part), len(part) + bands - 1))
        for r in range(bands):
            block[np.arange(len(part)), np.arange(len(part)) + r] = part[:, r]
        parts.append(np.ascontiguousarray(block[:, : n - begin]))
    return Blocks(tuple(parts), n)
