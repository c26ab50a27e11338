"""Banded Toeplitz strategies for federated training, where the minimum separation is not known in advance.

A banded strategy is best when the separation is exactly its number of bands, and fragile when it is not. Two
remedies (the paper's Appendix on federated training):

    robust_banded_toeplitz      the paper's heuristic: optimize theta for the largest separation b, then let
                                it fade out from the smallest, b_0:  theta_i <- (b - i) / (b - b_0) theta_i
                                for i >= b_0, counting from 1.
    averaged_banded_toeplitz    what the paper leaves open: minimize the squared error itself, averaged over
                                the separations,  mean_s sensitivity_s(theta)^2 * error(theta).

Both are plain Toeplitz (columns not normalized) with coefficients that never increase: then the sensitivity
under any separation is exactly that of evenly spaced participations, |sum_m theta_{i - m s}|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import mean_squared_error
from bandmf.error.toeplitz import ToeplitzError, mean_weights
from bandmf.optimize.descent import Descent, Watcher, descend
from bandmf.optimize.solution import Clock, Solution
from bandmf.optimize.toeplitz import banded_toeplitz
from bandmf.participation import MinSeparation
from bandmf.sensitivities import sensitivity
from bandmf.strategies import BandedToeplitz
from bandmf.workloads import prefix


def robust_banded_toeplitz(
    steps: int, smallest: int, largest: int, max_participations: int, *, watch: Watcher | None = None
) -> Solution:
    """The paper's heuristic for separations between `smallest` and `largest`.

    `rmse` is the root of the squared error averaged over those separations.

    >>> solution = robust_banded_toeplitz(200, 20, 40, max_participations=5)
    >>> solution.strategy.bands, round(solution.rmse, 4)
    (39, 6.8132)
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    largest = _check.whole("largest", largest, 1, steps, f"steps={steps}")
    smallest = _check.whole("smallest", smallest, 1, largest, f"largest={largest}")
    theta, plain = _faded(steps, smallest, largest, watch)
    found = Descent(theta, 0.0, plain.iterations, plain.outcome)
    return _solution(found, steps, range(smallest, largest + 1), max_participations, clock)


def averaged_banded_toeplitz(
    steps: int,
    separations: Iterable[int],
    max_participations: int,
    bands: int | None = None,
    *,
    watch: Watcher | None = None,
) -> Solution:
    """The Toeplitz strategy of least squared error averaged over `separations`.

    `bands` is the largest separation unless given. The coefficients are kept from increasing, which keeps
    every sensitivity exact.

    >>> solution = averaged_banded_toeplitz(200, range(20, 41), max_participations=5)
    >>> round(solution.rmse, 3)
    6.79
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    wanted = sorted(_check.whole("separations", s, 1, steps, f"steps={steps}") for s in separations)
    if not wanted:
        raise ValueError("separations=[]: must name at least one")
    bands = _check.whole("bands", wanted[-1] if bands is None else bands, 1, steps, f"steps={steps}")
    loss = _AveragedLoss(steps, bands, wanted, _check.whole("max_participations", max_participations))
    theta = np.zeros(bands)
    faded = _faded(steps, min(wanted[0], bands), bands)[0]
    theta[: len(faded)] = faded
    falls = np.maximum(-np.diff(theta, append=0.0), 1e-6 * theta[0])
    descent = descend(loss, np.sqrt(falls), tolerance=1e-11, width=bands, watch=watch)
    descent.x = loss.theta(descent.x)
    return _solution(descent, steps, wanted, max_participations, clock)


class _AveragedLoss:
    """log(theta' Q theta * error(theta)); the unknowns are the roots of the falls theta_i - theta_{i+1}."""

    def __init__(self, steps: int, bands: int, separations: Sequence[int], most: int) -> None:
        self.workload = prefix(steps)
        self.Q = np.mean([_pattern_matrix(steps, bands, s, most) for s in separations], axis=0)

    @staticmethod
    def theta(x: FloatArray) -> FloatArray:
        return np.cumsum((x**2)[::-1])[::-1]

    def __call__(self, x: FloatArray) -> tuple[float, FloatArray]:
        theta = self.theta(x)
        error = ToeplitzError(theta, self.workload, normalize=False, terms=self.workload.steps)
        head, beyond = mean_weights(error)
        total, pull = error.head_total(head, beyond), self.Q @ theta
        square = float(theta @ pull)
        slope = error.gradient(head, beyond, np.zeros(0)) / total + 2 * pull / square
        return math.log(total) + math.log(square), np.cumsum(slope) * 2 * x


def _pattern_matrix(steps: int, bands: int, separation: int, most: int) -> FloatArray:
    """Q with theta' Q theta = |sum_m theta_{i - m s}|^2: the squared sensitivity of falling coefficients."""
    Q, count = np.zeros((bands, bands)), MinSeparation(most, separation).count(steps)
    for m in range(count):
        kept = min(bands, steps - m * separation)  # rows beyond the last step are cut off
        for other in range(max(0, m - (bands - 1) // separation), m + 1):
            lag = (m - other) * separation
            # theta_j of column m meets theta_{j + lag} of the earlier column.
            pairs = np.arange(max(0, min(kept, bands - lag)))
            Q[pairs, pairs + lag] += 1
            if lag:
                Q[pairs + lag, pairs] += 1
    return Q


def _faded(steps: int, smallest: int, largest: int, watch: Watcher | None = None) -> tuple[FloatArray, Solution]:
    """The optimum for the largest separation, faded out from the smallest; and the optimum itself."""
    plain = banded_toeplitz(steps, largest, normalize_columns=False, watch=watch)
    theta = plain.strategy.columns(0, 1)[0].copy()
    later = np.arange(smallest + 1, largest + 1)  # i > b_0, counting from 1
    theta[smallest:] *= (largest - later) / max(1, largest - smallest)
    return theta[: largest - 1] if smallest < largest else theta, plain


def _solution(found: Descent, steps: int, separations: Sequence[int], most: int, clock: Clock) -> Solution:
    """The solution with the coefficients that were found."""
    strategy = BandedToeplitz(found.x / np.linalg.norm(found.x), steps, normalize_columns=False)
    reach = [sensitivity(strategy, MinSeparation(most, s)) for s in separations]
    average = math.sqrt(np.mean(np.square(reach)) * mean_squared_error(strategy))
    return Solution.of(strategy, average, found, clock)
