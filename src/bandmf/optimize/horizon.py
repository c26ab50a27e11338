"""Horizon strategies: near-optimal general banded strategies from a few Toeplitz optima.

Away from the first steps, the best column depends only on how many steps remain, and with m steps left it is
very nearly the Toeplitz optimum for 2 m steps. So: Toeplitz optima at log-spaced horizons, interpolated in
the logarithm of the horizon, every column scaled to norm one. O(b log n) numbers describe it; at n = 4096,
b = 16 it is 0.05 percent above the best banded strategy (normalized Toeplitz: 0.30 percent).
"""

from __future__ import annotations

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import rmse
from bandmf.optimize import arguments
from bandmf.optimize.descent import Descent, Outcome
from bandmf.optimize.solution import Clock, Solution
from bandmf.optimize.toeplitz import banded_toeplitz
from bandmf.participation import Participation
from bandmf.strategies import Banded
from bandmf.workloads import Workload, workload_for

_POINTS_PER_OCTAVE = 2


def horizon(
    steps: int,
    bands: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str = "mean",
) -> Solution:
    """The interpolated strategy, for prefix or any Toeplitz workload that settles.

    >>> solution = horizon(256, 16)
    >>> round(solution.rmse / 3.586968 - 1, 4)  # above the best banded strategy
    0.0038
    """
    clock = Clock()
    steps, bands = arguments.sizes(steps, bands)
    workload = workload_for(steps, workload)
    arguments.require_single(participation, "use optimize.banded_toeplitz")
    _check.choice("objective", objective, ("mean",))
    strategy = Banded(horizon_columns(steps, bands, workload))
    value = rmse(strategy, workload=workload)
    detail = "interpolated; optimize.banded improves on it and proves a gap"
    found = Descent(strategy.columns(), value, 0, Outcome.CLOSED_FORM, detail)
    return Solution.of(strategy, value, found, clock)


def horizon_columns(steps: int, bands: int, workload: Workload) -> FloatArray:
    """Unit columns, shape (steps, bands)."""
    workload.require_steps(steps)
    if workload.limit is None or workload.coefficients is None:
        raise ValueError(f"workload={workload.name!r}: must be Toeplitz and settle; use optimize.banded")
    largest = 2 * steps
    octaves = max(1, int(np.ceil(_POINTS_PER_OCTAVE * np.log2(largest / 2))))
    horizons = np.unique(np.round(np.geomspace(2, largest, octaves + 1)).astype(int))
    table = np.zeros((len(horizons), bands))
    for row, length in enumerate(horizons):
        table[row, : min(bands, length)] = _toeplitz_optimum(int(length), min(bands, int(length)), workload)
    left = steps - np.arange(steps)
    position = np.interp(np.log(2 * left), np.log(horizons), np.arange(len(horizons)))
    below = np.minimum(position.astype(int), len(horizons) - 1)
    above = np.minimum(below + 1, len(horizons) - 1)
    share = (position - below)[:, None]
    columns = (1 - share) * table[below] + share * table[above]
    columns[np.arange(bands) >= left[:, None]] = 0
    return columns / np.linalg.norm(columns, axis=1, keepdims=True)


def _toeplitz_optimum(steps: int, bands: int, workload: Workload) -> FloatArray:
    """The plain Toeplitz optimum for another number of steps of the same workload."""
    shorter = Workload(workload.name, steps, workload.operator, workload.coefficients, workload.limit)
    solution = banded_toeplitz(steps, bands, workload=shorter, normalize_columns=False)
    return solution.strategy.columns(0, 1)[0]
