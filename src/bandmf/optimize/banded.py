"""The best general banded strategy, with a proof of how good it is.

Every entry of the band is free; the columns are scaled to norm one (the paper's parameterization), so the
sensitivity is one and the loss is the error alone. Loss and gradient cost O(n b^2) (error/band_covariance.py). The same
loss serves a user's own family of strategies: any function from parameters to band entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bandmf import _check, band_columns, workloads
from bandmf._types import FloatArray
from bandmf.error import per_step_error
from bandmf.error.band_covariance import WORST_CONDITION, BandCovariance
from bandmf.optimize import arguments
from bandmf.optimize.certificate import lower_bound, optimality_gap
from bandmf.optimize.descent import Descent, Outcome, Watcher, descend
from bandmf.optimize.horizon import horizon_columns
from bandmf.optimize.objectives import Objective, Weighted, minimax, parse
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import Participation
from bandmf.strategies import Banded, BandedToeplitz
from bandmf.strategies.square_root import square_root_coefficients
from bandmf.workloads import Workload, workload_for

_SEVERAL = "use optimize.banded_toeplitz with at most as many bands as the separation"
DEFAULT_GAP = {"mean": 1e-4, "weighted": 1e-4, "last": 1e-4, "max": 1e-2}


class NormalizedLoss:
    """log of the objective of the column-normalized band, and its gradient."""

    def __init__(self, workload: Workload) -> None:
        if workload.inverse_columns is None:
            raise ValueError(
                f"workload={workload.name!r}: its inverse is not banded, so a banded strategy cannot be "
                "optimized for it at scale; use optimize.dense for up to a few thousand steps"
            )
        self.inverse = workload.inverse_columns(0, workload.steps)

    def __call__(self, entries: FloatArray, objective: Objective) -> tuple[float, FloatArray]:
        """At any band entries with zeros past the end; scaling a column changes nothing."""
        norms = np.linalg.norm(entries, axis=1, keepdims=True)
        C = entries / norms
        covariance = BandCovariance(band_columns.product(C, self.inverse))
        value, weights = objective.smooth(covariance.errors)
        d_product, _ = covariance.gradient(weights)
        d_C = band_columns.product_adjoint(d_product, self.inverse, entries.shape[1])
        d_entries = (d_C - C * np.sum(C * d_C, axis=1, keepdims=True)) / norms
        return math.log(value), d_entries / value


def banded(
    steps: int,
    bands: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str | FloatArray = "mean",
    gap: float | None = None,
    max_iterations: int = 2000,
    watch: Watcher | None = None,
) -> Solution:
    """The banded strategy of least error, iterated until it is proved to be within `gap` of the best.

    `gap` is 1e-4 unless given (1e-2 for "max"). The proof lags behind the truth: a strategy proved to be
    within 1e-4 is usually within 1e-7. "last" sacrifices all other steps to the last one; there the proof
    is weak.

    >>> solution = banded(9, 3)
    >>> round(solution.rmse, 10), solution.optimality_gap < 1e-4
    (1.6626907595, True)
    """
    steps, bands = arguments.sizes(steps, bands)
    workload = workload_for(steps, workload)
    arguments.require_single(participation, _SEVERAL)
    search = _Search(lambda x: x, lambda x, slope: slope, workload, parse(objective, steps), watch)
    start = _best_start(steps, bands, workload, search.loss)
    _require_condition(start, search.loss, workload)
    return search.run(start, DEFAULT_GAP[search.goal.name] if gap is None else gap, max_iterations)


def parameterized(
    entries: Callable[[FloatArray], FloatArray],
    pullback: Callable[[FloatArray, FloatArray], FloatArray],
    start: FloatArray,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str | FloatArray = "mean",
    gap: float | None = None,
    max_iterations: int = 1000,
    watch: Watcher | None = None,
) -> Solution:
    """The best member of a family of your own.

    `entries(parameters)` returns the band, shape (steps, bands), entry [j, r] = C[j + r, j], of any column
    norms (they are normalized) and zero past the end; `pullback(parameters, slope)` the gradient with
    respect to the parameters from that with respect to the band. The proved gap is to the best of *all* strategies
    with as many bands, so it shows what the family gives away; it ends the search only where `gap` is given.

    >>> decay = lambda p: np.where(np.add.outer(np.arange(64), np.arange(8)) < 64, p[0] ** np.arange(8), 0)
    >>> slope = lambda p, g: np.array([np.sum(g * np.arange(8) * p[0] ** np.maximum(np.arange(8) - 1, 0))])
    >>> round(parameterized(decay, slope, np.array([0.5])).rmse, 4)
    2.718
    """
    start = _check.array("start", start, 1)
    band = _check.array("entries(start)", entries(start), 2)
    workload = workload_for(len(band), workload)
    arguments.require_single(participation, _SEVERAL)
    search = _Search(entries, pullback, workload, parse(objective, len(band)), watch)
    return search.run(start, gap, max_iterations)


class _ProofSchedule:
    """When to try a proof, which costs as much as a few iterations.

    The proved gap falls about like a power of the iteration. Two proofs tell the power, and with it when the
    goal is near; never later than after a fifth more iterations, never sooner than after a fiftieth.
    """

    def __init__(self, goal: float, first: int) -> None:
        self.next, self._goal, self._last = first, goal, (0, math.inf)

    def note(self, iteration: int, gap: float) -> None:
        """Choose the next iteration to try at, after this result."""
        expected = 1.2
        earlier, wider = self._last
        if 0 < self._goal < gap < wider < math.inf:
            power = math.log(wider / gap) / math.log(iteration / earlier)
            missing = math.log(gap / self._goal)
            if missing < power * math.log(expected):
                expected = math.exp(missing / power)
        self.next = max(iteration + 5, math.ceil(iteration * max(1.02, expected)))
        self._last = iteration, gap


class _Search:
    """A descent over a parameterized band that ends once the proved gap is what was asked for."""

    def __init__(
        self,
        entries: Callable[[FloatArray], FloatArray],
        pullback: Callable[[FloatArray, FloatArray], FloatArray],
        workload: Workload,
        goal: Objective,
        watch: Watcher | None,
    ) -> None:
        self.entries, self.pullback, self.workload, self.goal = entries, pullback, workload, goal
        self.loss, self.listener, self.clock = NormalizedLoss(workload), watch, Clock()

    def run(self, start: FloatArray, gap: float | None, max_iterations: int) -> Solution:
        """Search from `start`; with `gap`, until that much is proved."""
        gap = None if gap is None else _check.real("gap", gap, 0)
        max_iterations = _check.whole("max_iterations", max_iterations)
        if self.goal.name == "max":
            return self._minimax(start, DEFAULT_GAP["max"] if gap is None else gap, max_iterations)
        proof = None if gap is None else self._proof(gap, 50 if start.size < 10**6 else 20)  # slow: ask sooner
        descent = self._descend(start, self.goal, max_iterations, proof)
        strategy, errors = self._examine(descent.x)
        return self._solution(strategy, errors, self._gap(strategy, errors), gap, descent)

    def _proof(self, gap: float, first: int) -> Watcher:
        """Whether `gap` is proved, tried now and then."""
        schedule = _ProofSchedule(gap, first)

        def proved(iteration: int, loss: float, x: FloatArray) -> bool:
            if iteration < schedule.next:
                return False
            found = self._gap(*self._examine(x))
            schedule.note(iteration, found)
            return found <= gap

        return proved

    def _minimax(self, start: FloatArray, gap: float, max_iterations: int) -> Solution:
        x, each = start, min(40, max_iterations)

        def solve(weights: FloatArray) -> Weighted[FloatArray]:
            nonlocal x
            descent = self._descend(x, Objective("weighted", weights), each, None)
            x = descent.x
            strategy, errors = self._examine(x)
            lower = lower_bound(strategy.columns(), self.loss.inverse, errors, weights)
            return Weighted(x, errors, lower, descent.iterations, descent.outcome is Outcome.STOPPED)

        best = minimax(solve, self.workload.steps, gap, max(1, max_iterations // each))
        strategy, errors = self._examine(best.candidate)
        outcome = Outcome.STOPPED if best.stopped else Outcome.LIMIT
        descent = Descent(best.candidate, 0.0, best.iterations, outcome)
        return self._solution(strategy, errors, best.gap, gap, descent)

    def _descend(self, x: FloatArray, goal: Objective, max_iterations: int, proof: Watcher | None) -> Descent:
        def value(x: FloatArray) -> tuple[float, FloatArray]:
            total, slope = self.loss(self.entries(x), goal)
            return total, self.pullback(x, slope)

        memory = 10 if x.size < 5_000_000 else 6  # each unit costs two vectors of that size
        return descend(
            value,
            x,
            max_iterations=max_iterations,
            memory=memory,
            width=self.entries(x).shape[1],
            watch=self.listener,
            proved=proof,
        )

    def _examine(self, x: FloatArray) -> tuple[Banded, FloatArray]:
        band = self.entries(x)
        strategy = Banded(band / np.linalg.norm(band, axis=1, keepdims=True))
        return strategy, per_step_error(strategy, workload=self.workload)

    def _gap(self, strategy: Banded, errors: FloatArray) -> float:
        return optimality_gap(strategy, self.workload, errors, self.goal)

    def _solution(
        self, strategy: Banded, errors: FloatArray, found: float, asked: float | None, descent: Descent
    ) -> Solution:
        """The solution, whose outcome is the proof's where a proof was asked for."""
        if asked is not None and found <= asked:
            descent.outcome = Outcome.PROVED
        elif asked is not None and descent.converged:
            descent.outcome = Outcome.UNPROVED
        gap = found if math.isfinite(found) else None
        if gap is not None:
            descent.detail = f"proved within {gap:.2g} of the best {strategy.bands}-banded"
        mean, objective = math.sqrt(np.mean(errors)), math.sqrt(self.goal.value(errors))
        return Solution.of(strategy, mean, descent, self.clock, objective=objective, gap=gap)


def _require_condition(columns: FloatArray, loss: NormalizedLoss, workload: Workload) -> None:
    """Refuse workloads on which the banded recursion loses its digits."""
    if BandCovariance(band_columns.product(columns, loss.inverse)).condition > 30 * WORST_CONDITION:
        raise ValueError(
            f"workload={workload.name!r}: its learning rates fall and rise again so steeply that a banded strategy "
            "cannot be optimized for it accurately; use optimize.dense for up to a few thousand steps, or rates that "
            "span less"
        )


def _best_start(steps: int, bands: int, workload: Workload, loss: NormalizedLoss) -> FloatArray:
    """The better of banded square root and, where the workload has them, interpolated Toeplitz optima."""
    starts = [BandedToeplitz(square_root_coefficients(bands), steps).columns()]
    guide = workload if workload.limit is not None else workloads.prefix(steps)
    starts.append(horizon_columns(steps, bands, guide))
    return min(starts, key=lambda columns: loss(columns, Objective("mean"))[0])
