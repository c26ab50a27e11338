"""The Gram matrix G of the bins of a Toeplitz strategy, and linear functions <T, G> of it with their gradient.

The bin j takes part at the steps j, j + b, j + 2b, ... (b the cycle). With coefficients c >= 0 and

    s_t = c_t + s_{t-b}                                 running sums with stride b,

the sum of its columns is s, shifted by j and cut off at n steps, so that for i <= j

    G_ij = sum_{u < n-j} s_u s_{u+j-i}.

The first m = n - b of these terms depend on the lag j - i alone. The others come from x, the last b of s, by sums down
the diagonals of x x'; the same sums over T give W:

    <T, G> = sum_d tau_d sum_{u < m} s_u s_{u+d}  +  x' W x,         tau_d the sum of the diagonals d and -d of T.

One autocorrelation serves every T; the rest is b^2 for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import toeplitz

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error.toeplitz_response import correlate
from bandmf.streaming import oaconvolve


def strided_sums(c: FloatArray, cycle: int) -> FloatArray:
    """s_t = c_t + s_{t-cycle}.

    >>> strided_sums(np.array([1.0, 0.5, 0.25, 0.125]), 2)
    array([1.   , 0.5  , 1.25 , 0.625])
    """
    rows = -(-len(c) // cycle)
    padded = np.zeros(rows * cycle)
    padded[: len(c)] = c
    return np.cumsum(padded.reshape(rows, cycle), axis=0).ravel()[: len(c)]


def strided_sums_adjoint(slope: FloatArray, cycle: int) -> FloatArray:
    """d/dc from d/ds: the same sums, taken backward."""
    return strided_sums(slope[::-1], cycle)[::-1]


def gram(c: FloatArray, cycle: int) -> FloatArray:
    """G of the Toeplitz matrix with first column c >= 0, at full length.

    >>> gram(np.array([1.0, 0.5, 0.25]), 2)
    array([[2.8125, 1.125 ],
           [1.125 , 1.25  ]])
    """
    s = strided_sums(c, cycle)
    x = s[len(c) - cycle :]
    lag_sums = np.maximum(_lag_sums(s, cycle), 0.0)  # the FFT leaves some of what is zero a little below
    return toeplitz(lag_sums) + _down_diagonals(np.outer(x, x))


def _lag_sums(s: FloatArray, cycle: int) -> FloatArray:
    """sum_{u < n-b} s_u s_{u+d} for every lag d below the cycle."""
    m = len(s) - cycle
    return correlate(s[: m + cycle - 1], s[:m]) if m else np.zeros(cycle)


def _down_diagonals(matrix: FloatArray) -> FloatArray:
    """Running sums down every diagonal of a symmetric matrix, with both axes turned around."""
    sums = np.array(matrix)
    for i in range(1, len(sums)):
        sums[i, 1:] += sums[i - 1, :-1]
    return sums[::-1, ::-1]


@dataclass(frozen=True, eq=False)
class LinearForm:
    """G -> <T, G> for one symmetric T, prepared for many G."""

    tau: FloatArray
    W: FloatArray

    @staticmethod
    def of(T: FloatArray) -> LinearForm:
        T = _check.array("T", T, 2)
        if T.shape[0] != T.shape[1]:
            raise ValueError(f"T: must be square, not of shape {T.shape}")
        T = (T + T.T) / 2
        W = np.ascontiguousarray(_down_diagonals(T))
        # The first row of W are the sums of whole diagonals.
        return LinearForm(W[0] * np.where(np.arange(len(T)) > 0, 2.0, 1.0), W)


class Forms:
    """The values of several linear forms at G(s), and the gradient of any combination with respect to c."""

    def __init__(self, forms: list[LinearForm], c: FloatArray) -> None:
        self._forms, self._cycle = forms, len(forms[0].tau)
        self._s = strided_sums(c, self._cycle)
        self._m = len(c) - self._cycle
        x = self._s[self._m :]
        self._tails = np.array([form.W @ x for form in forms])
        lag_sums = _lag_sums(self._s, self._cycle)
        self.values = np.array([form.tau @ lag_sums for form in forms]) + self._tails @ x

    def gradient(self, weights: FloatArray) -> FloatArray:
        """d(weights . values) / dc."""
        s, m, b = self._s, self._m, self._cycle
        slope = np.zeros_like(s)
        slope[m:] = 2 * weights @ self._tails
        if m:
            tau = sum((w * form.tau for w, form in zip(weights, self._forms, strict=True)), np.zeros(b))
            slope[:-1] += oaconvolve(s[:m], tau)
            slope[:m] += oaconvolve(s[:-1], tau[::-1])[b - 1 : b - 1 + m]
        return strided_sums_adjoint(slope, b)
