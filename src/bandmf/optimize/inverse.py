"""The best Toeplitz strategy with a banded inverse: C^-1 = r_0 ... r_{p-1}, numerically optimised.

The error of A C^-1 is quadratic in r, with w = r * lambda; the sensitivity is |v| with v = C u, that is
r * v = u, u the indicator of evenly spaced participations. Each is one filter, and so is its adjoint. Where
the coefficients of C never increase that |v| is the exact sensitivity; the solution is judged by the
certified one in any case.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

from bandmf import _check, workloads
from bandmf._check import FloatArray
from bandmf.error import max_error, rmse
from bandmf.optimize.buffered import spacing
from bandmf.optimize.solution import Clock, Solution, Watcher, descend
from bandmf.participation import Participation
from bandmf.response import correlate
from bandmf.strategies import BandedInverse, banded_inverse_square_root
from bandmf.workloads import Workload

_MOST_STEPS = 2**24


def banded_inverse(
    steps: int,
    bands: int,
    participation: Participation | None = None,
    workload: Workload | None = None,
    objective: str = "mean",
    *,
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
    steps = _check.whole("steps", steps, 1, _MOST_STEPS)
    bands = _check.whole("bands", bands, 1, steps, f"steps={steps}")
    workload = workloads.prefix(steps) if workload is None else workload
    workload.require_steps(steps)
    largest = _check.choice("objective", objective, ("mean", "max")) == "max"
    loss = _Loss(workload, *spacing(participation, steps), largest)
    descent = descend(loss, banded_inverse_square_root(steps, bands).inverse_coefficients[1:], watch=watch)
    strategy = BandedInverse(np.append(1.0, descent.x), steps)
    mean = rmse(strategy, workload, participation)
    return Solution(
        strategy=strategy,
        rmse=mean,
        objective=max_error(strategy, workload, participation) if largest else mean,
        optimality_gap=None,
        iterations=descent.iterations,
        seconds=clock.seconds(),
        converged=descent.converged,
        message=descent.message,
    )


class _Loss:
    """log(|v|^2 * error) over r_1 ... r_{p-1}, r_0 = 1."""

    def __init__(self, workload: Workload, separation: int, count: int, largest: bool) -> None:
        if workload.coefficients is None:
            raise ValueError(f"workload={workload.name!r}: must be Toeplitz for a Toeplitz strategy")
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
