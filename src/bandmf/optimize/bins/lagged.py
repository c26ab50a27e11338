"""Products of the columns of C = T D that are near each other, T Toeplitz with first column c and D = diag(d):

    X[t, r] = <C_{t-r}, C_t> = d_{t-r} d_t sum_{u < n-t} c_u c_{u+r},    r < width, r <= t.

With time turned around these are the products of the rows of D T as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from bandmf._types import FloatArray

_AT_ONCE = 32  # lags: what is computed then stays in the cache


class _Part(NamedTuple):
    """The lags first, first + 1, ... of the steps from `first` on: before that, there is nothing."""

    first: int
    sums: FloatArray  # sum_u c_u c_{u+r} at [t - first, r - first]
    scales: FloatArray  # d_{t-r} d_t


@dataclass(frozen=True, eq=False)
class Lagged:
    """X for one c and d, and the gradient of sums over it."""

    c: FloatArray
    d: FloatArray
    table: FloatArray
    parts: list[_Part]

    def gradient(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """d(sum weights X) by c and by log d."""
        n, width = self.table.shape
        by_c, by_log_d = np.zeros(n + width), np.zeros(n)
        for first, sums, scales in self.parts:
            m, lags = sums.shape
            slopes = weights[first:, first : first + lags] * scales
            terms = slopes * sums
            by_log_d[first:] += terms.sum(axis=1)
            by_log_d[:m] += _antidiagonals(terms, lags)
            np.cumsum(slopes, axis=0, out=slopes)
            by_product = slopes[::-1]  # of c_u c_{u+r}, at [u, r - first]
            by_c[:m] += np.einsum("ur,ur->u", by_product, _windows(self.c, first, m, lags))
            by_c[first : first + m + lags - 1] += _diagonals(by_product * self.c[:m, None])
        return by_c[:n], by_log_d


def lagged(c: FloatArray, d: FloatArray, width: int) -> Lagged:
    """X for the first column c of T, which may be shorter than d.

    >>> lagged(np.array([1.0, 0.5]), np.array([1.0, 1.0, 2.0]), 2).table
    array([[1.25, 0.  ],
           [1.25, 0.5 ],
           [4.  , 1.  ]])
    """
    n = len(d)
    c = np.pad(c, (0, n + width - len(c)))
    parts = list(_parts(c, d, width))
    table = np.zeros((n, width))
    for first, sums, scales in parts:
        np.multiply(sums, scales, out=table[first:, first : first + sums.shape[1]])
    return Lagged(c, d, table, parts)


def _parts(c: FloatArray, d: FloatArray, width: int) -> Iterator[_Part]:
    n = len(d)
    before = np.pad(d, (width, 0))
    for first in range(0, min(width, n), _AT_ONCE):
        lags, m = min(_AT_ONCE, width - first), n - first
        sums = _windows(c, first, m, lags) * c[:m, None]
        np.cumsum(sums, axis=0, out=sums)
        earlier = _windows(before, width - lags + 1, m, lags)[:, ::-1]
        yield _Part(first, sums[::-1], earlier * d[first:, None])


def _windows(x: FloatArray, start: int, rows: int, width: int) -> FloatArray:
    """x[start + i + j] at [i, j]."""
    return sliding_window_view(x[start : start + rows + width - 1], width)


def _diagonals(matrix: FloatArray) -> FloatArray:
    """Sums of matrix[i, j] over i + j."""
    rows, columns = matrix.shape
    padded = np.zeros((rows + 2 * columns, columns))
    padded[columns : columns + rows] = matrix
    down, right = padded.strides
    skewed = as_strided(padded[columns:], (rows + columns - 1, columns), (down, right - down))
    return np.asarray(skewed.sum(axis=1))


def _antidiagonals(matrix: FloatArray, columns: int) -> FloatArray:
    """Sums of matrix[i + j, j] over j, for every i."""
    padded = np.zeros((len(matrix) + columns, columns))
    padded[: len(matrix)] = matrix
    down, right = padded.strides
    return np.asarray(as_strided(padded, matrix.shape, (down, down + right)).sum(axis=1))
