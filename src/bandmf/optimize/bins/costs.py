"""What noise costs a workload: M = A' diag(w) A, with a weight w_i for the error of each step i.

Noise y has the squared error y' M y. Where (F, G, H, D) are the matrices of A at each step, M need not be written out:

    M_st = v_t F_{t-1} ... F_{s+1} G_s,    s < t,        v_t = w_t D_t H_t + G_t' V_{t+1} F_t,
    M_tt = w_t D_t^2 + G_t' V_{t+1} G_t,                 V_t = w_t H_t' H_t + F_t' V_{t+1} F_t,

so that sums over all of its entries are recursions, and those triangular systems of few diagonals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from scipy.linalg import lapack, toeplitz

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.workloads import Workload

_LARGEST_STATE = 16  # vectors; with more, M is written out
_MOST_WRITTEN = 2**12  # steps for which it is


class Bilinear(NamedTuple):
    """sum_{s < t} x_s M_st q^(t-s-1) y_t, with its derivatives."""

    value: float
    by_q: float
    by_x: FloatArray
    by_y: FloatArray


class Costs(Protocol):
    """What the errors of strategies need of M."""

    @property
    def diagonal(self) -> FloatArray:
        """M_tt: the squared norms of A's columns."""
        ...

    def band(self, width: int) -> FloatArray:
        """M_{t,t+r} at [t, r], for r < width; zero past the end."""
        ...

    def decaying(self, q: float, x: FloatArray, y: FloatArray) -> Bilinear:
        """The sum over s < t of x_s M_st q^(t-s-1) y_t."""
        ...


def costs_of(workload: Workload, weights: FloatArray) -> Costs:
    """M of a workload for a mean of the squared errors of all steps with these weights."""
    n = workload.steps
    if workload.operator.matrices is None or workload.operator.buffers > _LARGEST_STATE:
        remedy = "use a workload with a small state"
        _check.whole("steps", n, 1, _MOST_WRITTEN, f"{_MOST_WRITTEN} for the workload {workload.name!r}", remedy)
        A = workload.materialize()
        return WrittenOut(A.T @ (weights[:, None] * A))
    given = [workload.operator.matrices(i) for i in range(n)]
    F, G = np.array([each.transition for each in given]), np.array([each.input for each in given])
    onward, diagonal = np.empty_like(G), np.empty(n)
    later = np.zeros(F.shape[1:])  # V_{t+1}
    for t in range(n - 1, -1, -1):
        H, D = given[t].output, given[t].feedthrough
        onward[t] = weights[t] * D * H + G[t] @ later @ F[t]
        diagonal[t] = weights[t] * D**2 + G[t] @ later @ G[t]
        later = weights[t] * np.outer(H, H) + F[t].T @ later @ F[t]
    return Recursive(diagonal, onward, F, G)


@dataclass(frozen=True, eq=False)
class Recursive:
    """M by its diagonal, and v, F and G of every step."""

    diagonal: FloatArray
    onward: FloatArray  # v
    transitions: FloatArray  # F
    inputs: FloatArray  # G

    def band(self, width: int) -> FloatArray:
        n, band = len(self.diagonal), np.zeros((len(self.diagonal), width))
        band[:, 0] = self.diagonal
        state = self.inputs[: n - 1]  # that a unit of noise at step t has become before step t + r
        for r in range(1, min(width, n)):
            band[: n - r, r] = np.sum(self.onward[r:] * state, axis=1)
            state = np.einsum("tij,tj->ti", self.transitions[r : n - 1], state[:-1])
        return band

    def decaying(self, q: float, x: FloatArray, y: FloatArray) -> Bilinear:
        """By z_t = y_t v_t + q F_t' z_{t+1}, and its transpose a_{s+1} = x_s G_s + q F_s a_s."""
        moved = np.zeros_like(self.inputs)
        moved[1:] = x[:-1, None] * self.inputs[:-1]
        after = np.zeros_like(self.inputs)
        after[:-1] = self._solve(q, y[:, None] * self.onward)[1:]  # z
        a = self._solve(q, moved, transposed=True)
        by_x, by_y = np.sum(self.inputs * after, axis=1), np.sum(self.onward * a, axis=1)
        return Bilinear(float(by_y @ y), float(np.einsum("ti,tij,tj->", after, self.transitions, a)), by_x, by_y)

    def _solve(self, q: float, source: FloatArray, transposed: bool = False) -> FloatArray:
        bands = -q * self._superdiagonals
        bands[-1] = 1.0
        found, failed = lapack.dtbtrs(bands, source.reshape(-1, 1), uplo="U", trans="T" if transposed else "N")
        assert failed == 0
        solved: FloatArray = found.reshape(source.shape)
        return solved

    @cached_property
    def _superdiagonals(self) -> FloatArray:
        """The blocks F_t' right of a diagonal, as LAPACK keeps the bands of a matrix."""
        n, size = self.inputs.shape
        bands = np.zeros((2 * size, n, size))
        for a in range(size):
            for b in range(size):
                bands[size - 1 + a - b, 1:, b] = self.transitions[:-1, b, a]
        return bands.reshape(2 * size, n * size)


@dataclass(frozen=True, eq=False)
class WrittenOut:
    """M as a matrix: for workloads that have no small state."""

    matrix: FloatArray

    @property
    def diagonal(self) -> FloatArray:
        return np.diag(self.matrix)

    def band(self, width: int) -> FloatArray:
        n = len(self.matrix)
        diagonals = [np.pad(np.diag(self.matrix, r), (0, r)) for r in range(min(width, n))]
        return np.pad(np.array(diagonals).T, ((0, 0), (0, max(0, width - n))))

    def decaying(self, q: float, x: FloatArray, y: FloatArray) -> Bilinear:
        n = len(self.matrix)
        lags = np.arange(n - 1)
        powers = np.append(0.0, q**lags)
        slopes = np.append(0.0, lags * q ** np.maximum(lags - 1, 0))
        upper = np.zeros(n)
        weighted = self.matrix * toeplitz(upper, powers)
        by_x, by_y = weighted @ y, x @ weighted
        return Bilinear(float(x @ by_x), float(x @ (self.matrix * toeplitz(upper, slopes)) @ y), by_x, by_y)
