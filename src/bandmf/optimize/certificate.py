"""A proof of how far a banded strategy can be from the best one with as many bands.

The total weighted squared error, total(X) = sum_i weights_i (A X^-1 A')_ii, is convex in X = C'C. Its
gradient is -S with S = X^-1 A' D A X^-1, D = diag(weights). Every competitor with sensitivity one has
X*_ii <= 1, hence |X*_ij| <= 1, and X*_ij = 0 outside the band, so that by convexity

    total(X*) >= total(X) - sum over ordered pairs |i - j| < b of max(S_ij (1 - X_ij), -S_ij (1 + X_ij)).

S is the covariance of y = X^-1 A' xi for xi with covariance D, and y takes two recursions: with M = C A^-1,

    M' p = xi   backwards,        C y = p   forwards.

In blocks both are Markov chains, and the entries of S in the band follow in O(n b^2) without ever dividing by a
weight: steps of weight zero do no harm. The sum of S_ij X_ij over the band is `total` again: a free check of the
arithmetic, which is made every time.
"""

from __future__ import annotations

import math

import numpy as np

from bandmf import band_columns
from bandmf._types import FloatArray
from bandmf.error.band_covariance import band_of_blocks, lower_inverse, to_blocks
from bandmf.error.threads import one_thread
from bandmf.optimize.objectives import Objective
from bandmf.strategies import Strategy
from bandmf.workloads import Workload

_SELF_TEST = 1e-6  # relative; beyond it the arithmetic is not to be trusted, and nothing is proved


def optimality_gap(strategy: Strategy, workload: Workload, errors: FloatArray, objective: Objective) -> float:
    """How far, relatively, the root of the objective can at most be above the best with as many bands.

    Guarantee: for every strategy of sensitivity one with as many bands, its objective times (1 + gap) is at
    least this strategy's; up to rounding, about 1e-10 at a hundred thousand steps. `errors` are the
    strategy's own per-step errors. The strategy's columns must have norm at most one. Infinite where nothing is
    proved. For "max" the weights of a p-norm are used, which proves little unless the strategy is nearly optimal.
    """
    assert workload.inverse_columns is not None
    inverse = workload.inverse_columns(0, strategy.steps)
    lower = lower_bound(strategy.columns(), inverse, errors, objective.proof_weights(errors))
    return relative_gap(objective.value(errors), lower)


def relative_gap(value: float, lower: float) -> float:
    """How far the root of `value` is above that of its lower bound."""
    return max(0.0, math.sqrt(value / lower) - 1) if lower > 0 else math.inf


def lower_bound(columns: FloatArray, inverse: FloatArray, errors: FloatArray, weights: FloatArray) -> float:
    """No strategy with as many bands has a smaller weighted sum of its errors; -inf where that is not proved."""
    total = float(weights @ errors)
    X = band_columns.gram(columns)
    with one_thread(columns.shape[1]):
        S = _band_of_covariance(columns, inverse, weights)
    twice = np.full(S.shape[1], 2.0)
    twice[0] = 1.0
    check = float(np.sum(S * X * twice))
    if not abs(check - total) <= _SELF_TEST * total:
        return -math.inf
    slack = float(np.sum(np.maximum(S * (1 - X), -S * (1 + X)) * twice))
    return total - slack - abs(check - total)


def _band_of_covariance(columns: FloatArray, inverse: FloatArray, weights: FloatArray) -> FloatArray:
    """Compact columns, as many as bands, of S = X^-1 A' D A X^-1."""
    n, bands = columns.shape
    M = band_columns.product(columns, inverse)
    size = max(M.shape[1] - 1, 16)
    C_blocks, M_blocks = to_blocks(columns, size), to_blocks(M, size)
    padded = np.zeros(len(C_blocks) * size)
    padded[:n] = weights
    L_inverse, below = lower_inverse(M_blocks[:, :size]), M_blocks[:-1, size:]
    P, F = _backwards(L_inverse, below, padded.reshape(-1, size))
    diagonal, lower = _forwards(lower_inverse(C_blocks[:, :size]), C_blocks[:-1, size:], P, F)
    blocks = np.zeros((len(diagonal), 2 * size, size))
    blocks[:, :size] = diagonal
    blocks[:-1, size:] = lower
    return band_of_blocks(blocks, bands).reshape(-1, bands)[:n]


def _backwards(L_inverse: FloatArray, below: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """M' p = xi: the covariance P_i of every block of p, and F_i, the regression of p_i on p_{i+1}."""
    transposed = L_inverse.swapaxes(1, 2)
    F = -transposed[:-1] @ below.swapaxes(1, 2)
    P = (transposed * weights[:, None, :]) @ L_inverse
    for i in range(len(P) - 2, -1, -1):
        P[i] += F[i] @ P[i + 1] @ F[i].T
    return P, F


def _forwards(C_inverse: FloatArray, below: FloatArray, P: FloatArray, F: FloatArray) -> tuple[FloatArray, FloatArray]:
    """C y = p: the covariances of y_i with itself, and of y_{i+1} with y_i.

    R is the regression of y_i on p_{i+1}: given p_i, what came before does not depend on what comes after.
    """
    diagonal, lower = np.empty_like(P), np.empty_like(F)
    diagonal[0] = C_inverse[0] @ P[0] @ C_inverse[0].T
    R = C_inverse[0] @ F[0] if len(F) else np.zeros_like(P[0])
    for i in range(1, len(P)):
        back = below[i - 1]
        shared = P[i] @ R.T  # of p_i with y_{i-1}
        pushed = back @ shared.T
        lower[i - 1] = C_inverse[i] @ (shared - back @ diagonal[i - 1])
        middle = P[i] - pushed - pushed.T + back @ diagonal[i - 1] @ back.T
        diagonal[i] = C_inverse[i] @ middle @ C_inverse[i].T
        if i < len(F):
            R = (C_inverse[i] - C_inverse[i] @ back @ R) @ F[i]
    return diagonal, lower
