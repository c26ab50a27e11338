"""The strategy of least error under balls-in-bins sampling: error times the sigma that its bins need.

Estimate sigma and T at a strategy, add the cut (model.py), go where the model is lowest, and estimate again, until the
model promises next to nothing more. The estimator is given: here nothing is known of privacy, and nothing decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import mean_squared_error
from bandmf.optimize.bins.laws import FixedBins, RedrawnBins, gram
from bandmf.optimize.bins.members import Members, members
from bandmf.optimize.bins.model import Cut, Model
from bandmf.optimize.bins.shorter import shorter
from bandmf.optimize.descent import Descent, Outcome
from bandmf.optimize.solution import Clock, Solution
from bandmf.strategies import Strategy
from bandmf.workloads import Workload, workload_for

Bins = FixedBins | RedrawnBins
_LUCK = 0.01  # of an estimate
_OTHER_STARTS = 2  # that are looked at where the first look fails
_FEWEST = 16  # positions of a shorter problem, where a search begins
_REWEIGHTINGS = 6  # of the steps, for the largest error


class Estimate(Protocol):
    """What an estimator says of a Gram matrix."""

    @property
    def sigma(self) -> float:
        """The noise that (epsilon, delta) takes, for clip norm one."""
        ...

    @property
    def posterior(self) -> FloatArray | None:
        """T_ij = E[pi_i pi_j | L = e^epsilon] at that noise, up to a factor; pi is the posterior of the bin.

        None is for estimates that did not ask for it; the search refuses them.
        """
        ...


class Estimator(Protocol):
    """(G, epsilon, delta) -> Estimate; for bins that are drawn anew (strategy, cycle, epsilon, delta) -> Estimate.

    The same draws for every strategy make estimates comparable. A ValueError or an ArithmeticError says that there is
    no estimate for this one; the search then goes back.
    """

    def __call__(self, *given: Any) -> Estimate: ...


@dataclass(frozen=True, kw_only=True)
class BinsSolution(Solution):
    """A strategy for balls-in-bins sampling; `rmse` and `objective` include the *estimated* `sigma`.

    `error` is the root mean squared error of one unit of noise, `estimates` the objective at every strategy where sigma
    was estimated, in order, and `promised` the model's lowest value. `converged` says that the best estimate is within
    the tolerance of it: a heuristic, not a proof. sigma is to be certified before it is used.
    """

    error: float
    sigma: float
    estimates: tuple[float, ...]
    promised: float


def optimize_for_bins(
    family: str,
    steps: int,
    cycle: int,
    epsilon: float,
    delta: float,
    *,
    size: int,
    estimate: Estimator,
    workload: Workload | None = None,
    objective: str = "mean",
    start: Strategy | None = None,
    scaled: bool = True,
    redrawn: bool = False,
    most_estimates: int = 8,
    tolerance: float = 2e-3,
) -> BinsSolution:
    """The best strategy of a family when every example joins one of `cycle` bins, the same in every epoch.

    `family` is "banded-inverse" (`size` coefficients of T^-1, none but the first above zero), "blt" (`size` buffers) or
    "banded" (`size` bands, none negative). Unless `scaled` is False, C = T D with a scale for each step, on a smooth
    curve. With `redrawn`, every example draws a bin anew in each epoch. `objective` is what the squared errors of all
    steps count by: their "mean", the "last" or the "max".

    `start` is a strategy to begin with: that of fewer bands or of another epsilon saves estimates. The search ends when
    the model promises less than `tolerance`, relatively, or after `most_estimates`. Where an estimate fails, it goes
    back towards the best strategy known.

    >>> from types import SimpleNamespace
    >>> def one_bin(gram, epsilon, delta):  # no amplification: sigma is the root of G times a constant
    ...     return SimpleNamespace(sigma=3 * gram[0, 0] ** 0.5, posterior=np.ones((1, 1)))
    >>> best = optimize_for_bins("banded-inverse", 64, 1, 1.0, 1e-6, size=2, estimate=one_bin)
    >>> best.converged, len(best.estimates)
    (True, 1)
    """
    clock = Clock()
    workload = workload_for(_check.whole("steps", steps), workload)
    cycle = _check.whole("cycle", cycle, 1, workload.steps, f"steps={workload.steps}")
    epsilon = _check.real("epsilon", epsilon, 0, open_low=True)
    delta = _check.real("delta", delta, 0, 1, open_low=True, open_high=True)
    problem = _Problem(family, size, workload, cycle, objective, scaled, redrawn)
    most_estimates = _check.whole("most_estimates", most_estimates, 2)
    tolerance = _check.real("tolerance", tolerance, 0)
    search = _Search(problem.members, problem.law, epsilon, delta, estimate)
    first = problem.guess(epsilon) if start is None else search.model.members.unknowns(start)
    outcome, detail = search.run(first, most_estimates, tolerance)
    return search.solution(outcome, detail, workload, clock)


def guess_for_bins(
    family: str,
    steps: int,
    cycle: int,
    epsilon: float,
    *,
    size: int,
    workload: Workload | None = None,
    scaled: bool = True,
) -> Strategy:
    """Where `optimize_for_bins` begins: some percent from the best, in a fraction of its time, with no estimate.

    >>> guess_for_bins("banded-inverse", 64, 16, 1.0, size=2).steps
    64
    """
    workload = workload_for(_check.whole("steps", steps), workload)
    cycle = _check.whole("cycle", cycle, 1, workload.steps, f"steps={workload.steps}")
    epsilon = _check.real("epsilon", epsilon, 0, open_low=True)
    problem = _Problem(family, size, workload, cycle, "mean", scaled, False)
    return problem.members.strategy(problem.guess(epsilon))


def _checked(found: Estimate, cycle: int | None) -> tuple[float, FloatArray]:
    """sigma and T, if they can be what the search needs."""
    sigma = _check.real("sigma of the estimator", found.sigma, 0, open_low=True)
    if found.posterior is None:
        raise ValueError("posterior of the estimator: there is none; ask for it (functools.partial, posterior=True)")
    T = _check.array("posterior of the estimator", found.posterior, 2)
    if (cycle is not None and T.shape != (cycle, cycle)) or T.min() < 0 or not T.max() > 0:
        raise ValueError(
            f"posterior of the estimator: must be {cycle} x {cycle} products of probabilities, not of shape {T.shape} "
            f"with entries from {T.min():g} to {T.max():g}"
        )
    return sigma, T


@dataclass(frozen=True)
class _Problem:
    """What is searched for, at some number of steps."""

    family: str
    size: int
    workload: Workload
    cycle: int
    objective: str
    scaled: bool
    redrawn: bool

    @property
    def members(self) -> Members:
        return members(self.family, self.size, self.workload, self.objective, self.scaled)

    @property
    def law(self) -> Bins:
        if self.redrawn:
            return RedrawnBins(self.cycle, self.workload.steps, min(2 * self.cycle, self.workload.steps))
        return FixedBins.for_steps(self.cycle, self.workload.steps)

    def shorter(self) -> _Problem | None:
        """The same with half the positions; None where that is not known, or there would be too few."""
        cycle = self.cycle // 2
        steps = round(self.workload.steps * cycle / self.cycle)
        if cycle < _FEWEST or steps < 4 * self.size or (workload := shorter(self.workload, steps)) is None:
            return None
        return replace(self, workload=workload, cycle=cycle)

    def guess(self, epsilon: float) -> FloatArray:
        """The best member for a plausible posterior, which the best one for fewer steps is near."""
        found, fewer = self.members, self.shorter()
        starts = found.starts() if fewer is None else found.afresh(fewer.guess(epsilon))
        return Model(found, self.law, [Cut(self.law.plausible(epsilon), 1.0)]).minimize(starts)[0].x


@dataclass(frozen=True, eq=False)
class _Known:
    """A member whose sigma was estimated; `value` is log(objective)."""

    x: FloatArray
    sigma: float
    value: float


class _Search:
    """The members seen so far, and the model that follows from them."""

    def __init__(
        self, found: Members, law: FixedBins | RedrawnBins, epsilon: float, delta: float, estimate: Estimator
    ) -> None:
        self.law, self.budget, self.estimate = law, (epsilon, delta), estimate
        self.starts, self.known, self.model = found.starts(), list[_Known](), Model(found, law, [])
        self.promised, self.iterations, self.failed = -math.inf, 0, list[Exception]()
        self._reach = math.inf  # from the best member to the next: less where an estimate failed

    @property
    def best(self) -> _Known:
        """By all cuts, of those with about the lowest estimate: the very lowest was lucky, and cuts can be wrong."""
        lowest = min(known.value for known in self.known)
        close = [known for known in self.known if known.value <= lowest + _LUCK]
        return min(close, key=lambda known: self.model.value(known.x))

    @property
    def _looks(self) -> int:
        return len(self.known) + len(self.failed)

    def run(self, first: FloatArray, most_estimates: int, tolerance: float) -> tuple[Outcome, str]:
        """Estimate and minimize in turn; how it ended, and what there is to say of that."""
        for x in [first, *self.starts[:_OTHER_STARTS]]:
            if self._look_at(x):
                break
        else:
            raise self.failed[0]
        while True:
            best, last = self.best, self.known[-1]
            self.model = replace(self.model, near=np.log(self.model.members.parts(best.x)[1]))
            found = self._minimize(self.model.members.afresh(best.x) + ([] if last is best else [last.x]))
            lowest = found[0]
            self.promised = lowest.loss
            self.iterations += sum(descent.iterations for descent in found)
            judged = self.model.value(best.x)
            if judged - self.promised <= tolerance:
                if judged - best.value > tolerance:
                    return Outcome.STALLED, "the estimates contradict each other: give them more samples"
                return (Outcome.CONVERGED if lowest.converged else Outcome.STALLED), lowest.detail
            if self._looks >= most_estimates:
                return Outcome.LIMIT, f"most_estimates={most_estimates}"
            if not self._look_towards(lowest.x, most_estimates):
                return Outcome.STALLED, f"estimates fail beyond the best: {self.failed[-1]}"

    def _look_towards(self, x: FloatArray, most_estimates: int) -> bool:
        """Look at x or, where estimates fail, ever nearer to the best; whether one did not fail."""
        best = self.best.x
        away = float(np.linalg.norm(x - best))
        self._reach *= 2
        while self._looks < most_estimates:
            share = min(1.0, self._reach / away)
            if self._look_at(best + share * (x - best)):
                return True
            self._reach = share * away / 2
        return False

    def _look_at(self, x: FloatArray) -> bool:
        """Estimate sigma at x and add what that says to the model; False where the estimate fails."""
        members, law = self.model.members, self.law
        c, d = members.parts(x)
        try:
            if isinstance(law, RedrawnBins):
                found = self.estimate(members.strategy(x), law.cycle, *self.budget)
            else:
                found = self.estimate(gram(c, d, law.cycle).table, *self.budget)
        except (ValueError, ArithmeticError) as error:
            self.failed.append(error)
            return False
        sigma, T = _checked(found, None if isinstance(law, RedrawnBins) else law.cycle)
        self.model.cuts.append(Cut.at(law.products(c, d), sigma, law.weights(T)))
        self.known.append(_Known(x, sigma, 0.5 * math.log(members.objective_error(x)) + math.log(sigma)))
        return True

    def _minimize(self, starts: list[FloatArray]) -> list[Descent]:
        """Where the model is lowest; for the largest error, with ever better weights of the steps."""
        found = self.model.minimize(starts)
        if self.model.members.objective == "max":
            for _ in range(_REWEIGHTINGS):
                self.model = replace(self.model, members=self.model.members.reweighted(found[0].x))
                found = self.model.minimize([found[0].x])
        return found

    def solution(self, outcome: Outcome, detail: str, workload: Workload, clock: Clock) -> BinsSolution:
        best, strategy = self.best, self.model.members.strategy(self.best.x)
        error = math.sqrt(mean_squared_error(strategy, workload=workload))
        less = f"the model promises {1 - math.exp(min(self.promised - best.value, 0.0)):.2%} less"
        return BinsSolution(
            strategy=strategy,
            rmse=best.sigma * error,
            objective=math.exp(best.value),
            optimality_gap=None,
            iterations=self.iterations,
            seconds=clock.seconds(),
            outcome=outcome,
            message="; ".join(filter(None, (outcome.value, detail, less))),
            error=error,
            sigma=best.sigma,
            estimates=tuple(math.exp(known.value) for known in self.known),
            promised=math.exp(self.promised),
        )
