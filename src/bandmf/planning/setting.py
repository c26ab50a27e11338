"""The setting of a plan: checked inputs, its privacy events, and every candidate weighed so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bandmf import _check, accounting
from bandmf.error import rmse
from bandmf.optimize import banded_toeplitz, stretch
from bandmf.participation import Participation
from bandmf.planning.events import privacy_events
from bandmf.planning.plans import BYTES_PER_NUMBER, Candidate, Plan, noise_memory
from bandmf.strategies import BandedToeplitz, Strategy
from bandmf.workloads import Workload

_POLISHED_BANDS = 256  # beyond, normalising inside the optimisation is slow and changes nothing
_NORMALIZED_BANDS = 1024  # beyond, normalising takes matrices of bands x bands for half a percent: left out

Progress = Callable[[Candidate], None]


def plainly(bands: int) -> str | bool:
    """How the columns of a strategy with so many bands are normalised when time matters."""
    return "after" if bands <= _NORMALIZED_BANDS else False


@dataclass
class Setting:
    """Checked inputs, and every candidate weighed so far."""

    epsilon: float | None
    delta: float
    examples: int | None
    batch_size: float
    steps: int
    parameters: int | None
    memory: float | None
    devices: int
    workload: Workload
    max_batch_size: int | None
    adjacency: str
    progress: Progress | None
    weighed: dict[int, Candidate] = field(default_factory=dict)
    strategies: dict[int, BandedToeplitz] = field(default_factory=dict)
    best_without_limit: Candidate | None = None

    @property
    def most_bands(self) -> int:
        """More bands than this would ask for batches larger than a part of the data."""
        assert self.examples is not None
        return max(1, min(self.steps, int(self.examples / self.batch_size)))

    @property
    def limit_name(self) -> str:
        assert self.examples is not None
        if self.most_bands == self.steps:
            return f"steps={self.steps}"
        return f"examples / batch_size = {self.most_bands}"

    @property
    def memory_bands(self) -> int:
        """The most bands whose noise fits into memory."""
        if self.memory is None or self.parameters is None:
            return self.steps
        return int(self.memory * self.devices / (BYTES_PER_NUMBER * self.parameters))

    def sigma(self, bands: int) -> float:
        assert self.epsilon is not None
        return max(
            accounting.noise_multiplier(self.epsilon, self.delta, **event) for event in self.events(bands)
        )

    def events(self, bands: int) -> list[dict[str, Any]]:
        assert self.examples is not None
        return privacy_events(
            self.steps, bands, self.batch_size, self.examples, self.adjacency, self.max_batch_size
        )

    def weigh(self, bands: int, sigma: float | None = None) -> Candidate:
        """The noise multiplier and error of this many bands."""
        if bands not in self.weighed:
            strategy, error = self._good_strategy(bands)
            self.strategies[bands] = strategy
            sigma = self.sigma(bands) if sigma is None else sigma
            self.note(Candidate(bands, sigma, sigma * error, self.memory_of(bands)))
        return self.weighed[bands]

    def _good_strategy(self, bands: int) -> tuple[BandedToeplitz, float]:
        """One of nearly the least error, with that error, which is exact.

        Where it would take seconds, the search for it begins at a neighbour that has been weighed, follows the
        response for eight times the bands only, and ends early: a few hundred-thousandths from the least error.
        """
        options: dict[str, Any] = {}
        if bands > _POLISHED_BANDS:
            options["tolerance"] = 1e-6
            if self.workload.limit is not None:
                options["terms"] = min(self.steps, 8 * bands)
            near = min(self.strategies, key=lambda known: abs(math.log(known / bands)), default=1)
            if bands / 8 <= near <= 8 * bands:
                options["start"] = stretch(self.strategies[near].coefficients, bands)
        found = banded_toeplitz(self.steps, bands, self.workload, normalize_columns=plainly(bands), **options)
        assert isinstance(found.strategy, BandedToeplitz)
        return found.strategy, found.rmse

    def _best_strategy(self, bands: int) -> Strategy:
        """The one of the least error, for the bands that are chosen."""
        if bands <= _POLISHED_BANDS:
            return banded_toeplitz(self.steps, bands, self.workload).strategy
        start = self.strategies[bands].coefficients
        return banded_toeplitz(
            self.steps, bands, self.workload, normalize_columns=plainly(bands), tolerance=1e-9, start=start
        ).strategy

    def weigh_strategy(self, strategy: Strategy, sigma: float | None) -> Candidate:
        sigma = self.sigma(strategy.bands) if sigma is None else sigma
        error = rmse(strategy, self.workload)
        return self.note(Candidate(strategy.bands, sigma, sigma * error, self.memory_of(strategy.bands)))

    def note(self, candidate: Candidate) -> Candidate:
        self.weighed[candidate.bands] = candidate
        if self.progress is not None:
            self.progress(candidate)
        return candidate

    def memory_of(self, bands: int) -> float | None:
        return noise_memory(bands, self.parameters, self.devices)

    def require_fit(self, strategy: Strategy) -> None:
        if strategy.steps != self.steps:
            raise _check.fail("strategy", strategy, f"must have steps={self.steps}")
        if self.examples is not None:
            _check.whole("strategy.bands", strategy.bands, 1, self.most_bands, self.limit_name)

    def finish(self, chosen: Candidate, strategy: Strategy | None, sigma: float | None) -> Plan:
        """The plan for the candidate that was chosen."""
        strategy = self._best_strategy(chosen.bands) if strategy is None else strategy
        epsilon = self.epsilon
        if epsilon is None:
            events = self.events(chosen.bands)
            epsilon = max(
                accounting.epsilon(chosen.noise_multiplier, self.delta, **event) for event in events
            )
        return self.plan(strategy, chosen.noise_multiplier, epsilon, None)

    def plan(
        self, strategy: Strategy, sigma: float, epsilon: float, participation: Participation | None
    ) -> Plan:
        return Plan(
            steps=self.steps,
            batch_size=self.batch_size,
            examples=self.examples,
            epsilon=epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            bands=strategy.bands,
            strategy=strategy,
            noise_multiplier=sigma,
            error=rmse(strategy, self.workload, participation),
            participation=participation,
            max_batch_size=self.max_batch_size,
            workload=self.workload.name,
            parameters=self.parameters,
            devices=self.devices,
            candidates=tuple(self.weighed[bands] for bands in sorted(self.weighed)),
            best_without_memory_limit=self.best_without_limit,
        )
