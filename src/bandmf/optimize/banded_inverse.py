"""The best Toeplitz strategy with a banded inverse: C^-1 = r_0 ... r_{p-1}, numerically optimized.

The error of A C^-1 is quadratic in r, with w = r * lambda; the sensitivity is |v| with v = C u, that is
r * v = u, u the indicator of evenly spaced participations. Each is one filter, and so is its adjoint. Where
the coefficients of C never increase that |v| is the exact sensitivity; the solution is judged by the
certified one in any case.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

from bandmf import _check
from bandmf._deprecated import once_positional
from bandmf._types import FloatArray
from bandmf.error import max_error, rmse
from bandmf.error.toeplitz_response import correlate
from bandmf.optimize import arguments
from bandmf.optimize.solution import Clock, Solution, Watcher, descend
from bandmf.participation import Participation, checked_participation
from bandmf.strategies import BandedInverse, banded_inverse_square_root
from bandmf.workloads import Workload, workload_for

_MOST_STEPS = 2**24


@once_positional("participation", "workload", "objective")
def banded_inverse(
    steps: int,
    bands: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str = "mean",
    watch: Watcher | None = None,
) -> Solution:
    """The strategy of least error whose inverse has `bands` Toeplitz coefficients.

    `rmse` includes the sensitivity under `participation`. O(n p) an evaluation. With two bands it is
    lambda-CGD with the best lambda.

    >>> solution = banded_inverse(1024, 8)
    >>> round(solution.rmse, 4), solution.converged
    (3.5695, True)
    """
    clock = Clock()
    steps, bands = arguments.sizes(steps, bands, _MOST_STEPS)
    workload = workload_for(steps, workload)
    arguments.require_toeplitz(workload, normalized=False)
    largest = _check.choice("objective", objective, ("mean", "max")) == "max"
    count, separation = checked_participation(participation).spacing(steps)
    loss = _Loss(workload, separation, count, largest)
    descent = descend(loss, banded_inverse_square_root(steps, bands).inverse_coefficients[1:], watch=watch)
    strategy = BandedInverse(np.append(1.0, descent.x), steps)
    worst = max_error(strategy, workload=workload, participation=participation) if largest else None
    mean = rmse(strategy, workload=workload, participation=participation)
    return Solution.of(strategy, mean, descent, clock, objective=worst)


class _Loss:
    """log(|v|^2 * error) over r_1 ... r_{p-1}, r_0 = 1."""

    def __init__(self, workload: Workload, separation: int, count: int, largest: bool) -> None:
        assert workload.coefficients is not None
        n = workload.steps
        self.lambdas = workload.coefficients(n)
        self.weights = np.ones(n) if largest else 1 - np.arange(n) / n
        self.pulses = np.zeros(n)
        self.pulses[: count * separation : separation] = 1

    def __call__(self, x: FloatArray) -> tuple[float, FloatArray]:
        r, bands = np.append(1.0, x), len(x) + 1
        w = lfilter(r, [1.0], self.lambdas)
        error = float(np.sum(self.weights * w * w))
        error_slope = correlate(np.pad(2 * self.weights * w, (0, bands - 1)), self.lambdas)
        v = lfilter([1.0], r, self.pulses)
        square = float(np.sum(v * v))
        adjoint = lfilter([1.0], r, 2 * v[::-1])[::-1]
        square_slope = -correlate(np.pad(adjoint, (0, bands - 1)), v)
        value = math.log(error) + math.log(square)
        return value, (error_slope / error + square_slope / square)[1:]
