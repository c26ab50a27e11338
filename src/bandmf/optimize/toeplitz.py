"""The best banded Toeplitz strategy, exactly, for any number of steps.

Minimizes |theta|^2 times the mean (or last, weighted, largest) squared error over theta. The response is cut
off where it has settled and the rest summed in closed form; the cut-off starts coarse and grows until
nothing moves, so that n = 10^12 costs little more than n = 10^4.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import per_step_error, rmse
from bandmf.error.closed_form import toeplitz_error
from bandmf.error.toeplitz import ToeplitzError, mean_weights
from bandmf.error.toeplitz_response import first_terms
from bandmf.error.toeplitz_settled import SMALLEST, SettledToeplitz
from bandmf.optimize import arguments
from bandmf.optimize.descent import Descent, Outcome, Watcher, descend
from bandmf.optimize.objectives import Objective, parse
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import Participation
from bandmf.strategies import BandedToeplitz
from bandmf.strategies.square_root import square_root_coefficients
from bandmf.workloads import Workload, workload_for

NORMALIZE = (False, "after", "optimized")
_NEGLIGIBLE_END = 1e-5  # of all steps


def banded_toeplitz(
    steps: int,
    bands: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str | FloatArray = "mean",
    normalize_columns: bool | str = "optimized",
    terms: int | None = None,
    tolerance: float = 1e-14,
    start: FloatArray | None = None,
    watch: Watcher | None = None,
) -> Solution:
    """The banded Toeplitz strategy of least error.

    `normalize_columns`: False; "after", the paper's post-processing; or "optimized", optimized as such,
    which is never worse. `terms` fixes the paper's approximate loss with cut-off m (Appendix "Scaling beyond
    n > 10^7") instead of the exact one: for comparison only, since it can report less than is achievable.
    The search ends when an iteration improves the loss by less than `tolerance`, relatively; the error that
    is returned is exact all the same. `start` are coefficients to begin with (see `stretch`), the square root's
    if None. Several participations must be at least `bands` steps apart.

    >>> solution = banded_toeplitz(1024, 16, normalize_columns=False)
    >>> round(solution.rmse, 6), solution.converged
    (6.342793, True)
    """
    clock = Clock()
    steps, bands = arguments.sizes(steps, bands)
    workload = workload_for(steps, workload)
    mode = _check.choice("normalize_columns", normalize_columns, NORMALIZE)
    terms = None if terms is None else _check.whole("terms", terms)
    goal = parse(objective, steps)
    arguments.require_toeplitz(workload, mode == "optimized")
    root = math.sqrt(arguments.disjoint_count(participation, steps, bands, bool(mode)))
    tolerance = _check.real("tolerance", tolerance, 0)
    family = _Family(workload, goal, False, terms, tolerance)
    descent = family.descend(_checked_start(start, bands), watch)
    found = [descent.x]
    # So far from the end, to optimize as normalized moves the coefficients by parts in 10^10.
    if mode == "optimized" and bands / steps > _NEGLIGIBLE_END and descent.outcome is not Outcome.STOPPED:
        family = _Family(workload, goal, True, terms, tolerance)
        descent = family.descend(descent.x, watch)
        found.append(descent.x)
    strategies = [BandedToeplitz(x / np.linalg.norm(x), steps, normalize_columns=bool(mode)) for x in found]
    # The maximum is minimized through a smooth stand-in, which may end a hair above where it started.
    objectives = [_exact_objective(strategy, workload, goal) for strategy in strategies]
    best = int(np.argmin(objectives))
    # The coefficients have norm one, hence sensitivity one for one participation.
    mean = objectives[best] if goal.name == "mean" else rmse(strategies[best], workload=workload)
    return Solution.of(strategies[best], root * mean, descent, clock, objective=root * objectives[best])


def stretch(coefficients: FloatArray, bands: int) -> FloatArray:
    """Coefficients for another number of bands, as a start: the same departure from the square root's.

    >>> few, many = (banded_toeplitz(4096, b, normalize_columns=False).strategy for b in (64, 128))
    >>> start = BandedToeplitz(stretch(few.coefficients, 128), 4096, normalize_columns=False)
    >>> round(rmse(start) / rmse(many), 2)  # the square root's own: 1.14
    1.01
    """
    departure = coefficients / square_root_coefficients(len(coefficients))
    places = np.arange(bands) * (len(coefficients) / bands)
    return square_root_coefficients(bands) * np.interp(places, np.arange(len(coefficients)), departure)


def _checked_start(start: FloatArray | None, bands: int) -> FloatArray:
    if start is None:
        return square_root_coefficients(bands)
    start = _check.array("start", start, 1)
    if not start[0] > 0:
        raise _check.fail("start[0]", float(start[0]), "must be above 0")
    if len(start) != bands:
        raise _check.fail("len(start)", len(start), f"must be bands={bands}", "use optimize.stretch")
    return start


class _Family:
    """Loss and gradient over theta for one workload and objective."""

    def __init__(
        self, workload: Workload, goal: Objective, normalize: bool, terms: int | None, tolerance: float
    ) -> None:
        self.workload, self.goal, self.normalize, self.terms = workload, goal, normalize, terms
        self.tolerance = tolerance

    def descend(self, theta: FloatArray, watch: Watcher | None) -> Descent:
        """Minimize with more and more terms of the response, and a sharper and sharper maximum."""
        if len(theta) == 1:
            return Descent(theta, 0.0, 0, Outcome.CLOSED_FORM, "one band: nothing to choose")
        theta = theta / np.linalg.norm(theta)
        if (settled := self._descend_settled(theta, watch)) is not None:
            return settled
        terms, iterations = self.terms or first_terms(len(theta), self.workload), 0
        stages = self.goal.stages() if self.normalize else [self.goal]
        for last, goal in [(goal is stages[-1], goal) for goal in stages]:
            while True:
                loss = partial(self.loss, goal=goal, terms=terms)
                descent = descend(loss, theta, tolerance=self.tolerance, width=len(theta), watch=watch)
                theta, iterations = descent.x, iterations + descent.iterations
                needed = self._error(theta, terms).response.terms_to_settle(len(theta))
                if self.terms or needed <= terms or not last:
                    break
                terms = min(needed, self.workload.steps)
        return Descent(theta, descent.loss, iterations, descent.outcome)

    def _descend_settled(self, theta: FloatArray, watch: Watcher | None) -> Descent | None:
        """At very many running sums, at a cost that depends on the bands alone; None where that does not apply."""
        large = self.workload.is_prefix and self.workload.steps >= SMALLEST
        if not large or self.terms or self.normalize or self.goal.name == "weighted":
            return None
        largest = self.goal.name != "mean"  # of a plain Toeplitz strategy that is the last error

        def loss(theta: FloatArray) -> tuple[float, FloatArray]:
            error, square = SettledToeplitz(theta, self.workload.steps), float(theta @ theta)
            total = error.last() if largest else error.mean()
            if not (math.isfinite(total) and total > 0):
                return math.inf, np.zeros_like(theta)
            return math.log(total * square), error.gradient(largest) / total + 2 * theta / square

        if not math.isfinite(loss(theta)[0]):
            return None
        descent = descend(loss, theta, tolerance=self.tolerance, width=len(theta), watch=watch)
        return descent if SettledToeplitz(descent.x, self.workload.steps).applies else None

    def loss(self, theta: FloatArray, goal: Objective, terms: int) -> tuple[float, FloatArray]:
        """log(|theta|^2 E(theta)); the first factor is one where the columns are normalized."""
        error = self._error(theta, terms)
        total, head, beyond, tail = aggregate(error, goal)
        gradient = error.gradient(head, beyond, tail) / total
        if self.normalize:
            return math.log(total), gradient
        square = float(theta @ theta)
        return math.log(total) + math.log(square), gradient + 2 * theta / square

    def _error(self, theta: FloatArray, terms: int | None) -> ToeplitzError:
        return ToeplitzError(theta, self.workload, self.normalize, terms)


def _exact_objective(strategy: BandedToeplitz, workload: Workload, goal: Objective) -> float:
    """The root of the objective at the strategy as it will be used, with nothing cut off or smoothed."""
    if goal.name == "weighted" or (strategy.normalize_columns and workload.inverse_columns is None):
        return math.sqrt(goal.value(per_step_error(strategy, workload=workload)))
    error = toeplitz_error(strategy.coefficients, workload, strategy.normalize_columns)
    return math.sqrt({"mean": error.mean, "max": error.maximum, "last": error.last}[goal.name]())


def aggregate(error: ToeplitzError, goal: Objective) -> tuple[float, FloatArray, float, FloatArray]:
    """The objective; its weights on w_i^2 in the head, in all beyond it, and on the tail's errors."""
    steps, computed = error.head_steps, min(len(error.response.head), error.head_steps)
    if goal.name == "mean":
        head, beyond = mean_weights(error)
        tail = np.full(len(error.tail), 1 / error.workload.steps)
    elif goal.name == "weighted":
        assert goal.weights is not None
        suffix = np.cumsum(goal.weights[:steps][::-1])[::-1]
        head, beyond, tail = suffix[:computed], float(np.sum(suffix[computed:])), goal.weights[steps:]
    else:  # errors only grow along the head: its last step stands for all of it
        candidates = np.append(error.last_of_head(), error.tail) if steps else error.tail
        value, weights = goal.smooth(candidates) if goal.name == "max" else _last(candidates)
        share, tail = (weights[0], weights[1:]) if steps else (0.0, weights)
        return value, np.full(computed, share), share * (steps - computed), tail
    return error.head_total(head, beyond) + float(tail @ error.tail), head, beyond, tail


def _last(errors: FloatArray) -> tuple[float, FloatArray]:
    """The last error and its derivative with respect to all."""
    return float(errors[-1]), np.eye(1, len(errors), len(errors) - 1)[0]
