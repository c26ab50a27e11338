"""Families with a single parameter, found without gradients: a sweep over its logarithm, then a scalar search.

inverse_plus_constant    theta_i = 1/i + c, i = 1 ... bands          the paper's gradient-free family
lti                      C(x) = (1 - (1 - nu) x)^(-1/2)              nu the damping
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar

from bandmf import _check, strategies
from bandmf._types import FloatArray
from bandmf.error import max_error, rmse
from bandmf.error.closed_form import ClosedForm, toeplitz_error
from bandmf.optimize import arguments
from bandmf.optimize.descent import Descent, Outcome
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import Participation
from bandmf.strategies import BandedToeplitz
from bandmf.workloads import Workload, workload_for


def inverse_plus_constant(
    steps: int,
    bands: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str = "mean",
    normalize_columns: bool = True,
) -> Solution:
    """The best c for a Toeplitz workload; `objective` is "mean" or "max".

    With `normalize_columns` the columns are normalized inside the search, not after it. Several
    participations must be at least `bands` steps apart.

    >>> solution = inverse_plus_constant(1024, 16, normalize_columns=False)
    >>> round(solution.rmse / 6.342793 - 1, 4)  # above the best Toeplitz strategy
    0.0013
    """
    clock = Clock()
    steps, bands = arguments.sizes(steps, bands)
    workload = workload_for(steps, workload)
    normalize = _check.choice("normalize_columns", normalize_columns, (True, False))
    largest = _check.choice("objective", objective, ("mean", "max")) == "max"
    arguments.require_toeplitz(workload, normalize)
    root = math.sqrt(arguments.disjoint_count(participation, steps, bands, normalize))

    def coefficients(c: float) -> FloatArray:
        theta = 1 / np.arange(1, bands + 1) + c
        return theta / np.linalg.norm(theta)

    def error(c: float) -> ClosedForm:
        return toeplitz_error(coefficients(c), workload, normalize)

    def squared(c: float) -> float:
        with np.errstate(all="ignore"):
            try:
                value = error(c).maximum() if largest else error(c).mean()
            except ValueError:  # so close to instability that its error is out of reach
                return math.inf
        return value if value > 0 else math.inf

    grid = np.append(0.0, np.geomspace(1e-5, 1e4, 37))
    if not workload.is_prefix:  # workloads that forget may want a negative constant
        grid = np.append(-np.geomspace(0.9, 1e-5, 21), grid)
    found = _search(squared, grid, 1e-9)
    c = float(found.x[0])
    found.detail = f"theta_i = 1/i {'+' if c >= 0 else '-'} {abs(c):.6g}"
    strategy = BandedToeplitz(coefficients(c), steps, normalize)
    mean = root * math.sqrt(error(c).mean())
    return Solution.of(strategy, mean, found, clock, objective=root * math.sqrt(found.loss))


def lti(
    steps: int, *, workload: Workload | None = None, participation: Participation | None = None, objective: str = "mean"
) -> Solution:
    """The LTI strategy with the best damping; `objective` is "mean" or "max".

    `rmse` includes the sensitivity under `participation`. O(n log n) an evaluation.

    >>> from bandmf.participation import FixedEpochs
    >>> solution = lti(256, participation=FixedEpochs(4))
    >>> round(solution.rmse, 4), solution.message
    (5.9674, 'no lower point in reach; damping=0.0102')
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    workload = workload_for(steps, workload)
    measure = max_error if _check.choice("objective", objective, ("mean", "max")) == "max" else rmse

    def value(log_damping: float) -> float:
        strategy = strategies.lti(steps, math.exp(log_damping))
        return measure(strategy, workload=workload, participation=participation)

    # Below 0.01 / n the damping is hardly felt within n steps; none at all may still be the best.
    found = _search(value, np.linspace(math.log(0.01 / steps), 0.0, 25), 1e-9)
    undamped = value(-math.inf)
    damping = math.exp(found.x[0])
    if undamped <= found.loss:
        damping, found.loss, found.outcome = 0.0, undamped, Outcome.CONVERGED
    elif damping == 1:  # independent noise: nothing lies beyond
        found.outcome = Outcome.CONVERGED
    found.detail = f"damping={damping:.3g}"
    strategy = strategies.lti(steps, damping)
    mean = rmse(strategy, workload=workload, participation=participation)
    return Solution.of(strategy, mean, found, clock, objective=found.loss)


def _search(value: Callable[[float], float], grid: FloatArray, tolerance: float) -> Descent:
    """The lowest point of the grid, refined between its neighbors."""
    values = [value(point) for point in grid]
    middle = int(np.argmin(values))
    low, high = grid[max(0, middle - 1)], grid[min(len(grid) - 1, middle + 1)]
    bounds, finest = (float(low), float(high)), tolerance * min(1.0, float(high - low))
    best = minimize_scalar(value, bounds=bounds, method="bounded", options={"xatol": finest})
    point, lowest = (best.x, best.fun) if best.fun <= values[middle] else (grid[middle], values[middle])
    at_the_end = point in (grid[0], grid[-1]) and point != 0
    outcome = Outcome.CONVERGED if best.success and not at_the_end else Outcome.STALLED
    return Descent(np.array([point]), float(lowest), len(grid) + int(best.nfev), outcome)
