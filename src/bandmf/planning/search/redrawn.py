"""Bins redrawn every epoch: the noise for a strategy that is given, first estimated, then certified."""

from __future__ import annotations

from functools import partial

from bandmf import _check
from bandmf.accounting.redrawn import calibrate, estimate
from bandmf.accounting.verified import Certificate
from bandmf.planning.candidate import Progress
from bandmf.planning.request import Request
from bandmf.planning.search import found
from bandmf.planning.search.found import Found


def given(request: Request, progress: Progress | None) -> Found:
    """The strategy of the request, with the noise that it would take."""
    if request.strategy is None:
        raise _check.fail(
            "strategy", None, f"must be given with sampling={request.sampling!r}", "take one of bandmf.strategies"
        )
    assert request.epsilon is not None
    assert request.cycle is not None
    sigma = estimate(request.strategy, request.cycle, request.epsilon, request.delta, samples=2**12).sigma
    result = found.found(request, request.strategy, sigma)
    if progress is not None:
        progress(result.candidate)
    return result


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
