"""b-min-sep sampling: banded strategies of as many bands as examples stay away, and the certificate of the best.

The bands are found by doubling and halving, for as long as that helps: an estimate takes seconds.
"""

from __future__ import annotations

from functools import partial

from bandmf.accounting.min_separation import calibrate, estimate_sigma
from bandmf.accounting.verified import Certificate
from bandmf.optimize import banded_toeplitz
from bandmf.planning.candidate import Progress
from bandmf.planning.request import Request
from bandmf.planning.search import found
from bandmf.planning.search.candidates import normalization, without_schedule
from bandmf.planning.search.found import Found
from bandmf.strategies import Strategy

_SAMPLES = 2**11  # of an estimate: sigma to a few thousandths


class Search:
    """The numbers of bands that were looked at."""

    def __init__(self, request: Request, progress: Progress | None) -> None:
        self.request, self._progress = request, progress
        self.results: dict[int, Found] = {}

    def best(self) -> Found:
        """The least error, by estimates; what was fixed, if it was."""
        request = self.request
        if request.strategy is not None:
            return self._note(found.found(request, request.strategy, self._sigma(request.strategy)))
        if request.bands is not None:
            return self.look_at(request.bands)
        assert request.epsilon is not None
        most = min(request.most_bands, request.bands_in_memory)
        # The best number falls with epsilon, and estimates for more take longer.
        bands = max(1, min(most, int(request.most_bands * min(1.0, request.epsilon / 4) / 4)))
        for double in (True, False):
            while 1 <= (following := min(most, 2 * bands) if double else bands // 2) != bands:
                if self.look_at(following).candidate.rmse >= self.look_at(bands).candidate.rmse:
                    break
                bands = following
        return self.look_at(bands)

    def look_at(self, bands: int) -> Found:
        """The best strategy with these bands."""
        if bands not in self.results:
            self._note(found.searched(self.request, "banded", bands, partial(self._compute, bands)))
        return self.results[bands]

    def _compute(self, bands: int) -> tuple[Strategy, float]:
        if self._progress is not None:
            self._progress(f"estimating the noise of {bands} bands")
        solution = banded_toeplitz(
            self.request.steps,
            bands,
            workload=without_schedule(self.request.workload),
            normalize_columns=normalization(bands),
        )
        return solution.strategy, self._sigma(solution.strategy)

    def _sigma(self, strategy: Strategy) -> float:
        request = self.request
        assert request.epsilon is not None
        bands = strategy.bands
        probability = request.joining_probability(bands)
        return estimate_sigma(strategy, bands, probability, request.epsilon, request.delta, samples=_SAMPLES).sigma

    def _note(self, result: Found) -> Found:
        self.results[result.candidate.bands] = result
        if self._progress is not None:
            self._progress(result.candidate)
        return result


def certified(request: Request, chosen: Found, seconds: float, progress: Progress | None) -> tuple[Found, Certificate]:
    """The same strategy with noise that a certificate speaks for; NotCertifiedError where time does not suffice."""
    assert request.epsilon is not None
    if progress is not None:
        progress(f"certifying {chosen.candidate.name}")
    bands = chosen.strategy.bands
    calibration = partial(
        calibrate,
        chosen.strategy,
        bands,
        request.joining_probability(bands),
        request.epsilon,
        request.delta,
        seconds=seconds,
    )
    return found.certified(request, chosen.strategy, seconds, calibration)
