"""A proof of how far a banded strategy can be from the best one with as many bands.

The total weighted squared error, total(X) = sum_i weights_i (A X^-1 A')_ii, is convex in X = C'C. Its
gradient is -S with S = X^-1 A' D A X^-1, D = diag(weights). Every competitor with sensitivity one has
X*_ii <= 1, hence |X*_ij| <= 1, and X*_ij = 0 outside the band, so that by convexity

    total(X*) >= total(X) - sum over ordered pairs |i - j| < b of max(S_ij (1 - X_ij), -S_ij (1 + X_ij)).

S is the inverse of the banded matrix C' M D^-1 M' C, M = C A^-1; its entries in the band come from a block
Cholesky factorization and selected inversion in O(n b^2). The sum of S_ij X_ij over the band is `total`
again: a free check of the arithmetic, which is made every time.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_banded
from scipy.linalg.lapack import dtrtri

from bandmf import band_columns
from bandmf._types import FloatArray
from bandmf.error.band_covariance import band_of_blocks, to_blocks
from bandmf.optimize.objectives import Objective
from bandmf.strategies import Strategy
from bandmf.workloads import Workload


def optimality_gap(strategy: Strategy, workload: Workload, errors: FloatArray, objective: Objective) -> float:
    """How far, relatively, the root of the objective can at most be above the best with as many bands.

    Guarantee: for every strategy of sensitivity one with as many bands, its objective times (1 + gap) is at
    least this strategy's; up to rounding, about 1e-10 at a hundred thousand steps. `errors` are the
    strategy's own per-step errors. The strategy's columns must have norm at most one. For "max" the weights
    of a p-norm are used, which proves little unless the strategy is nearly optimal.
    """
    columns = strategy.columns()
    assert workload.inverse_columns is not None
    inverse = workload.inverse_columns(0, strategy.steps)
    value = objective.value(errors)
    if objective.name == "last":
        lower = value - _slack(_rank_one_band(columns, inverse), columns, value)
    else:
        lower = lower_bound(columns, inverse, errors, objective.smooth(errors)[1])
    return max(0.0, math.sqrt(value / lower) - 1) if lower > 0 else math.inf


def lower_bound(columns: FloatArray, inverse: FloatArray, errors: FloatArray, weights: FloatArray) -> float:
    """No strategy with as many bands has a smaller weighted mean of its errors."""
    weights = np.maximum(weights, 1e-9 * weights.max())  # D^-1 must be finite
    weights = weights / weights.sum()
    total = float(weights @ errors)
    return total - _slack(_selected_inverse(columns, inverse, weights), columns, total)


def _slack(S: FloatArray, columns: FloatArray, total: float) -> float:
    """The sum over the band, from compact columns of S and of C."""
    X = band_columns.gram(columns)
    twice = np.full(S.shape[1], 2.0)
    twice[0] = 1.0
    check = float(np.sum(S * X * twice))
    if not abs(check - total) <= 1e-5 * total:
        raise ArithmeticError(
            f"the certificate's self-test failed: sum of S X is {check:.9g}, total error is {total:.9g}"
        )
    return float(np.sum(np.maximum(S * (1 - X), -S * (1 + X)) * twice))


def _rank_one_band(columns: FloatArray, inverse: FloatArray) -> FloatArray:
    """S for weight on the last step alone: v v' with v = X^-1 A' e_n, by three banded solves."""
    n, bands = columns.shape
    v = _solve_transposed(inverse, np.eye(1, n, n - 1)[0])
    v = _solve_transposed(columns, v)
    v = solve_banded((bands - 1, 0), columns.T, v)
    return np.stack([np.append(v[r:], np.zeros(r)) * v for r in range(bands)], axis=1)


def _solve_transposed(columns: FloatArray, right: FloatArray) -> FloatArray:
    """Solve L' v = right for lower banded L given by its compact columns."""
    n, width = columns.shape
    upper = np.zeros((width, n))
    for r in range(width):
        upper[width - 1 - r, r:] = columns[: n - r, r]
    return solve_banded((0, width - 1), upper, right)


def _selected_inverse(columns: FloatArray, inverse: FloatArray, weights: FloatArray) -> FloatArray:
    """Compact columns, as many as bands, of S = (C' M D^-1 M' C)^-1."""
    n, bands = columns.shape
    M = band_columns.product(columns, inverse)
    size = max(bands + M.shape[1] - 2, 16)  # half-bandwidth: 2 (b - 1) + a
    diagonal, below = _normal_blocks(to_blocks(columns, size), to_blocks(M, size), weights)
    inverse_diagonal, inverse_below = _invert_block_tridiagonal(diagonal, below)
    blocks = np.zeros((len(diagonal), 2 * size, size))
    blocks[:, :size] = inverse_diagonal
    blocks[:-1, size:] = inverse_below
    return band_of_blocks(blocks, bands).reshape(-1, bands)[:n]


def _normal_blocks(C: FloatArray, M: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Diagonal and lower blocks of Z = H D^-1 H' with H = C' M, from stacked blocks of C and M."""
    count, _, size = C.shape
    scale = np.ones(count * size)
    scale[: len(weights)] = 1 / np.sqrt(weights)
    scale = scale.reshape(count, 1, size)
    Ct = C.swapaxes(1, 2)
    H = Ct @ M * scale  # diagonal blocks; then those above and below
    above = Ct[:-1, :, size:] @ M[1:, :size] * scale[1:]
    below = Ct[1:, :, :size] @ M[:-1, size:] * scale[:-1]
    diagonal = H @ H.swapaxes(1, 2)
    diagonal[:-1] += above @ above.swapaxes(1, 2)
    diagonal[1:] += below @ below.swapaxes(1, 2)
    return diagonal, H[1:] @ above.swapaxes(1, 2) + below @ H[:-1].swapaxes(1, 2)


def _invert_block_tridiagonal(diagonal: FloatArray, below: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The diagonal and lower blocks of the inverse of a symmetric block-tridiagonal matrix."""
    count = len(diagonal)
    factors = np.empty_like(diagonal)
    links = np.empty_like(below)  # L[i+1, i] L[i, i]^-1 of the block Cholesky factor L
    for i in range(count):
        rest = diagonal[i]
        if i:
            half = below[i - 1] @ factors[i - 1].T
            links[i - 1] = half @ factors[i - 1]
            rest = rest - half @ half.T
        factors[i] = dtrtri(np.linalg.cholesky(rest), lower=1)[0]
    result = factors.swapaxes(1, 2) @ factors
    result_below = np.empty_like(below)
    for i in range(count - 2, -1, -1):
        result_below[i] = -result[i + 1] @ links[i]
        result[i] -= links[i].T @ result_below[i]
    return result, result_below
