"""Exact error of banded strategies by covariance recursion: O(n b^2) time, O(n b) memory.

Let M = C A^-1, lower triangular with p sub-diagonals, so that the noise s = A C^-1 z on the workload's
outputs solves M s = z. Cut M into K x K blocks with K >= p; only the diagonal blocks L_i and the blocks
U_i to their left are non-zero:

    L_i s_i + U_i s_{i-1} = z_i.

With X_i = L_i^-1 and T_i = X_i U_i the covariance P_i of s_i obeys

    P_i = X_i X_i' + T_i P_{i-1} T_i',

and its diagonal is the squared error of each step. For a loss with derivative `weights` with respect to
those errors, the adjoint runs backwards, Q_i = diag(weights_i) + T_{i+1}' Q_{i+1} T_{i+1}, and

    dloss/dL_i = -2 X_i' Q_i P_i,        dloss/dU_i = 2 X_i' Q_i T_i P_{i-1}.

Only the two recursions for P and Q are sequential; the rest is batched over the blocks.
"""

from __future__ import annotations

import numpy as np

from bandmf._types import FloatArray
from bandmf.error.threads import one_thread

WORST_CONDITION = 100  # for errors good to 1e-9; beyond it another path is taken
# Smaller blocks waste time in the interpreter, larger ones in arithmetic on zeros.
_SMALLEST_BLOCK = 16


class BandCovariance:
    """Per-step errors of M s = z, and their gradient with respect to M's compact columns.

    `columns[j, r] = M[j + r, j]`. With `start`, the first len(start) columns belong to earlier steps whose
    covariance is `start` already; their errors are not reported.

    >>> BandCovariance(np.array([[1.0, -1.0], [1.0, 0.0]])).errors  # C = I on prefix sums
    array([1., 2.])
    """

    def __init__(self, columns: FloatArray, start: FloatArray | None = None) -> None:
        self.steps, self.width = columns.shape
        self.known = 0 if start is None else len(start)
        size = self.known or max(self.width - 1, _SMALLEST_BLOCK)
        self._inputs = to_blocks(columns, size)  # kept for `condition`
        with one_thread(size):
            self._forwards(self._inputs, start)
        self.errors = np.diagonal(self.P, axis1=1, axis2=2).reshape(-1)[self.known : self.steps]

    def _forwards(self, blocks: FloatArray, start: FloatArray | None) -> None:
        size = blocks.shape[2]
        self.X = lower_inverse(blocks[:, :size])
        self.T = self.X[1:] @ blocks[:-1, size:]
        self.P = self.X @ self.X.swapaxes(1, 2)
        if start is not None:
            self.P[0] = start
        for i in range(1, len(self.P)):
            T = self.T[i - 1]
            self.P[i] += T @ self.P[i - 1] @ T.T

    @property
    def condition(self) -> float:
        """How much rounding is amplified: the errors are good to about 1e-16 times its square.

        A learning rate that falls and rises again hides what the noise was in differences of nearly equal outputs.
        """
        size, reach = self.X.shape[1], np.abs(self.X)
        sizes = np.abs(self._inputs).sum(axis=2)
        within = (reach @ sizes[:, :size, None]).max()
        return float(max(within, (reach[1:] @ sizes[:-1, size:, None]).max(initial=0.0)))

    def gradient(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """d(weights . errors): with respect to the columns, and to `start`."""
        with one_thread(self.X.shape[1]):
            return self._backwards(weights)

    def _backwards(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        count, size, _ = self.X.shape
        Q = np.zeros_like(self.X)
        padded = np.zeros(count * size)
        padded[self.known : self.steps] = weights
        np.einsum("nii->ni", Q)[...] = padded.reshape(count, size)
        for i in range(count - 2, -1, -1):
            T = self.T[i]
            Q[i] += T.T @ Q[i + 1] @ T
        start = Q[0].copy()
        Q = self.X.swapaxes(1, 2) @ Q
        blocks = np.empty((count, 2 * size, size))
        np.matmul(Q, self.P, out=blocks[:, :size])
        blocks[:, :size] *= -2
        if self.known:
            blocks[0, :size] = 0  # what lies before the start is not ours to change
        np.matmul(Q[1:] @ self.T, self.P[:-1], out=blocks[:-1, size:])
        blocks[:-1, size:] *= 2
        blocks[-1, size:] = 0
        return band_of_blocks(blocks, self.width).reshape(-1, self.width)[: self.steps], start


def band_of_blocks(blocks: FloatArray, width: int) -> FloatArray:
    """The diagonals of (count, 2K, K) blocks as a view: entry [i, j, r] is blocks[i, j + r, j]."""
    count, _, size = blocks.shape
    item = blocks.itemsize
    strides = (blocks.strides[0], (size + 1) * item, size * item)
    return np.lib.stride_tricks.as_strided(blocks, (count, size, width), strides)


def to_blocks(columns: FloatArray, size: int) -> FloatArray:
    """(count, 2K, K): the columns of block i, its diagonal block above the one it reaches into."""
    steps, width = columns.shape
    count = -(-steps // size)
    blocks = np.zeros((count, 2 * size, size))
    band = band_of_blocks(blocks, width).reshape(count, size, width)
    whole = steps // size
    band[:whole] = columns[: whole * size].reshape(whole, size, width)
    if whole < count:
        rest = steps - whole * size
        band[-1, :rest] = columns[whole * size :]
        band[-1, rest:, 0] = 1  # padding: independent steps that nobody reads
    return blocks


def lower_inverse(L: FloatArray) -> FloatArray:
    """Inverses of a stack of lower-triangular matrices, by halves: [[A, 0], [B, D]]."""
    size = L.shape[-1]
    if size == 1:
        return 1 / L
    half = size // 2
    X = np.zeros(L.shape)
    X[:, :half, :half] = top = lower_inverse(L[:, :half, :half])
    X[:, half:, half:] = bottom = lower_inverse(L[:, half:, half:])
    X[:, half:, :half] = -bottom @ (L[:, half:, :half] @ top)
    return X
