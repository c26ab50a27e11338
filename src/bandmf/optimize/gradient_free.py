"""The paper's one-parameter family theta_i = 1/i + c: near-optimal without any gradient."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar

from bandmf import _check, workloads
from bandmf._check import FloatArray
from bandmf.optimize.solution import Clock, Solution
from bandmf.strategies import BandedToeplitz
from bandmf.toeplitz_error import ToeplitzError


def inverse_plus_constant(steps: int, bands: int, normalize_columns: bool = True) -> Solution:
    """The best c, by a sweep over its logarithm and a scalar search around the best, on the prefix workload.

    With `normalize_columns` the columns are normalised inside the search, not after it.

    >>> solution = inverse_plus_constant(1024, 16, normalize_columns=False)
    >>> round(solution.rmse / 6.342793 - 1, 4)  # above the best Toeplitz strategy
    0.0013
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    bands = _check.whole("bands", bands, 1, steps, f"steps={steps}")
    normalize = _check.choice("normalize_columns", normalize_columns, (True, False))
    workload = workloads.prefix(steps)
    tried = 0

    def coefficients(log_c: float) -> FloatArray:
        theta = 1 / np.arange(1, bands + 1) + math.exp(log_c)
        return theta / np.linalg.norm(theta)

    def squared(log_c: float) -> float:
        nonlocal tried
        tried += 1
        return ToeplitzError(coefficients(log_c), workload, normalize).mean()

    grid = np.log(np.geomspace(1e-5, 1e4, 37))
    middle = int(np.argmin([squared(log_c) for log_c in grid]))
    low, high = grid[max(0, middle - 1)], grid[min(len(grid) - 1, middle + 1)]
    best = minimize_scalar(squared, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    strategy = BandedToeplitz(coefficients(best.x), steps, normalize)
    rmse = math.sqrt(best.fun)
    return Solution(
        strategy=strategy,
        rmse=rmse,
        objective=rmse,
        optimality_gap=None,
        iterations=tried,
        seconds=clock.seconds(),
        converged=bool(best.success),
        message=f"theta_i = 1/i + {math.exp(best.x):.6g}",
    )
