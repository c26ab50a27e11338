"""Bins redrawn every epoch: the best strategy, or the one that is given, with noise estimated and then certified."""

from __future__ import annotations

from functools import partial

from bandmf.accounting.redrawn import calibrate, estimate
from bandmf.accounting.verified import Certificate
from bandmf.optimize.bins.search import optimize_for_bins
from bandmf.planning.candidate import Progress
from bandmf.planning.request import Request
from bandmf.planning.search import found
from bandmf.planning.search.bins import families
from bandmf.planning.search.found import Found
from bandmf.strategies import Strategy

_SAMPLES = 2**11  # of an estimate
_LOOKS = 5


def search(request: Request, progress: Progress | None) -> Found:
    """The strategy of the request, or the best one, with the noise that it would take."""
    epsilon, cycle = request.epsilon, request.cycle
    assert epsilon is not None
    assert cycle is not None
    if request.strategy is not None:
        sigma = estimate(request.strategy, cycle, epsilon, request.delta, samples=2**12).sigma
        result = found.found(request, request.strategy, sigma)
    else:
        results = [_best(request, *family, progress) for family in families(request)]
        result = min(results, key=lambda each: each.candidate.rmse)
    if progress is not None:
        progress(result.candidate)
    return result


def _best(request: Request, family: str, size: int, progress: Progress | None) -> Found:
    """The best strategy of a family, by estimates."""
    epsilon, cycle = request.epsilon, request.cycle
    assert epsilon is not None
    assert cycle is not None

    def compute() -> tuple[Strategy, float]:
        if progress is not None:
            progress(f"optimizing {family} of size {size}")
        solution = optimize_for_bins(
            family,
            request.steps,
            cycle,
            epsilon,
            request.delta,
            size=size,
            workload=request.workload,
            redrawn=True,
            most_estimates=_LOOKS,
            estimate=partial(estimate, samples=_SAMPLES, posterior=True),
        )
        return solution.strategy, solution.sigma

    return found.searched(request, family, size, compute)


def certified(request: Request, chosen: Found, seconds: float, progress: Progress | None) -> tuple[Found, Certificate]:
    """The same strategy with noise that a certificate speaks for; NotCertifiedError where time does not suffice."""
    assert request.epsilon is not None
    assert request.cycle is not None
    calibration = partial(
        calibrate,
        chosen.strategy,
        request.cycle,
        request.epsilon,
        request.delta,
        seconds=seconds,
        progress=None if progress is None else lambda text: progress(f"certifying, {text}"),
    )
    return found.certified(request, chosen.strategy, seconds, calibration)
