"""The best damping of the LTI strategy C(x) = (1 - (1 - nu) x)^(-1/2) for given steps and participation."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar

from bandmf import _check
from bandmf.error import max_error, rmse
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import Participation
from bandmf.strategies.square_root import lti as lti_strategy
from bandmf.workloads import Workload


def lti(
    steps: int,
    participation: Participation | None = None,
    workload: Workload | None = None,
    objective: str = "mean",
) -> Solution:
    """The LTI strategy with the best damping: a sweep over its logarithm, then a scalar search.

    `rmse` includes the sensitivity under `participation`. O(n log n) an evaluation.

    >>> from bandmf.participation import FixedEpochs
    >>> solution = lti(256, FixedEpochs(4))
    >>> round(solution.rmse, 4), solution.message
    (5.9674, 'damping=0.0102')
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    measure = max_error if _check.choice("objective", objective, ("mean", "max")) == "max" else rmse
    tried = 0

    def value(log_damping: float) -> float:
        nonlocal tried
        tried += 1
        return measure(lti_strategy(steps, math.exp(log_damping)), workload, participation)

    # Below 0.01 / n the damping is not felt within n steps.
    grid = np.linspace(math.log(0.01 / steps), 0.0, 25)
    middle = int(np.argmin([value(point) for point in grid]))
    low, high = grid[max(0, middle - 1)], grid[min(len(grid) - 1, middle + 1)]
    best = minimize_scalar(value, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    damping = math.exp(best.x)
    strategy = lti_strategy(steps, damping)
    return Solution(
        strategy=strategy,
        rmse=rmse(strategy, workload, participation),
        objective=float(best.fun),
        optimality_gap=None,
        iterations=tried,
        seconds=clock.seconds(),
        converged=bool(best.success),
        message=f"damping={damping:.3g}",
    )
