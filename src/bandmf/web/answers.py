"""The numbers of the page: what a plan has, what other mechanisms would have, what DP-SGD would need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scipy.optimize import brentq

from bandmf import accounting, strategies
from bandmf.accounting import estimate
from bandmf.accounting.events import Event, cyclic_poisson, one_release
from bandmf.error import rmse
from bandmf.noise.schedule import BYTES_PER_NUMBER, vectors_held
from bandmf.participation import MinSeparation
from bandmf.planning import Candidate, Plan
from bandmf.planning.candidate import Progress
from bandmf.planning.compare import unamplified_strategies
from bandmf.planning.labels import IN_BINS
from bandmf.planning.planner import plan
from bandmf.planning.request import Request
from bandmf.planning.search import bins
from bandmf.planning.search.candidates import Candidates
from bandmf.planning.setup import no_bins, whole_cycle
from bandmf.strategies import Identity, Strategy
from bandmf.web.question import Question

CYCLIC, AUTO = "cyclic-poisson", "auto"
GLANCED_BINS = 320  # steps an epoch up to which balls-in-bins is estimated in a second or two
_MOST_STEPS = {"Dense MF": 256, "LTI": 20_000}  # that take no longer
_MOST_BANDS = {"BandMF, unamplified": 4096, "Stamping": 4096}
_KEPT: dict[tuple[str, int, MinSeparation], tuple[Strategy, float]] = {}
_MOST_KEPT = 100


class Mechanism(NamedTuple):
    """One bar: the error of mean gradients at clip norm 1, and the memory of its noise on each device."""

    name: str
    mean_rmse: float
    vectors: int
    memory: float | None  # bytes; None where the model's size is not given
    fits: bool  # into the memory for noise
    estimated: bool


class Point(NamedTuple):
    """One number of bands of cyclic Poisson sampling."""

    bands: int
    mean_rmse: float
    chosen: bool
    fits: bool  # into the memory for noise
    unsampled: bool  # with so many bands every batch is a whole part of the data


class Needs(NamedTuple):
    """What DP-SGD would need for the error of a plan: another epsilon, or another batch size in as many steps."""

    epsilon: float  # infinite beyond what an accountant can say
    batch_size: float | None  # None where not even all examples in every batch suffice


def cyclic(question: Question, progress: Progress | None = None) -> Plan:
    """The best plan with cyclic Poisson sampling: certified by the accountant, in a second or two."""
    return plan(**question.arguments(CYCLIC), progress=progress)


def certified(question: Question, progress: Progress | None = None) -> Plan:
    """The best plan of all, as `bandmf.plan` makes it: balls-in-bins takes up to a minute to certify."""
    return plan(**question.arguments(AUTO), progress=progress)


def curve(made: Plan, question: Question) -> list[Point]:
    """Error against bands, for cyclic Poisson sampling."""
    request, chosen = question.request(CYCLIC), 0 if made.in_bins else made.bands
    return [_point(each, request, chosen) for each in made.candidates if each.sampling == CYCLIC]


def octaves(made: Plan, question: Question) -> list[Point]:
    """The same with every power of two up to 256 bands, for a smooth curve."""
    known = {point.bands: point for point in curve(made, question)}
    request = question.request(CYCLIC)
    candidates, most = Candidates(request), min(request.most_bands, 256)
    for bands in (2**power for power in range(most.bit_length())):
        if bands not in known:
            known[bands] = _point(candidates.evaluate(bands), request, 0)
    return [known[bands] for bands in sorted(known)]


def _point(each: Candidate, request: Request, chosen: int) -> Point:
    return Point(
        each.bands,
        each.rmse / request.batch_size,
        chosen=each.bands == chosen,
        fits=each.bands <= request.bands_in_memory,
        unsampled=max(event.sampling_probability for event in request.events_for(each.bands)) >= 1 - 1e-2,
    )


# --- other mechanisms -----------------------------------------------------------------------------------


def of_plan(made: Plan, question: Question) -> Iterator[Mechanism]:
    """The plan itself, DP-SGD, and the square root with as many bands as the plan; then what bins were certified."""
    chosen = [each for each in made.candidates if each.sampling == CYCLIC]
    best = min((each for each in chosen if each.vectors is not None), key=_error, default=None)
    if best is not None and best.bands > 1:
        yield _of_candidate("BandMF", best, question, estimated=False)
        root = strategies.banded_square_root(made.steps, best.bands)
        error = best.noise_multiplier * rmse(root)
        yield _mechanism("Banded square root", root, error / question.batch_size, question)
    for each in chosen:
        if each.bands == 1:
            yield _of_candidate("DP-SGD", each, question, estimated=False)
    if made.in_bins:
        mean = made.mean_rmse
        yield _mechanism(IN_BINS.get(made.mechanism, made.mechanism), made.strategy, mean, question)


def in_bins(question: Question) -> Iterator[Mechanism]:
    """Balls-in-bins by a rough estimate, a few percent too high; nothing where that would take long."""
    if bins_obstacle(question):
        return
    request = bins.in_bins(question.request())
    for found in bins.glance(request):
        candidate = found.candidate
        mean = candidate.rmse / request.batch_size
        yield _mechanism(IN_BINS[candidate.mechanism], found.strategy, mean, question, estimated=True)


def bins_obstacle(question: Question) -> str:
    """Why balls-in-bins is not estimated on the page, in words; empty where it is."""
    request = question.request()
    obstacle = no_bins(request.steps, request.examples, request.batch_size, request.adjacency, None)
    cycle = whole_cycle(question.examples, question.batch_size, request.steps)
    if not obstacle and cycle > GLANCED_BINS:
        obstacle = f"is not estimated here beyond {GLANCED_BINS} steps an epoch, and this is {cycle}"
    return obstacle


def unamplified(question: Question) -> Iterator[Mechanism]:
    """Mechanisms that rely on no sampling: every example comes once an epoch, in any order. All are exact."""
    steps = question.request().steps
    cycle = whole_cycle(question.examples, question.batch_size, steps)
    epochs, separation = -(-steps // cycle), min(cycle, steps)
    participation = MinSeparation(epochs, separation)
    sigma = accounting.calibrated(one_release("add-remove"), question.epsilon, question.delta)
    for name, make in unamplified_strategies(steps, epochs, participation).items():
        whole = separation * epochs == steps or name not in ("Stamping", "Dense MF")
        quick = steps <= _MOST_STEPS.get(name, steps) and separation <= _MOST_BANDS.get(name, separation)
        if whole and quick:
            strategy, error = _once(name, steps, participation, make)
            yield _mechanism(name, strategy, sigma * error * cycle / question.examples, question)


def _once(name: str, steps: int, participation: MinSeparation, make: Callable[[], Strategy]) -> tuple[Strategy, float]:
    """A strategy with its error, which does not depend on the budget: kept while epsilon and delta are tried out."""
    question = name, steps, participation
    if question not in _KEPT:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        strategy = make()
        _KEPT[question] = strategy, rmse(strategy, participation=participation)
    return _KEPT[question]


def _error(candidate: Candidate) -> float:
    return candidate.rmse


def _of_candidate(name: str, each: Candidate, question: Question, estimated: bool) -> Mechanism:
    fits = each.vectors is not None
    mean = each.rmse / question.batch_size
    return Mechanism(name, mean, each.vectors or 0, _memory(each.vectors or 0, question), fits, estimated)


def _mechanism(
    name: str, strategy: Strategy, mean_rmse: float, question: Question, *, estimated: bool = False
) -> Mechanism:
    room = question.request().max_vectors
    vectors = vectors_held(strategy)
    if room is not None and vectors > room:  # perhaps with fewer vectors, and more time
        try:
            vectors = vectors_held(strategy, None, room, None)
        except ValueError:
            return Mechanism(name, mean_rmse, vectors, _memory(vectors, question), False, estimated)
    return Mechanism(name, mean_rmse, vectors, _memory(vectors, question), True, estimated)


def _memory(vectors: int, question: Question) -> float | None:
    if question.parameters is None:
        return None
    return BYTES_PER_NUMBER * vectors * question.parameters / question.devices


# --- what DP-SGD would need -----------------------------------------------------------------------------


def dp_sgd_needs(made: Plan) -> Needs:
    """The epsilon, or the batch size, with which DP-SGD has the plan's error; the batch size to about a percent."""
    alone = rmse(Identity(made.steps), workload=made.workload)

    def noise(batch_size: float) -> float:
        return made.mean_rmse * batch_size / alone

    def excess(log_size: float) -> float:
        """Of the epsilon that DP-SGD with this batch size spends for the plan's error, in logarithms."""
        size = math.exp(log_size)
        spent = _about(_dp_sgd(made, size), noise(size), made.delta)
        return math.log(min(max(spent / made.epsilon, 1e-3), 1e3))

    epsilon = accounting.spent(_dp_sgd(made, made.batch_size), noise(made.batch_size), made.delta)
    assert made.examples is not None
    low, high = math.log(made.batch_size), math.log(made.examples)
    if excess(low) <= 0:
        return Needs(epsilon, made.batch_size)
    if excess(high) > 0:
        return Needs(epsilon, None)
    return Needs(epsilon, math.exp(brentq(excess, low, high, xtol=5e-3)))


def _dp_sgd(made: Plan, batch_size: float) -> Event:
    assert made.examples is not None
    (event,) = cyclic_poisson(made.steps, 1, min(batch_size, made.examples), made.examples, made.adjacency, None)
    return event


def _about(event: Event, sigma: float, delta: float) -> float:
    """Epsilon to a percent: the estimate that guides the accountant's search, in milliseconds."""
    if estimate.hopeless(event, sigma):
        return math.inf
    grid = estimate.interval(event, delta, estimate.round_losses(event, sigma), tolerance=estimate.LOOSE)
    return math.inf if grid is None else estimate.rough(event, delta, grid, sigma)
