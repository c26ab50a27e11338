"""The strategy of least error under balls-in-bins sampling: error times the sigma that its bins need.

Estimate sigma and T at a strategy, add the cut (model.py), go where the model is lowest, and estimate again, until the
model promises next to nothing more. The estimator is given: here nothing is known of privacy, and nothing decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import mean_squared_error
from bandmf.optimize.bins.families import Family, family_named
from bandmf.optimize.bins.gram import gram
from bandmf.optimize.bins.model import Cut, Model
from bandmf.optimize.descent import Outcome
from bandmf.optimize.solution import Clock, Solution
from bandmf.strategies import Strategy
from bandmf.workloads import Workload, workload_for

_OTHER_STARTS = 2  # that are looked at where the first look fails
_HALF_KNOWN = 24.0  # where to begin only: the epsilon at which half of T is on its diagonal


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
    """(G, epsilon, delta) -> Estimate; the same draws for every G make estimates comparable.

    A ValueError or an ArithmeticError says that there is no estimate for this G; the search then goes back.
    """

    def __call__(self, gram: FloatArray, epsilon: float, delta: float, /) -> Estimate: ...


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
    most_estimates: int = 8,
    tolerance: float = 2e-3,
) -> BinsSolution:
    """The best strategy of a family when every example joins one of `cycle` bins, the same in every epoch.

    `family` is "banded-inverse" (`size` coefficients of C^-1, none but the first above zero), "blt" (`size` buffers) or
    "banded" (`size` bands, none negative). `start` is a strategy to begin with: that of fewer bands or of another
    epsilon saves estimates. The search ends when the model promises less than `tolerance`, relatively, or after
    `most_estimates`.

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
    members = family_named(family, size, workload, objective)
    most_estimates = _check.whole("most_estimates", most_estimates, 2)
    tolerance = _check.real("tolerance", tolerance, 0)
    search = _Search(members, cycle, epsilon, delta, estimate)
    first = _guess(members, cycle, epsilon) if start is None else members.unknowns(start)
    outcome, detail = search.run(first, most_estimates, tolerance)
    return search.solution(outcome, detail, workload, clock)


def guess_for_bins(
    family: str, steps: int, cycle: int, epsilon: float, *, size: int, workload: Workload | None = None
) -> Strategy:
    """Where `optimize_for_bins` begins: some percent from the best, in a fraction of its time, with no estimate.

    >>> guess_for_bins("banded-inverse", 64, 16, 1.0, size=2).steps
    64
    """
    workload = workload_for(_check.whole("steps", steps), workload)
    cycle = _check.whole("cycle", cycle, 1, workload.steps, f"steps={workload.steps}")
    epsilon = _check.real("epsilon", epsilon, 0, open_low=True)
    members = family_named(family, size, workload, "mean")
    return members.strategy(_guess(members, cycle, epsilon))


def _checked(found: Estimate, cycle: int) -> tuple[float, FloatArray]:
    """sigma and T, if they can be what the search needs."""
    sigma = _check.real("sigma of the estimator", found.sigma, 0, open_low=True)
    if found.posterior is None:
        raise ValueError("posterior of the estimator: there is none; ask for it (functools.partial, posterior=True)")
    T = _check.array("posterior of the estimator", found.posterior, 2)
    if T.shape != (cycle, cycle) or T.min() < 0 or not T.max() > 0:
        raise ValueError(
            f"posterior of the estimator: must be {cycle} x {cycle} products of probabilities, not of shape {T.shape} "
            f"with entries from {T.min():g} to {T.max():g}"
        )
    return sigma, T


def _guess(family: Family, cycle: int, epsilon: float) -> FloatArray:
    """The best member for a plausible T, between an example found out and one in hiding.

    At large epsilon the posterior is sure of the bin (T = I / b), at small epsilon it knows nothing (T = 1 / b^2).
    """
    known, starts = epsilon / (epsilon + _HALF_KNOWN), family.starts()
    T = np.full((cycle, cycle), (1 - known) / cycle**2) + known / cycle * np.eye(cycle)
    cut = Cut.at(family.coefficients(starts[0]), 1.0, T)
    return Model(family, [cut]).minimize(starts)[0].x


@dataclass(frozen=True, eq=False)
class _Known:
    """A member whose sigma was estimated; `value` is log(objective)."""

    x: FloatArray
    sigma: float
    value: float


class _Search:
    """The members seen so far, and the model that follows from them."""

    def __init__(self, family: Family, cycle: int, epsilon: float, delta: float, estimate: Estimator) -> None:
        self.family, self.cycle, self.budget, self.estimate = family, cycle, (epsilon, delta), estimate
        self.starts, self.known, self.model = family.starts(), list[_Known](), Model(family, [])
        self.promised, self.iterations, self.failed = -math.inf, 0, list[Exception]()
        self._reach = math.inf  # from the best member to the next: less where an estimate failed

    @property
    def best(self) -> _Known:
        """By all cuts, not its own alone: of several noisy estimates, the lowest was lucky."""
        return min(self.known, key=lambda known: self.model.value(known.x))

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
            found = self.model.minimize([best.x, *([] if last is best else [last.x]), *self.starts])
            lowest, self.starts = (found[0], [descent.x for descent in found])  # other minima may become the lowest
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
        c = self.family.coefficients(x)
        try:
            found = self.estimate(gram(c, self.cycle), *self.budget)
        except (ValueError, ArithmeticError) as error:
            self.failed.append(error)
            return False
        sigma, T = _checked(found, self.cycle)
        self.model.cuts.append(Cut.at(c, sigma, T))
        self.known.append(_Known(x, sigma, 0.5 * math.log(self.family.squared_error(x)[0]) + math.log(sigma)))
        return True

    def solution(self, outcome: Outcome, detail: str, workload: Workload, clock: Clock) -> BinsSolution:
        best, strategy = self.best, self.family.strategy(self.best.x)
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
