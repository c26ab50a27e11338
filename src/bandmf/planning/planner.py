"""plan(): from (epsilon, delta, data, steps) to the mechanism of least error.

A checked request (request.py), a choice among candidates (candidates.py), and one Plan (plan.py).
"""

from __future__ import annotations

import copy

from bandmf import _check, accounting
from bandmf._text import counted
from bandmf.accounting.verified import REDRAWN, Certificate
from bandmf.optimize import banded_toeplitz
from bandmf.participation import Participation
from bandmf.planning.candidate import Candidate, Progress
from bandmf.planning.plan import Plan
from bandmf.planning.request import Request, checked_request, require_two_bands
from bandmf.planning.search import bins, min_separation, redrawn
from bandmf.planning.search.candidates import Candidates, normalization, without_schedule
from bandmf.planning.search.found import Found
from bandmf.planning.setup import SAMPLINGS, no_bins, whole_cycle
from bandmf.strategies import Strategy
from bandmf.strategies.single_precision import in_float32
from bandmf.workloads import Workload

_LEAST_GAIN = 0.005  # of the error, for which "auto" takes more memory
_OTHER_SIZE = 0.01  # relative difference of batch sizes that a plan mentions
_MOST_EPSILON, _MOST_DELTA = 100.0, 0.01  # for which bins are considered unasked: budgets of any use are below
MOST_BINS = 1024  # steps an epoch for which bins are considered unasked: with 2048 planning takes two minutes


def plan(
    *,
    delta: float,
    batch_size: float,
    epsilon: float | None = None,
    examples: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    parameters: int | None = None,
    memory: float | str | None = None,
    devices: int = 1,
    device: str | None = None,
    bands: int | None = None,
    workload: Workload | None = None,
    max_batch_size: int | None = None,
    participation: Participation | None = None,
    adjacency: str = "add-remove",
    strategy: Strategy | None = None,
    noise_multiplier: float | None = None,
    sampling: str = "auto",
    mechanism: str = "auto",
    inverse_bands: int | None = None,
    certify_seconds: float = 30.0,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least error that meets (epsilon, delta).

    >>> p = plan(epsilon=8, delta=1e-6, examples=50_000, batch_size=500, steps=400)
    >>> p.sampling, p.cycle, p.rmse < p.candidates[0].rmse  # candidates[0] is DP-SGD
    ('balls-in-bins', 100, True)
    >>> plan(epsilon=8, delta=1e-6, examples=50_000, batch_size=500, steps=400, sampling="cyclic-poisson").bands
    100

    Args:
        delta: The probability with which epsilon may not hold; at most 1 / (10 * examples) is usual.
        batch_size: Expected number of examples in a batch, on all devices together.
        epsilon: The budget of the whole run.
        examples: Length of the data set; only plans with `participation` can do without.
        steps: Length of training; give this or `epochs`.
        epochs: Length of training in expected passes over the data; may be a fraction.
        parameters: Number of trainable parameters, for `memory` and for `plan.memory`.
        memory: What the noise may take on each device: bytes, or text such as "1GB"; needs `parameters`.
        devices: How many devices share the noise history.
        device: "cpu" or "cuda", where the noise will be generated; None counts the one that takes more memory.
        bands: Fixes the number of bands; 1 is DP-SGD. Asks for cyclic Poisson sampling, unless `sampling` is given.
        workload: What the error is measured on, from `bandmf.workloads`; running sums of gradients by default.
        max_batch_size: Larger batches are cut to this size at random; needs adjacency "zero-out", or one band.
        participation: Plans without amplification, for federated training: how often, and how far apart, one user
            takes part.
        adjacency: What neighboring data sets are: "add-remove", "zero-out" (one example has no gradient) or
            "replace".
        strategy: A strategy of your own, of as many steps, in place of the best one. Asks for cyclic Poisson sampling,
            unless `sampling` is given.
        noise_multiplier: Fixes the noise in place of `epsilon`, together with `bands` or `strategy`; `plan.epsilon`
            then says what it costs.
        sampling: "cyclic-poisson" (the paper's), "balls-in-bins" (each example once an epoch, at a secret place of its
            own), "balls-in-bins-redrawn" (at a fresh one in every epoch), "b-min-sep" (each joins at
            random, never twice within `bands` steps), or "auto": balls-in-bins where that is certified to have less
            error, else cyclic Poisson; `plan.choice` says why.
        mechanism: "banded", for balls-in-bins also "blt" (4 vectors of noise) or "banded-inverse" (none, at as many
            draws as it has bands), or "auto": of those with nearly the least error the one whose noise takes the least
            time.
        inverse_bands: How many bands a banded inverse has, which is then the mechanism; 16 unless given.
        certify_seconds: About the time to certify balls-in-bins or b-min-sep in, after the search; less time is paid
            for with a little more noise.
        progress: Called with each candidate as it is found, to show it.

    Returns:
        One frozen object that owns strategy, sampling, noise and accounting.

    Raises:
        ValueError: An argument, or a combination, that cannot be honored; nothing is ignored.
    """
    _check.choice("sampling", sampling, ("auto", *SAMPLINGS[:-1]))
    seconds = _check.real("certify_seconds", certify_seconds, 0, open_low=True)
    request = checked_request(
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        examples=examples,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        workload=workload,
        participation=participation,
        adjacency=adjacency,
        max_batch_size=max_batch_size,
        bands=bands,
        strategy=strategy,
        parameters=parameters,
        memory=memory,
        devices=devices,
        device=device,
        mechanism=mechanism,
        inverse_bands=inverse_bands,
        sampling=None if participation is not None or sampling == "auto" else sampling,
    )
    if request.participation is not None:
        _check_unamplified(request, sampling)
        return _unamplified(request, progress)
    _check_combination(request, sampling)
    if _only_cyclic(request, sampling):
        return _cyclic(request, progress)
    if sampling == "b-min-sep":
        return _separated(request, seconds, progress)
    if sampling == REDRAWN:
        return _redrawn(request, batch_size, seconds, progress)
    unbanded = request.mechanism in ("banded-inverse", "blt") or request.inverse_bands is not None
    if sampling == "balls-in-bins" or unbanded:
        return _binned(request, batch_size, seconds, progress)
    return _better(request, seconds, progress)


def checked_plan(plan: Plan) -> Plan:
    """A copy of a plan that was given: its constructor checks everything again, and nothing is cached."""
    if not isinstance(plan, Plan):
        raise _check.fail("plan", type(plan).__name__, "must be a Plan", "make one with bandmf.plan(...)")
    return copy.copy(plan)


def _check_unamplified(request: Request, sampling: str) -> None:
    """Refuse what plans with `participation` have no use for."""
    if sampling != "auto":
        raise _check.fail("sampling", sampling, "has no meaning for plans with participation=")
    if request.mechanism not in ("auto", "banded"):
        raise _check.fail(
            "mechanism",
            request.mechanism,
            "plans with participation= search banded strategies only",
            "give the strategy= itself, or plan with sampling='balls-in-bins'",
        )
    if request.inverse_bands is not None:
        raise _check.fail("inverse_bands", request.inverse_bands, "has no meaning for plans with participation=")


def _check_combination(request: Request, sampling: str) -> None:
    """Refuse what would otherwise be ignored."""
    unbanded = request.mechanism in ("banded-inverse", "blt")
    if sampling in ("cyclic-poisson", "b-min-sep") and unbanded:
        raise _check.fail(
            "mechanism",
            request.mechanism,
            f"has no amplification by sampling={sampling!r}: its noise is correlated over all steps",
            "use sampling='balls-in-bins'",
        )
    for name in ("bands", "strategy", "noise_multiplier"):
        if unbanded and getattr(request, name) is not None:
            value = getattr(request, name)
            raise _check.fail(name, value, f"has no meaning with mechanism={request.mechanism!r}")
    if request.inverse_bands is not None and (sampling in ("cyclic-poisson", "b-min-sep") or _fixed(request)):
        raise _check.fail(
            "inverse_bands", request.inverse_bands, "is for balls-in-bins with mechanism='banded-inverse'"
        )


def _fixed(request: Request) -> bool:
    return any(each is not None for each in (request.bands, request.strategy, request.noise_multiplier))


def _only_cyclic(request: Request, sampling: str) -> bool:
    """Whether cyclic Poisson sampling was asked for, by name or by fixing what only it has."""
    return sampling == "cyclic-poisson" or (sampling == "auto" and _fixed(request))


def _cyclic(request: Request, progress: Progress | None, choice: str = "") -> Plan:
    """The best plan with cyclic Poisson sampling: the paper's."""
    candidates = Candidates(request, progress)
    chosen, strategy, without_limit = _best_cyclic(request, candidates)
    return _build(request, candidates.all(), chosen, strategy, without_limit, choice=choice)


def _best_cyclic(
    request: Request, candidates: Candidates, alone: bool = True
) -> tuple[Candidate, Strategy, Candidate | None]:
    """What was fixed, or the best number of bands; and the one that would be best with more memory.

    Memory for DP-SGD only is an error, unless there is something else to choose from.
    """
    if request.strategy is not None:
        return candidates.evaluate_strategy(request.strategy), request.strategy, None
    if request.bands is not None:
        if request.epsilon is not None:
            candidates.evaluate(1)  # DP-SGD, for comparison
        return *candidates.polish(candidates.evaluate(request.bands)), None
    if alone:
        require_two_bands(request)
    best, without_limit = candidates.best(), None
    if best.bands > request.bands_in_memory:
        best, without_limit = candidates.best_in_memory(), best
    return *candidates.polish(best), without_limit


def _binned(request: Request, asked: float, seconds: float, progress: Progress | None) -> Plan:
    """The best plan with balls-in-bins, for batches of about the size `asked`; an error without a certificate."""
    request = request if request.in_bins else bins.in_bins(request)
    bins.check_mechanism(request)
    found, failed = bins.search(request, progress), list[Exception]()
    for guess in bins.in_turn(found):
        try:
            chosen, certificate = bins.certified(request, guess, seconds, progress)
        except (ValueError, ArithmeticError) as error:
            failed.append(error)
            continue
        return _build(
            request,
            _with(found, chosen),
            chosen.candidate,
            chosen.strategy,
            certificate=certificate,
            choice=_other_size(asked, request.batch_size).removeprefix("; "),
        )
    raise failed[0]


def _other_size(asked: float, planned: float) -> str:
    """Says, where it is not about the same, that bins are of another size than was asked for."""
    if abs(planned / asked - 1) <= _OTHER_SIZE:
        return ""
    return (
        f"; batches have {planned:.6g} examples on average, not batch_size={asked:g}, as an epoch of bins has a whole "
        "number of steps"
    )


def _redrawn(request: Request, asked: float, seconds: float, progress: Progress | None) -> Plan:
    """The best plan with bins redrawn every epoch; an error without a certificate."""
    guess = redrawn.search(request, progress)
    chosen, certificate = redrawn.certified(request, guess, seconds, progress)
    choice = _other_size(asked, request.batch_size).removeprefix("; ")
    return _build(request, _with([guess], chosen), *chosen, certificate=certificate, choice=choice)


def _separated(request: Request, seconds: float, progress: Progress | None) -> Plan:
    """The best plan with b-min-sep sampling; an error where there is no certificate."""
    search = min_separation.Search(request, progress)
    chosen, certificate = min_separation.certified(request, search.best(), seconds, progress)
    shown = _with(list(search.results.values()), chosen)
    return _build(request, shown, chosen.candidate, chosen.strategy, certificate=certificate)


def _better(request: Request, seconds: float, progress: Progress | None) -> Plan:
    """Balls-in-bins where it is certified to have less error, else cyclic Poisson sampling; with the reason.

    What takes more memory must have half a percent less.
    """
    if obstacle := _obstacle(request):
        return _cyclic(request, progress, f"cyclic Poisson sampling, since balls-in-bins {obstacle}")
    binned = bins.in_bins(request)
    try:
        found = bins.search(binned, progress)
    except (ValueError, ArithmeticError) as error:  # budgets far from any use
        return _cyclic(request, progress, f"cyclic Poisson sampling, since balls-in-bins failed: {error}")
    candidates = Candidates(request, progress)
    cyclic, strategy, without_limit = _best_cyclic(request, candidates, alone=False)

    def less(candidate: Candidate) -> float:
        """By how much its error of mean gradients is below that of cyclic Poisson sampling."""
        return 1 - candidate.rmse / binned.batch_size / (cyclic.rmse / request.batch_size)

    def worth(candidate: Candidate) -> bool:
        """More memory must gain more than rounding would."""
        return less(candidate) > (_LEAST_GAIN if (candidate.vectors or 0) > (cyclic.vectors or 0) else 0)

    guesses = bins.in_turn(found)
    refused = f"balls-in-bins would have about {1 - less(guesses[0].candidate):.3f} times its error"
    for guess in (each for each in guesses if worth(each.candidate)):
        try:
            chosen, certificate = bins.certified(binned, guess, seconds, progress)
        except (ValueError, ArithmeticError) as error:  # NotCertifiedError is one; others are as above
            refused = f"balls-in-bins could not be certified within certify_seconds={seconds:g}"
            if not str(error).startswith("seconds="):
                refused = f"balls-in-bins could not be certified: {error}"
            continue
        if worth(chosen.candidate):
            choice = _in_favor(chosen.candidate, cyclic, less(chosen.candidate))
            choice += _other_size(request.batch_size, binned.batch_size)
            shown = candidates.all() + _with(found, chosen)
            return _build(binned, shown, chosen.candidate, chosen.strategy, certificate=certificate, choice=choice)
        refused = f"balls-in-bins has {1 - less(chosen.candidate):.3f} times its error when certified"
    shown = candidates.all() + tuple(each.candidate for each in found)
    choice = f"cyclic Poisson sampling, since {refused}"
    return _build(request, shown, cyclic, strategy, without_limit, choice=choice)


def _obstacle(request: Request) -> str:
    """Why balls-in-bins is not considered, in words; empty where it is."""
    obstacle = no_bins(request.steps, request.examples, request.batch_size, request.adjacency, request.max_batch_size)
    if obstacle:
        return obstacle
    assert request.examples is not None
    if (request.epsilon or 0.0) > _MOST_EPSILON or request.delta > _MOST_DELTA:
        return f"is considered up to epsilon={_MOST_EPSILON:g} and delta={_MOST_DELTA:g}: samples show little beyond"
    cycle = whole_cycle(request.examples, request.batch_size, request.steps)
    if cycle > MOST_BINS:
        return f"takes long to account for {cycle} steps an epoch: ask for it by sampling='balls-in-bins'"
    return ""


def _with(found: list[Found], chosen: Found) -> tuple[Candidate, ...]:
    """All candidates of a search, the chosen one as certified."""
    others = (each.candidate for each in found if each.strategy is not chosen.strategy)
    return (*others, chosen.candidate)


def _in_favor(chosen: Candidate, cyclic: Candidate, less: float) -> str:
    return (
        f"balls-in-bins, certified: {less:.0%} less error than the best plan with cyclic Poisson sampling, with "
        f"noise that keeps {counted(chosen.vectors or 0, 'vector')} instead of {cyclic.vectors or 0:,}"
    )


def _unamplified(request: Request, progress: Progress | None) -> Plan:
    """As many bands as an example stays away, unless fixed: then no two of its participations interact."""
    candidates, participation = Candidates(request, progress), request.participation
    assert participation is not None
    if request.strategy is not None:
        chosen = candidates.evaluate_strategy(request.strategy)
        return _build(request, candidates.all(), chosen, request.strategy)
    if request.bands is None:
        require_two_bands(request)
    wanted = participation.spacing(request.steps).separation if request.bands is None else request.bands
    without_limit = None
    if wanted > request.bands_in_memory:
        without_limit = candidates.evaluate_strategy(_toeplitz(request, wanted))
    strategy = _toeplitz(request, min(wanted, request.bands_in_memory))
    chosen = candidates.evaluate_strategy(strategy)
    return _build(request, candidates.all(), chosen, strategy, without_limit)


def _toeplitz(request: Request, bands: int) -> Strategy:
    workload, mode = without_schedule(request.workload), normalization(bands)
    return banded_toeplitz(request.steps, bands, workload=workload, normalize_columns=mode).strategy


def _build(
    request: Request,
    candidates: tuple[Candidate, ...],
    chosen: Candidate,
    strategy: Strategy,
    without_limit: Candidate | None = None,
    *,
    certificate: Certificate | None = None,
    choice: str = "",
) -> Plan:
    """The plan for the candidate that was chosen: the one place where plans are made."""
    sigma, epsilon, strategy = chosen.noise_multiplier, request.epsilon, in_float32(strategy)
    if epsilon is None:
        epsilon = max(accounting.spent(event, sigma, request.delta) for event in request.events_of(strategy))
    return Plan(
        strategy=strategy,
        noise_multiplier=sigma,
        epsilon=epsilon,
        delta=request.delta,
        batch_size=request.batch_size,
        examples=request.examples,
        adjacency=request.adjacency,
        workload=request.workload,
        participation=request.participation,
        sampling=request.sampling,
        max_batch_size=request.max_batch_size,
        parameters=request.parameters,
        memory_limit=request.memory_limit,
        devices=request.devices,
        device=request.device,
        candidates=candidates,
        best_without_memory_limit=without_limit,
        certificate=certificate,
        choice=choice,
    )
