"""Balls-in-bins: the best strategy of each mechanism for a request, and the certificate of the one that is chosen.

Estimates only choose; what a plan promises rests on its certificate alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bandmf import _check
from bandmf.accounting.bins import NotCertifiedError, calibrate, estimate, gram_matrix
from bandmf.accounting.verified import Certificate
from bandmf.optimize.bins.search import guess_for_bins, optimize_for_bins
from bandmf.planning.candidate import Candidate, Progress
from bandmf.planning.request import Request
from bandmf.planning.search import found
from bandmf.planning.search.found import Found
from bandmf.planning.setup import whole_cycle
from bandmf.strategies import Strategy
from bandmf.strategies.base import InputRecurrence, OutputRecurrence
from bandmf.strategies.scaled import unscaled

BUFFERS = 4  # more gain less than a percent
INVERSE_BANDS = 16
MOST_BANDS = 128  # of a banded strategy, where their number is not given
_MANY_BINS = 1024  # where an estimate takes seconds, and a banded inverse is far behind a BLT


def in_bins(request: Request) -> Request:
    """The same request with bins: their expected size is examples / cycle, with the cycle rounded up."""
    assert request.examples is not None
    cycle = whole_cycle(request.examples, request.batch_size, request.steps)
    return replace(request, sampling="balls-in-bins", batch_size=request.examples / cycle)


def families(request: Request) -> Iterator[tuple[str, int]]:
    """(mechanism, size) of what is worth trying: what was asked for, or what fits into memory."""
    asked, room, cycle = request.mechanism, request.max_vectors, request.cycle or 1
    if asked == "auto" and request.inverse_bands is not None:
        asked = "banded-inverse"
    asked = "banded" if request.bands is not None else asked
    room = request.steps if room is None else room
    fits = room >= BUFFERS
    if asked == "blt" or (asked == "auto" and fits):
        yield "blt", BUFFERS
    inverse = request.inverse_bands or INVERSE_BANDS
    wanted = cycle <= _MANY_BINS or not fits
    if asked == "banded-inverse" or (asked == "auto" and wanted):
        yield "banded-inverse", min(inverse, request.steps)
    if asked == "banded":
        yield "banded", request.bands or max(1, min(cycle, room + 1, MOST_BANDS))


def search(request: Request, progress: Progress | None) -> list[Found]:
    """The best strategy of each family, by estimates."""
    if request.strategy is not None:
        searches = [partial(_given, request, request.strategy)]
    else:
        searches = [partial(_best, request, *family, progress) for family in families(request)]
    results, failed = list[Found](), list[Exception]()
    for find in searches:
        try:
            results.append(find())
        except (ValueError, ArithmeticError) as error:  # budgets far from any use, or samples that show nothing
            failed.append(error)
        else:
            if progress is not None:
                progress(results[-1].candidate)
    if not results:
        raise failed[0]
    return results


def glance(request: Request) -> Iterator[Found]:
    """What `search` begins with, for every family: a few percent more error than it finds, in about a second.

    For looking at, up to a few hundred steps an epoch; the noise is estimated from few samples.
    """
    epsilon, cycle = request.epsilon, request.cycle
    assert epsilon is not None
    assert cycle is not None
    for family, size in families(request):
        strategy = guess_for_bins(family, request.steps, cycle, epsilon, size=size, workload=request.workload)
        gram = gram_matrix(strategy, cycle)
        yield found.found(request, strategy, estimate(gram, epsilon, request.delta, samples=2**10).sigma)


def in_turn(results: list[Found], alike: float = 0.02) -> list[Found]:
    """In which order to have them certified, until one is.

    First, of those with nearly the least error, the one whose noise takes the least time; then by error.
    """
    by_error = sorted(results, key=lambda each: each.candidate.rmse)
    close = [each for each in by_error if each.candidate.rmse <= (1 + alike) * by_error[0].candidate.rmse]
    cheapest = min(close, key=_work)
    return [cheapest, *(each for each in by_error if each is not cheapest)]


def _work(result: Found) -> float:
    """Time of one step's noise, in passes over a vector: a draw takes as long as six (measured on a GPU)."""
    vectors, recurrence = result.candidate.vectors or 0, unscaled(result.strategy).recurrence
    if isinstance(recurrence, InputRecurrence):
        return 6.0 * (result.candidate.bands - vectors) + vectors
    return 6.0 + (vectors if isinstance(recurrence, OutputRecurrence) else 2 * vectors)


def certified(request: Request, chosen: Found, seconds: float, progress: Progress | None) -> tuple[Found, Certificate]:
    """The same strategy with noise that a certificate speaks for; NotCertifiedError where time does not suffice."""
    assert request.epsilon is not None
    assert request.cycle is not None
    calibration = partial(
        calibrate,
        gram_matrix(chosen.strategy, request.cycle),
        request.epsilon,
        request.delta,
        seconds=seconds,
        progress=None if progress is None else lambda text: progress(f"certifying, {text}"),
    )
    return found.certified(request, chosen.strategy, seconds, calibration)


def _given(request: Request, strategy: Strategy) -> Found:
    assert request.epsilon is not None
    assert request.cycle is not None
    gram = gram_matrix(strategy, request.cycle)
    sigma = estimate(gram, request.epsilon, request.delta, samples=2**12).sigma
    return found.found(request, strategy, sigma)


def _best(request: Request, family: str, size: int, progress: Progress | None) -> Found:
    """The best strategy of a family."""
    epsilon, cycle = request.epsilon, request.cycle
    assert epsilon is not None
    assert cycle is not None

    def search() -> tuple[Strategy, float]:
        if progress is not None:
            progress(f"optimizing {Candidate(size, 1, 1, None, 'balls-in-bins', family).name}")
        problem, workload = (family, request.steps, cycle, epsilon), request.workload
        look = partial(estimate, samples=_samples(cycle), posterior=True)
        try:
            solution = optimize_for_bins(*problem, request.delta, size=size, workload=workload, estimate=look)
        except NotCertifiedError:  # no look showed anything: where the search begins, with more samples
            guess = guess_for_bins(*problem, size=size, workload=workload)
            return guess, estimate(gram_matrix(guess, cycle), epsilon, request.delta).sigma
        return solution.strategy, solution.sigma

    return found.searched(request, family, size, search)


def _samples(cycle: int) -> int:
    """Of an estimate: sigma to a few thousandths, in about a second."""
    return min(max(2**20 // cycle, 2**12), 2**13)


def check_mechanism(request: Request) -> None:
    """A mechanism that was asked for must fit into memory; one sentence says what does not."""
    if request.mechanism == "blt" and request.max_vectors is not None and request.max_vectors < BUFFERS:
        raise _check.fail(
            "mechanism", "blt", f"needs memory for {BUFFERS} vectors", "use 'banded-inverse', which needs none"
        )
