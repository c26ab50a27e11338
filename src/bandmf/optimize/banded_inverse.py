"""The best Toeplitz strategy with a banded inverse: C^-1 = r_0 ... r_{p-1}, numerically optimized.

The error of A C^-1 is quadratic in r, with w = r * lambda. The sensitivity depends on the coefficients c of C,
r * c = 1:

    one participation      |c|
    FixedEpochs(k)         the root of sum |X_ij| over the pattern, X = C'C
    MinSeparation(k, s)    |sum of k shifts by s| of c where c never increases, else of its least majorant that does
                           not: certified, but not always the tightest bound

Each is a filter, and so is its adjoint. With MinSeparation, where c is not monotone, the certified error lies between
two losses: that of the majorant, and that of the one pattern 0, s, 2 s, ..., as with FixedEpochs. A minimum of the
second where the two meet is one of the certified error, and often below the best c that never increases. Elsewhere the
bounds have no derivative worth having; up to a few hundred steps the search goes on without any. The solution is the
best of all that was found, and of the square root's inverse, by its certified error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.optimize import minimize

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import max_error, rmse
from bandmf.error.closed_form import BandedInverseError
from bandmf.error.toeplitz_response import correlate, divide_series
from bandmf.optimize import arguments
from bandmf.optimize.descent import Descent, Outcome, Watcher, descend
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import FixedEpochs, Participation, checked_participation
from bandmf.strategies import BandedInverse, banded_inverse_square_root
from bandmf.workloads import Workload, workload_for

_MOST_STEPS = 2**24
_POLISHED_SIZE = 256  # steps times bands up to which the certified error itself is searched
_POLISHED = 1e-9  # relative gain below which polishing ends
_ROUNDS_OF_POLISHING = 8


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
    participation = checked_participation(participation)
    measure = max_error if largest else rmse

    @cache
    def of(x: tuple[float, ...]) -> float:
        return measure(BandedInverse(np.array([1.0, *x]), steps), workload=workload, participation=participation)

    def certified(x: FloatArray) -> float:
        return of(tuple(x))

    start = banded_inverse_square_root(steps, bands).inverse_coefficients[1:]
    descent = Descent(start, 0.0, 0, Outcome.CLOSED_FORM, "one band: nothing to choose")
    if bands > 1:
        losses = _losses(workload, participation, largest)
        descents = [descend(loss, start, watch=watch) for loss in losses]
        for each in descents:
            each.x = min((start, each.x), key=certified)
        loss, descent = min(zip(losses, descents, strict=True), key=lambda pair: certified(pair[1].x))
        descent.iterations = sum(each.iterations for each in descents)
        attained = math.isclose(math.exp(loss(descent.x)[0]), certified(descent.x) ** 2, rel_tol=1e-9)
        if descent.outcome is Outcome.STALLED or not (attained and loss.smooth(descent.x)):
            descent = _polish(certified, descent, steps)
    strategy, least = BandedInverse(np.append(1.0, descent.x), steps), certified(descent.x)
    mean = rmse(strategy, workload=workload, participation=participation) if largest else least
    return Solution.of(strategy, mean, descent, clock, objective=least)


def _polish(certified: Callable[[FloatArray], float], descent: Descent, steps: int) -> Descent:
    """Search the certified error itself, without derivatives, until a fresh simplex gains nothing."""
    if steps * (len(descent.x) + 1) > _POLISHED_SIZE:
        descent.outcome, descent.detail = Outcome.STALLED, "where the worst pattern changes"
        return descent

    def guarded(x: FloatArray) -> float:
        try:
            return math.log(certified(x))
        except ValueError:  # so unstable that it overflows
            return math.inf

    best, value = descent.x, guarded(descent.x)
    for _ in range(_ROUNDS_OF_POLISHING):
        found = minimize(
            guarded,
            best,
            method="Nelder-Mead",
            options={"xatol": 1e-10, "fatol": 1e-13, "maxfev": 400 * len(best), "adaptive": True},
        )
        gained = value - float(found.fun)
        best, value = (found.x, float(found.fun)) if gained > 0 else (best, value)
        if gained <= _POLISHED:
            return Descent(best, value, descent.iterations, Outcome.CONVERGED, "polished without derivatives")
    return Descent(best, value, descent.iterations, Outcome.LIMIT, "polished without derivatives")


def chain_to_inverse(r: FloatArray, c: FloatArray, slope: FloatArray) -> FloatArray:
    """d/dr from d/dc, where r * c = 1: the adjoint of a filter, which is a filter."""
    adjoint = divide_series(slope[::-1], r)[::-1]
    return -correlate(np.pad(adjoint, (0, len(r) - 1)), c)


def _losses(workload: Workload, participation: Participation, largest: bool) -> list[_Loss]:
    """The certified error, or bounds from above and from below."""
    if isinstance(participation, FixedEpochs):
        return [_Loss(workload, participation, largest, aligned=True)]
    above = _Loss(workload, participation, largest)
    return [above] if above.count == 1 else [above, _Loss(workload, participation, largest, aligned=True)]


class _Loss:
    """log(sensitivity^2 * error) over r_1 ... r_{p-1}, r_0 = 1; `aligned`: over the pattern 0, s, 2 s, ... alone."""

    def __init__(self, workload: Workload, participation: Participation, largest: bool, aligned: bool = False) -> None:
        assert workload.coefficients is not None
        n = workload.steps
        self.steps, self.workload, self.largest = n, workload, largest
        self.count, self.separation = participation.spacing(n)
        self.aligned = aligned

    def __call__(self, x: FloatArray) -> tuple[float, FloatArray]:
        r = np.append(1.0, x)
        found = BandedInverseError(r, self.workload)
        error, error_slope = found.maximum() if self.largest else found.mean(), found.gradient(self.largest)
        c = self.coefficients(x)
        square, slope = self._one_pattern(c) if self.aligned else self._separated(c)
        square_slope = chain_to_inverse(r, c, slope)
        value = math.log(error) + math.log(square)
        return value, (error_slope / error + square_slope / square)[1:]

    def coefficients(self, x: FloatArray) -> FloatArray:
        """c, the first column of C."""
        return divide_series(np.eye(1, self.steps)[0], np.append(1.0, x))

    def smooth(self, x: FloatArray) -> bool:
        """Whether the loss has a derivative here, and the majorant, where there is one, is C itself."""
        c = self.coefficients(x)
        if self.aligned:
            shifted = self._shifted(c)
            X = np.abs(shifted @ shifted.T)
            return bool(X.min() > 1e-6 * X.max())
        falls, rounding = -np.diff(c), 1e-14 * c[0]
        level = (c[:-1] > 1e-6 * c[0]) & (falls < 1e-9 * c[0])
        return self.count == 1 or bool(c.min() >= -rounding and falls.min() >= -rounding and not level.any())

    def _one_pattern(self, c: FloatArray) -> tuple[float, FloatArray]:
        """sum |X_ij| over the pattern that starts at 0, and its derivative."""
        shifted = self._shifted(c)
        X = shifted @ shifted.T
        slopes = 2 * np.sign(X) @ shifted
        return float(np.abs(X).sum()), self._shift_back(slopes)

    def _shifted(self, c: FloatArray) -> FloatArray:
        """The columns of C that the pattern meets."""
        shifted = np.zeros((self.count, self.steps))
        for m in range(self.count):
            shifted[m, m * self.separation :] = c[: self.steps - m * self.separation]
        return shifted

    def _separated(self, c: FloatArray) -> tuple[float, FloatArray]:
        """|sum of shifts|^2 of the least non-increasing majorant of |c|, and its derivative."""
        if self.count == 1:
            return float(c @ c), 2 * c
        size = np.abs(c)[::-1]
        majorant = np.maximum.accumulate(size)[::-1]
        total = np.zeros(self.steps)
        for m in range(self.count):
            total[m * self.separation :] += majorant[: self.steps - m * self.separation]
        slope = self._shift_back(np.broadcast_to(2 * total, (self.count, self.steps)))
        # Each entry of the majorant is some later |c_t|: that one moves it.
        record = np.maximum.accumulate(np.where(size == majorant[::-1], np.arange(self.steps), 0))
        moved_by = self.steps - 1 - record[::-1]
        moved = np.bincount(moved_by, slope, self.steps).astype(np.float64)
        return float(total @ total), moved * np.sign(c)

    def _shift_back(self, slopes: FloatArray) -> FloatArray:
        """The derivative with respect to c from those with respect to each of its shifts."""
        result = np.zeros(self.steps)
        for m in range(self.count):
            result[: self.steps - m * self.separation] += slopes[m, m * self.separation :]
        return result
