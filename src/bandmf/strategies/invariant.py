"""Time-invariant operators, whose matrices (F, G, H, D) are the same at every step: sums in O(s^3 log n).

The operator is Toeplitz with coefficients h_0 = D, h_i = H F^(i-1) G. With the running sums

    W_m = sum_{i < m} (H F^i)' (H F^i),        V_m = W_1 + ... + W_m,

the sum of h_i^2 over n steps is D^2 + G' W_{n-1} G, and that of (n - i) h_i^2 is n D^2 + G' V_{n-1} G. Both
double: W_{a+b} = W_a + (F^a)' W_b F^a and V_{a+b} = V_a + b W_a + (F^a)' V_b F^a. Everything added is
positive, so nothing cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bandmf._check import FloatArray
from bandmf.streaming import Matrices
from bandmf.workloads import Workload

_LARGEST_STATE = 64  # a Toeplitz workload with more coefficients than this is better treated by its response
_PIECE = 1024


def workload_matrices(workload: Workload) -> Matrices | None:
    """(F, G, H, D) of a workload that is Toeplitz and small; None for others."""
    operator = workload.operator
    if workload.coefficients is None or operator.matrices is None or operator.buffers > _LARGEST_STATE:
        return None
    return operator.matrices(workload.steps - 1)  # a first row may be cut off; the last one never is


@dataclass(frozen=True)
class InvariantError:
    """The closed errors of a time-invariant A C^-1: step i has sum_{j <= i} h_j^2."""

    matrices: Matrices
    steps: int

    def per_step(self) -> FloatArray:
        return np.cumsum(impulse_response(self.matrices, self.steps) ** 2)

    def mean(self) -> float:
        D, G = self.matrices.feedthrough, self.matrices.input
        return float(D * D + G @ _sums(self.matrices, self.steps - 1).running @ G / self.steps)

    def maximum(self) -> float:
        return squared_norm(self.matrices, self.steps)


def squared_norm(matrices: Matrices, steps: int) -> float:
    """sum_{i < steps} h_i^2."""
    D, G = matrices.feedthrough, matrices.input
    return float(D * D + G @ _sums(matrices, steps - 1).squares @ G)


def impulse_response(matrices: Matrices, steps: int) -> FloatArray:
    """h_0 ... h_{steps-1}: the first column, in pieces that are one matrix product each."""
    F, G, H, D = matrices
    piece = min(_PIECE, steps)
    rows, states = np.empty((piece, len(G))), np.empty((len(G), -(-steps // piece)))
    rows[0] = H
    for t in range(1, piece):
        rows[t] = rows[t - 1] @ F
    jump = np.linalg.matrix_power(F, piece)
    states[:, 0] = G
    for a in range(1, states.shape[1]):
        states[:, a] = jump @ states[:, a - 1]
    return np.append(D, (rows @ states).T.ravel())[:steps]


class _Sums(NamedTuple):
    terms: int
    power: FloatArray  # F^terms
    squares: FloatArray  # W
    running: FloatArray  # V


def _sums(matrices: Matrices, count: int) -> _Sums:
    F, _, H, _ = matrices
    zero = np.zeros_like(F)
    total, square = _Sums(0, np.eye(len(F)), zero, zero), _Sums(1, F, np.outer(H, H), np.outer(H, H))
    while count:
        if count & 1:
            total = _join(total, square)
        count >>= 1
        if count:
            square = _join(square, square)
    return total


def _join(first: _Sums, then: _Sums) -> _Sums:
    P = first.power
    squares = first.squares + P.T @ then.squares @ P
    running = first.running + then.terms * first.squares + P.T @ then.running @ P
    return _Sums(first.terms + then.terms, P @ then.power, squares, running)
