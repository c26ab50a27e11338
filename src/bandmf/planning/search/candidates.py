"""Candidates for cyclic Poisson sampling: each number of bands with its noise and error, and the search for the best.

For b bands the noise multiplier is that of ceil(n / b) Poisson-sampled rounds with probability b B / N, and
the error that of the best column-normalized banded Toeplitz strategy. Few bands mean strong amplification,
many bands good cancellation; the product falls to a minimum, found by walking in octaves and refining, and
rises again, but may fall once more towards the end, where sampling no longer counts: the end is a candidate
as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bandmf._types import FloatArray
from bandmf.error import rmse
from bandmf.optimize import banded_toeplitz, stretch
from bandmf.planning.candidate import Candidate, Progress, mechanism_of
from bandmf.planning.request import Request
from bandmf.planning.search.scales import best_power, scaled
from bandmf.planning.setup import Setup
from bandmf.strategies import BandedToeplitz, Scaled, Strategy
from bandmf.workloads import Workload, from_recipe, momentum, prefix

if TYPE_CHECKING:
    from bandmf.planning.plan import Plan

_POLISHED_BANDS = 256  # beyond, normalizing inside the optimization is slow and changes nothing
_NORMALIZED_BANDS = 1024  # beyond, normalizing takes matrices of bands x bands for half a percent: left out
_LAST_COMPARED = 1 << 20  # bands; more are only evaluated where the search leads there
_QUICKLY_EVALUATED = 256  # bands; among so few the search looks closer
_NEIGHBOR = 1.42  # times the bands; between a power of two and such neighbors a picture needs no more points
_NEAR_ENOUGH = 0.1  # of the best bands, relatively: the error changes by a few ten-thousandths


def passed_over(plan: Plan, progress: Progress | None = None) -> tuple[Candidate, ...]:
    """Candidates between those of a plan with cyclic Poisson sampling, at powers of two.

    The search takes large steps; for a picture, lines across them would be guesses.
    """
    families = {(c.sampling, c.mechanism) for c in plan.candidates if c.sampling != "balls-in-bins"}
    if not plan.amplified or plan.epsilon == math.inf:
        return ()
    if families - {("cyclic-poisson", "banded")}:  # of other kinds there is nothing to put between
        return ()
    known = {c.bands for c in plan.candidates if c.sampling == "cyclic-poisson"}
    return tuple(c for c in _between(plan, plan.epsilon, known, progress) if c.bands not in known)


def _between(plan: Setup, epsilon: float, known: Collection[int], progress: Progress | None) -> tuple[Candidate, ...]:
    """One band, and powers of two that are not near a known number of bands."""
    setup = {part.name: getattr(plan, part.name) for part in fields(Setup)} | {"sampling": "cyclic-poisson"}
    request = Request(**setup, epsilon=epsilon, noise_multiplier=None, bands=None, strategy=None)
    found = Candidates(request, progress)
    most = min(request.most_bands, _NORMALIZED_BANDS)
    for bands in (2**k for k in range(most.bit_length())):
        if bands == 1 or not any(bands / _NEIGHBOR < other < bands * _NEIGHBOR for other in known):
            found.evaluate(bands)
    return found.all()


def normalization(bands: int) -> str | bool:
    """How the columns of a strategy with so many bands are normalized when time matters."""
    return "after" if bands <= _NORMALIZED_BANDS else False


def without_schedule(workload: Workload) -> Workload:
    """The Toeplitz workload that strategies are made for: of constant learning rates, and of the last weights.

    Plain momentum where that has no banded inverse; running sums where it is not known how the workload was made.
    """
    if workload.coefficients is not None and workload.inverse_columns is not None:
        return workload
    kind, given = workload.recipe or ("prefix", {})
    left_out = ("learning_rates", "averaging", "weight_decay", "coupled")  # decay is as strong as the rates make it
    constant = {name: value for name, value in given.items() if name not in left_out}
    found = from_recipe((kind, constant), workload.steps)
    if found.coefficients is not None and found.inverse_columns is not None:
        return found
    beta = float(np.mean(given.get("momentum", 0.0)))
    return momentum(workload.steps, beta) if beta else prefix(workload.steps)


class Candidates:
    """All candidates for a request that were evaluated so far, each once."""

    def __init__(self, request: Request, progress: Progress | None = None) -> None:
        self.request, self._progress = request, progress
        self._toeplitz = without_schedule(request.workload)
        self._evaluated: dict[int, Candidate] = {}
        self._strategies: dict[int, BandedToeplitz] = {}
        self._power: float | None = None

    def __contains__(self, bands: int) -> bool:
        return bands in self._evaluated

    def all(self) -> tuple[Candidate, ...]:
        """All of them, by bands."""
        return tuple(self._evaluated[bands] for bands in sorted(self._evaluated))

    def evaluate(self, bands: int) -> Candidate:
        """The candidate with so many bands."""
        if bands not in self._evaluated:
            self._note(*self._good_strategy(bands))
        return self._evaluated[bands]

    def evaluate_strategy(self, strategy: Strategy) -> Candidate:
        """A candidate for a strategy that is given."""
        request = self.request
        error = rmse(strategy, workload=request.workload, participation=request.participation)
        return self._note(strategy, error)

    def _note(self, strategy: Strategy, error: float) -> Candidate:
        sigma = self.request.sigma(strategy)
        fits = self._fits(strategy.bands)
        candidate = Candidate(
            bands=strategy.bands,
            noise_multiplier=sigma,
            rmse=sigma * error,
            memory=self.request.noise_memory(strategy) if fits else None,
            sampling=str(self.request.sampling),
            mechanism=mechanism_of(strategy),
            vectors=self.request.vectors_of(strategy) if fits else None,
            scaled=isinstance(strategy, Scaled),
        )
        self._evaluated[candidate.bands] = candidate
        if self._progress is not None:
            self._progress(candidate)
        return candidate

    def _good_strategy(self, bands: int) -> tuple[Strategy, float]:
        """One of nearly the least error, with that error, which is exact.

        Where it would take seconds, the search for it begins at a neighbor that has been evaluated, follows the
        response for eight times the bands only, and ends early: a few hundred-thousandths from the least error.
        """
        request, options = self.request, dict[str, Any]()
        if bands > _POLISHED_BANDS:
            options["tolerance"] = 1e-6
            if self._toeplitz.limit is not None:
                options["terms"] = min(request.steps, 8 * bands)
            near = min(self._strategies, key=lambda known: abs(math.log(known / bands)), default=1)
            if bands / 8 <= near <= 8 * bands:
                options["start"] = stretch(self._strategies[near].coefficients, bands)
        options["normalize_columns"] = normalization(bands)
        found = banded_toeplitz(request.steps, bands, workload=self._toeplitz, **options)
        assert isinstance(found.strategy, BandedToeplitz)
        self._strategies[bands] = found.strategy
        if self._toeplitz is request.workload:
            return found.strategy, found.rmse
        strategy = self._scaled(found.strategy)
        return strategy, rmse(strategy, workload=request.workload)

    def _scaled(self, strategy: Strategy) -> Strategy:
        """With step scales, where the workload has a schedule and the noise follows from a budget; DP-SGD has none."""
        request = self.request
        if request.workload.coefficients is not None or strategy.bands == 1 or request.epsilon is None:
            return strategy
        norms = self._norms
        if self._power is None:  # it hardly changes with the bands
            self._power = best_power(strategy, request.workload, norms, request.sigma(strategy))
        return scaled(strategy, norms, self._power)

    @cached_property
    def _norms(self) -> FloatArray:
        return self.request.workload.operator.column_norms(self.request.steps)

    def polish(self, chosen: Candidate) -> tuple[Candidate, Strategy]:
        """The chosen candidate again, with the strategy of the very least error for its bands."""
        request, bands = self.request, chosen.bands
        options: dict[str, Any] = {"workload": self._toeplitz}
        if bands > _POLISHED_BANDS:
            options |= {"normalize_columns": normalization(bands), "tolerance": 1e-9}
            options["start"] = self._strategies[bands].coefficients
        strategy = self._scaled(banded_toeplitz(request.steps, bands, **options).strategy)
        return self.evaluate_strategy(strategy), strategy

    def _fits(self, bands: int) -> bool:
        return bands <= self.request.bands_in_memory

    # --- the search ---------------------------------------------------------------------------------------

    def best(self) -> Candidate:
        """The best number of bands: octaves from the rule of thumb, then the lowest points of parabolas."""
        request = self.request
        assert request.examples is not None
        assert request.epsilon is not None
        epochs = request.steps * request.batch_size / request.examples
        guess = request.epsilon * math.sqrt(request.steps) / epochs  # the paper's rule of thumb
        best = self._walk(self._snap(2 ** round(math.log2(max(1.0, guess)))), 2)
        while (lowest := self._lowest_of_parabola(best)) not in self:
            best = min(best, lowest, key=lambda bands: self.evaluate(bands).rmse)
        if best <= _QUICKLY_EVALUATED:
            self._walk(best, 2**0.125)
        for end in (1, request.most_bands):  # DP-SGD and the unamplified end, for comparison
            if end <= _LAST_COMPARED:
                self.evaluate(end)
        return self._least()

    def best_in_memory(self) -> Candidate:
        """The best of those whose noise fits into memory, the largest among them."""
        most = self.request.bands_in_memory
        self.evaluate(self._snap(most))
        return self._least(most)

    def _least(self, most: int | None = None) -> Candidate:
        fitting = [candidate for candidate in self.all() if most is None or candidate.bands <= most]
        return min(fitting, key=lambda candidate: candidate.rmse)

    def _walk(self, bands: int, factor: float) -> int:
        """Multiply or divide by `factor` for as long as that helps."""
        for direction in (factor, 1 / factor):
            while True:
                following = self._snap(round(bands * direction))
                if following == bands or self.evaluate(following).rmse >= self.evaluate(bands).rmse:
                    break
                bands = following
        return bands

    def _lowest_of_parabola(self, best: int) -> int:
        """Where the parabola through the best and its neighbors is lowest, in logarithms; `best` if near enough."""
        fewer = max((bands for bands in self._evaluated if bands < best), default=best)
        more = min((bands for bands in self._evaluated if bands > best), default=best)
        if not fewer < best < more:
            return best
        x = [math.log(bands / best) for bands in (fewer, best, more)]
        y = [math.log(self._evaluated[bands].rmse) for bands in (fewer, best, more)]
        left, right = ((y[0] - y[1]) / -x[0], (y[2] - y[1]) / x[2])  # both slopes away from the best are upwards
        if left + right <= 0:
            return best
        lowest = (left * x[2] + right * x[0]) / (2 * (left + right))
        bands = self._snap(round(best * math.exp(lowest)))
        return best if abs(math.log(bands / best)) < _NEAR_ENOUGH else bands

    def _snap(self, bands: int) -> int:
        """The fewest bands with as many rounds: those between only sample more often."""
        bands = max(1, min(bands, self.request.most_bands))
        return -(-self.request.steps // -(-self.request.steps // bands))
