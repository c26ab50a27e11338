"""Lower-triangular banded matrices by their compact columns: columns[j, r] = M[j + r, j], zero past the end.

This is how strategies, inverse workloads and their products are stored: n x b numbers instead of n x n.
"""

from __future__ import annotations

import numpy as np

from bandmf._types import FloatArray


def toeplitz_columns(coefficients: FloatArray, steps: int, start: int = 0, stop: int | None = None) -> FloatArray:
    """Columns start ... stop - 1 of the steps x steps Toeplitz matrix with these coefficients.

    >>> toeplitz_columns(np.array([1.0, 0.5]), steps=3, start=1)
    array([[1. , 0.5],
           [1. , 0. ]])
    """
    first, end, _ = slice(start, stop).indices(steps)
    rows_left = steps - np.arange(first, end)[:, None]
    return np.where(np.arange(len(coefficients)) < rows_left, coefficients, 0.0)


def row_of(columns: FloatArray, i: int) -> FloatArray:
    """Row i of M, newest first (M[i, i], M[i, i-1], ...); zero before the start."""
    bands = columns.shape[1]
    row = np.zeros(bands)
    reach = min(bands, i + 1)
    row[:reach] = columns[i - np.arange(reach), np.arange(reach)]
    return row


def materialize(columns: FloatArray) -> FloatArray:
    """M itself, n x n: for small sizes."""
    steps, bands = columns.shape
    M = np.zeros((steps, steps))
    for r in range(bands):
        np.fill_diagonal(M[r:], columns[: steps - r, r])
    return M


def gram(columns: FloatArray) -> FloatArray:
    """Compact columns of M'M: entry [j, r] is (M'M)[j + r, j]."""
    steps, bands = columns.shape
    X = np.zeros((steps, bands))
    for r in range(bands):
        X[: steps - r, r] = np.sum(columns[: steps - r, r:] * columns[r:, : bands - r], axis=1)
    return X


def product(left: FloatArray, right: FloatArray) -> FloatArray:
    """Compact columns of the product of two banded matrices, from theirs."""
    steps, width = left.shape
    result = np.zeros((steps, width + right.shape[1] - 1))
    for t in range(right.shape[1]):
        # Column j of the product gets right[j, t] times column j + t of the left factor.
        result[: steps - t, t : t + width] += right[: steps - t, t, None] * left[t:]
    return result


def product_adjoint(gradient: FloatArray, right: FloatArray, width: int) -> FloatArray:
    """The gradient with respect to `left` from that of `product(left, right)`."""
    steps = len(gradient)
    result = np.zeros((steps, width))
    for t in range(right.shape[1]):
        result[t:] += right[: steps - t, t, None] * gradient[: steps - t, t : t + width]
    return result
