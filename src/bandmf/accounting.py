"""Sigma for (epsilon, delta), and epsilon for sigma: dp_accounting's PLD accountant, rounded towards privacy.

A *round* adds noise N(0, sigma^2) to a sum to which the example in question, when it is sampled, contributes
at most 1. A banded strategy with b bands makes ceil(steps / b) rounds that sample with probability
q = b * batch_size / examples; without sampling (q = 1) there is a single Gaussian release, or k of them.

dp_accounting has the last word on every number returned. It is slow (up to seconds for one value), so a fast
estimate of our own proposes sigma and the accountant's grid; the accountant then disposes.

>>> sigma = noise_multiplier(epsilon=8, delta=1e-8, sampling_probability=1 / 16, rounds=128)
>>> f"{sigma:.3f}", epsilon(sigma, 1e-8, 1 / 16, 128) <= 8
('0.941', True)
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import fft, optimize, special

from bandmf import _check
from bandmf._check import FloatArray

ADJACENCIES = ("add-remove", "zero-out", "replace")
MIN_EPSILON, MAX_EPSILON = 1e-3, 200.0
MAX_ROUNDS = 10**8
MIN_DELTA = 1e-13  # the accountant cuts tails of mass 1e-15 and books them as certain disclosure

DEFAULT_INTERVAL = 1e-4  # dp_accounting's own value_discretization_interval
INTERVALS = tuple(float(f"{digit}e{exponent}") for exponent in range(0, -10, -1) for digit in (5, 2, 1))
TIGHT = 1e-4  # relative excess of epsilon that is spent to make the accountant fast
LOOSE = 1e-2  # beyond this excess the accountant's default grid is refined

_SCHEME = 1  # raise it when the same inputs could give another number: old cache entries are then ignored


def noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_probability: float,
    rounds: int,
    *,
    adjacency: str = "add-remove",
    max_batch_size: int | None = None,
    examples: int | None = None,
) -> float:
    """The smallest noise multiplier that meets (epsilon, delta) over so many Poisson-sampled rounds.

    `sampling_probability=1` means no amplification: `rounds` releases of the Gaussian mechanism.
    `max_batch_size` caps a batch: of a larger sample a random subset of that size is used. What the cap costs
    depends on `examples`, how many examples a round samples *from* (with b bands, the size of one of the b
    parts of the data).

    Guarantees:
      - `epsilon(sigma, ...) <= epsilon` for the very number returned, and above 1 - 1e-4 of it (beyond 1e5
        rounds, where the accountant's rounding errors show, above 1 less some 1e-3).
      - The accountant's grid is its default or a multiple, so that `PLDAccountant()` itself does not report
        more. A finer one is used only where the default would overstate epsilon by more than 1 to 3 percent:
        very many rounds, each with very little loss.
      - The accountant raises a spectrum to the power `rounds` in double precision, which blurs delta by up
        to rounds * 2^-52, in either direction; so much is taken off delta beforehand.
      - "zero-out" (the example's contribution becomes zero, all else stays) has for Poisson sampling
        exactly the pair of distributions of "add-remove": N(0, s^2) and (1-q) N(0, s^2) + q N(1, s^2), in
        both orders. "replace" has (1-q) N(0, s^2) + q N(+-1, s^2). With a cap, dp_accounting's truncated
        event: when the cap bites, one example takes another's place, which counts as a contribution of 2.

    >>> round(noise_multiplier(1.0, 1e-6, 1.0, 1), 3)
    4.225
    """
    target = _check.real(
        "epsilon",
        epsilon,
        MIN_EPSILON,
        MAX_EPSILON,
        remedy="a larger epsilon protects nothing, a smaller one cannot be certified",
    )
    setting = _setting(delta, sampling_probability, rounds, adjacency, max_batch_size, examples)
    sampled_ever = -math.expm1(setting.rounds * math.log1p(-min(setting.sampling_probability, 1 - 1e-16)))
    if setting.delta >= sampled_ever:
        raise _check.fail(
            "delta",
            delta,
            f"must be below {sampled_ever:g}, the probability that an example is sampled at all",
            "lower delta: this budget would be met without any noise",
        )
    return _cached("noise_multiplier", setting, target, partial(_calibrate, setting, target))


def epsilon(
    noise_multiplier: float,
    delta: float,
    sampling_probability: float,
    rounds: int,
    *,
    adjacency: str = "add-remove",
    max_batch_size: int | None = None,
    examples: int | None = None,
) -> float:
    """The epsilon that so many Poisson-sampled rounds with this noise multiplier spend at `delta`.

    An upper bound, with the arguments and guarantees of `noise_multiplier`; infinite above 200. A release
    with noise of standard deviation s and sensitivity c, whatever the strategy, costs
    `epsilon(s / c, delta, 1.0, 1)`: what a run with known participations has spent.

    >>> round(epsilon(3.0, 1e-6, 0.1, 512), 4)
    3.7697
    """
    sigma = _check.real(
        "noise_multiplier",
        noise_multiplier,
        0,
        1e12,
        open_low=True,
        remedy="without noise there is no privacy to account for",
    )
    setting = _setting(delta, sampling_probability, rounds, adjacency, max_batch_size, examples)
    return _cached("epsilon", setting, sigma, partial(_evaluate, setting, sigma))


@dataclass(frozen=True)
class _Setting:
    """Everything but epsilon and sigma, checked."""

    delta: float
    sampling_probability: float
    rounds: int
    adjacency: str
    max_batch_size: int | None  # both None when no sample can be larger
    examples: int | None

    @property
    def unsampled(self) -> bool:
        """Plain Gaussian releases: k of them are one with noise sigma / sqrt(k)."""
        return self.sampling_probability == 1 and self.max_batch_size is None

    @property
    def compositions(self) -> int:
        """Rounds that have to be composed numerically."""
        return 1 if self.unsampled else self.rounds

    @property
    def usable_delta(self) -> float:
        """Delta less what rounding in the accountant can hide (measured: up to 0.8 of this, 400 settings)."""
        return self.delta - self.compositions * 2.0**-52

    @property
    def scatter(self) -> float:
        """How far rounding moves epsilon, relatively: some hundredths of what it does to delta."""
        return 0.05 * (1 - self.usable_delta / self.delta)

    @property
    def truncation(self) -> tuple[float, float]:
        """dp_accounting's model of a cap M on samples from N examples: the probability that it bites when the
        example is sampled, and the probability that the example is in the batch given that it bites.
        """
        q, N, M = self.sampling_probability, self.examples, self.max_batch_size
        if N is None or M is None:
            return 0.0, q
        bites = float(special.bdtrc(M - 1, N - 1, q))
        return bites, float(special.bdtrc(M, N, q)) * M / N / bites if bites else q


def _setting(
    delta: float,
    sampling_probability: float,
    rounds: int,
    adjacency: str,
    max_batch_size: int | None,
    examples: int | None,
) -> _Setting:
    _check.real("delta", delta, 0, 1, open_low=True, open_high=True)
    q = _check.real(
        "sampling_probability",
        sampling_probability,
        0,
        1,
        open_low=True,
        remedy="it is bands * batch_size / examples, or 1 for no sampling",
    )
    rounds = _check.whole("rounds", rounds, 1, MAX_ROUNDS, remedy="use more bands: fewer rounds")
    _check.choice("adjacency", adjacency, ADJACENCIES)
    if max_batch_size is None:
        examples = None
    else:
        max_batch_size = _check.whole("max_batch_size", max_batch_size)
        examples = _check.whole(
            "examples",
            examples,
            remedy="max_batch_size needs the number of examples that a round samples from",
        )
        if max_batch_size >= examples:
            max_batch_size = examples = None
    setting = _Setting(float(delta), q, rounds, adjacency, max_batch_size, examples)
    least = max(MIN_DELTA, setting.compositions * 2.0**-51)
    if delta < least:
        raise _check.fail(
            "delta",
            delta,
            f"must be at least {least:.2g}, the least that the accountant can certify for rounds={rounds}",
            "raise delta, or use more bands: fewer rounds",
        )
    return setting


# The word of record ---------------------------------------------------------------------------------------


def _evaluate(setting: _Setting, sigma: float) -> float:
    """Epsilon by dp_accounting's PLD accountant, on the grid that suits this setting."""
    if _hopeless(setting, sigma):
        return math.inf
    losses = _losses(setting, sigma)
    interval = _interval(setting, losses)
    if interval is None:
        return math.inf
    import dp_accounting  # takes a second, and no cached answer needs it
    from dp_accounting import pld

    relations = dp_accounting.NeighboringRelation
    relation = {
        "add-remove": relations.ADD_OR_REMOVE_ONE,
        "zero-out": relations.REPLACE_SPECIAL,
        "replace": relations.REPLACE_ONE,
    }[setting.adjacency]
    if setting.compositions > 10**5 and np.ptp(losses.values) < 1100 * interval:
        composed = _compose_in_stages(setting, sigma, interval, relation)
        return float(composed.get_epsilon_for_delta(setting.usable_delta))
    accountant = pld.PLDAccountant(relation, interval)
    accountant.compose(_event(setting, sigma), setting.rounds)
    return float(accountant.get_epsilon(setting.usable_delta))


def _event(setting: _Setting, sigma: float) -> Any:
    """One round as dp_accounting describes it."""
    import dp_accounting

    if setting.max_batch_size is not None:
        return dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=setting.examples,
            sampling_probability=setting.sampling_probability,
            truncated_batch_size=setting.max_batch_size,
            noise_multiplier=sigma,
        )
    release = dp_accounting.GaussianDpEvent(sigma)
    if setting.unsampled:
        return release
    return dp_accounting.PoissonSampledDpEvent(setting.sampling_probability, release)


def _compose_in_stages(setting: _Setting, sigma: float, interval: float, relation: Any) -> Any:
    """What the accountant does with this event, a thousand rounds first.

    Of a distribution on less than a thousand points the accountant computes points ** rounds, as an exact
    integer, only to see that it is large: seconds for 1e6 rounds, hours for 1e8.
    """
    from dp_accounting.pld import privacy_loss_distribution

    common = {"value_discretization_interval": interval, "neighboring_relation": relation}
    if setting.max_batch_size is None:
        one_round = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=setting.sampling_probability, **common
        )
    else:
        one_round = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            setting.examples, setting.sampling_probability, setting.max_batch_size, sigma, **common
        )
    thousands, rest = divmod(setting.rounds, 1000)
    composed = one_round.self_compose(1000).self_compose(thousands)
    return composed.compose(one_round.self_compose(rest)) if rest else composed


# The fast estimate ----------------------------------------------------------------------------------------


class _Losses(NamedTuple):
    """A privacy loss distribution: values, and how much mass lies on each."""

    values: FloatArray
    masses: FloatArray


def _losses(setting: _Setting, sigma: float) -> _Losses:
    """The privacy loss of one round, for a fine grid of noise values (spectrally accurate)."""
    if setting.unsampled:
        return _mixture_losses(sigma / math.sqrt(setting.rounds), 1.0, setting.adjacency == "replace")
    bites, q_then = setting.truncation
    usual = _mixture_losses(sigma, setting.sampling_probability, setting.adjacency == "replace")
    if not bites:
        return usual
    swapped = _mixture_losses(sigma / 2, q_then, replace=True)
    values = np.concatenate([usual.values, swapped.values])
    masses = np.concatenate([usual.masses * (1 - bites), swapped.masses * bites])
    return _Losses(values[masses > 0], masses[masses > 0])


def _mixture_losses(sigma: float, q: float, replace: bool) -> _Losses:
    """(1-q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2), or against its own mirror image."""
    x = np.arange(-10, 10 + 1 / sigma, 0.02)  # in units of sigma
    shift = 1 / (2 * sigma**2)
    outside = math.log1p(-q) if q < 1 else -math.inf
    values = np.logaddexp(outside, math.log(q) + x / sigma - shift)
    masses = np.exp(values - x**2 / 2)
    if replace:
        values = values - np.logaddexp(outside, math.log(q) - x / sigma - shift)
    return _Losses(values[masses > 0], masses[masses > 0] / masses.sum())


def _estimate(losses: _Losses, rounds: int, delta: float, interval: float) -> float:
    """Epsilon of `rounds` compositions on a grid of privacy losses, pessimistic as the accountant's own.

    "Connect the dots": a loss between two grid points is split between them so that the mass under either
    distribution is kept. Up to rounding this is what dp_accounting does, for one of its two directions.
    """
    below = np.floor(losses.values / interval)
    rest = losses.values - below * interval
    share = np.expm1(rest) / (np.expm1(rest) - np.expm1(rest - interval))
    grid = _Losses(
        np.concatenate([below, below + 1]),
        np.concatenate([losses.masses * (1 - share), losses.masses * share]),
    )
    low, high = (math.floor(bound) for bound in _bounds(grid, rounds, delta))
    size = fft.next_fast_len(high - low + 2, real=True)
    one_round = np.bincount(grid.values.astype(np.int64) % size, grid.masses, size)
    composed = fft.irfft(fft.rfft(one_round) ** rounds, size)
    places = np.arange(low + size - 1, low - 1, -1)
    masses, values = composed[places % size], places * interval
    # delta(e) = sum over losses v > e of mass (1 - exp(e - v)); the first place from above that exceeds delta
    above, weighed = np.cumsum(masses), np.cumsum(masses * np.exp(-np.maximum(values, -700)))
    exceeds = above - np.exp(np.minimum(values, 700)) * weighed > delta
    i = int(np.argmax(exceeds))
    if i == 0 or values[i - 1] <= 0:
        return 0.0
    return max(0.0, math.log((above[i - 1] - delta) / weighed[i - 1])) if above[i - 1] > delta else values[i]


def _bounds(losses: _Losses, rounds: int, delta: float) -> tuple[float, float]:
    """Where all but delta / 1000 of the sum of `rounds` losses lies, by Chernoff's bound."""
    spread = math.sqrt(rounds * float(np.average(losses.values**2, weights=losses.masses)))
    orders = np.geomspace(1e-2, 1e2, 40) / max(spread, 1e-300)
    bounds = []
    for values in (-losses.values, losses.values):
        largest = values.max()
        moments = np.log(losses.masses @ np.exp(np.outer(values - largest, orders))) + orders * largest
        bound = float(np.min((rounds * moments + math.log(1e3 / delta)) / orders))
        bounds.append(min(bound, rounds * float(largest)))
    return -bounds[0], bounds[1]


def _interval(setting: _Setting, losses: _Losses, tolerance: float = TIGHT) -> float | None:
    """The coarsest grid for the accountant that exceeds epsilon by about `tolerance`; None beyond 200.

    The excess falls at least linearly with the interval, so two estimates tell it. Where a fine grid is cheap
    a tenth of the tolerance is demanded, where it is dear up to five times as much granted. All intervals
    down to the default are multiples of it: a coarser grid can then only report more.
    """
    rounds, delta = setting.compositions, setting.usable_delta
    low, high = _bounds(losses, rounds, delta)
    if high > 3 * MAX_EPSILON:
        return None
    span = float(np.ptp(losses.values))
    width = span + (high - low) / 10  # what the accountant's time is proportional to
    estimate: Callable[[float], float] = partial(_estimate, losses, rounds, delta)
    candidates = [d for d in INTERVALS if d <= max((high - low) / 500, 2 * DEFAULT_INTERVAL)]
    excessive = estimate(candidates[0])
    for interval, finer in pairwise(candidates):
        value = estimate(finer)
        price = min(max((width / finer / 40_000) ** 2, 0.1), 5.0)  # a point costs 10 to 20 microseconds
        tolerated = tolerance * price + setting.scatter
        if excessive - value <= tolerated / 2 * value:
            return interval if value <= MAX_EPSILON else None
        if finer <= DEFAULT_INTERVAL:
            # The excess falls linearly to quadratically: it is the difference, or a third of it.
            enough = finer == DEFAULT_INTERVAL and excessive - value <= 3 * LOOSE * value
            # Clipped rounding errors of the accountant's second differences grow as 1 / interval^2.
            blurred = rounds * 1e-17 * span / (finer / 2) ** 2 > LOOSE
            if enough or blurred or width > 50_000 * finer:
                return finer if value <= MAX_EPSILON else None
        excessive = value
    return candidates[-1]


# The search -----------------------------------------------------------------------------------------------


def _calibrate(setting: _Setting, target: float) -> float:
    """The smallest sigma that the accountant confirms: estimate, then one or two of its verdicts."""
    sigma = _guess(setting, target)
    for _ in range(2):  # a grid that suits the guess may not suit the solution
        grid = _interval(setting, _losses(setting, sigma), tolerance=LOOSE) or INTERVALS[0]
        rough = partial(_rough, setting, grid)
        sigma = _solve(rough, target, sigma)
    fall = max(rough(1.01 * sigma), 1e-9) / max(rough(sigma), 1e-9)
    slope = min(math.log(fall) / math.log(1.01), -0.1)  # of log epsilon over log sigma: -1 or steeper
    margin = 2e-5 + setting.scatter / 2

    def improved(value: float) -> float:
        """Sigma moved along the slope from where epsilon is `value` to just below the target."""
        return sigma * min(max(target * (1 - margin) / max(value, 1e-9), 0.5), 2.0) ** (1 / slope)

    fine = _interval(setting, _losses(setting, sigma)) or DEFAULT_INTERVAL
    for _ in range(2):
        sigma = improved(_rough(setting, fine, sigma))
    low, high = 0.0, math.inf
    for _ in range(20):
        verdict = _evaluate(setting, sigma)
        if verdict <= target:
            high = sigma
        else:
            low, margin = sigma, 1.5 * margin
        if target * (1 - TIGHT - 3 * setting.scatter) <= verdict <= target or high < low * (1 + TIGHT / 4):
            return high
        sigma = improved(verdict)
        if not low < sigma < high:
            sigma = math.sqrt(low * high)
    if math.isfinite(high):
        return high
    raise _check.fail("epsilon", target, "no noise multiplier found that meets it", "change epsilon or delta")


def _hopeless(setting: _Setting, sigma: float) -> bool:
    """Whether one sampled round loses far more than 200: not worth the memory to say how much."""
    return sigma < 0.02 * (math.sqrt(setting.rounds) if setting.unsampled else 1)


def _rough(setting: _Setting, interval: float, sigma: float) -> float:
    """The estimate on a given grid."""
    if _hopeless(setting, sigma):
        return math.inf
    losses = _losses(setting, sigma)
    if _bounds(losses, setting.compositions, setting.usable_delta)[1] > 3 * MAX_EPSILON:
        return math.inf
    return _estimate(losses, setting.compositions, setting.usable_delta, interval)


def _guess(setting: _Setting, target: float) -> float:
    """Sigma by the central limit theorem: the rounds together are one release with mean mu, noise 1."""
    room = math.log(1 / setting.delta)
    mu = math.sqrt(2) * (math.sqrt(room + target) - math.sqrt(room))
    if setting.unsampled:
        return math.sqrt(setting.rounds) / mu
    return 1 / math.sqrt(math.log1p(mu**2 / (setting.sampling_probability**2 * setting.rounds)))


def _solve(curve: Callable[[float], float], target: float, guess: float) -> float:
    """Where the falling curve meets the target, searched from the guess on a log scale."""

    def excess(log_sigma: float) -> float:
        value = curve(math.exp(log_sigma)) / target
        return math.log(min(max(value, 1e-3), 1e3))

    low = high = math.log(guess)
    step = 0.02
    while excess(low) < 0:
        low, high, step = low - step, low, 3 * step
    while excess(high) > 0 and high < 30:
        low, high, step = high, high + step, 3 * step
    if low == high or high >= 30:
        return math.exp(high)
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-6))


# The cache ------------------------------------------------------------------------------------------------


def _cached(quantity: str, setting: _Setting, value: float, compute: Callable[[], float]) -> float:
    """What an earlier call, of any process, found for the same inputs; else compute and keep it."""
    question = {
        "quantity": quantity,
        "of": value,
        **asdict(setting),
        "scheme": _SCHEME,
        "dp_accounting": importlib.metadata.version("dp-accounting"),
    }
    text = json.dumps(question, sort_keys=True)
    folder = _cache_folder()
    if folder is None:
        return compute()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    known = _read(path, text)
    if known is not None:
        return known
    answer = compute()
    _write(path, text, answer)
    return answer


def _cache_folder() -> Path | None:
    """BANDMF_CACHE (a folder, or "off"), else bandmf in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("BANDMF_CACHE")
    if own is not None:
        off = own.strip().lower() in ("", "0", "off", "none")
        return None if off else Path(own).expanduser() / "accounting"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification demands
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "bandmf" / "accounting"


def _seal(question: str, answer: float) -> str:
    return hashlib.sha256(f"{question} {answer!r}".encode()).hexdigest()


def _read(path: Path, question: str) -> float | None:
    """The stored answer, if the entry is whole and answers this very question."""
    try:
        entry = json.loads(path.read_bytes())
        answer = float(entry["answer"])
        return answer if entry["seal"] == _seal(question, answer) else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _write(path: Path, question: str, answer: float) -> None:
    """Keep the answer, all or nothing: a reader never sees half a file. No cache is no error."""
    entry = {"question": json.loads(question), "answer": answer, "seal": _seal(question, answer)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(entry, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        pass
