"""From (epsilon, delta) to a certified sigma: estimate, aim a little below delta, certify.

The upper bound of a certificate is above the mean of its samples by a margin that falls with their number: the search
aims at the divergence that leaves room for it, for bad luck and for `failure`. Samples are as many as bring the margin
down to a few percent of delta, or as there is time for. One percent of sigma is a quarter of delta.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.gram import checked_gram
from bandmf.accounting.bins.loss import PrivacyLoss
from bandmf.accounting.certified import FAILURE, LUCK, NotCertifiedError
from bandmf.accounting.lines.bound import best_rate
from bandmf.accounting.lines.certificate import Certificate, certify, most_samples
from bandmf.accounting.lines.divergences import PILOT, Samples, added, removed
from bandmf.accounting.lines.estimate import Estimate, estimate
from bandmf.accounting.lines.line import raised_loss
from bandmf.accounting.samples import generator, one_thread

_MARGIN = 0.05  # of delta
_USED = 0.8  # of the time that is left: the rest is for another attempt
_LEAST = 2_000  # samples
_PILOT_LUCK = 1.5  # standard errors of the pilot
_MOST_ATTEMPTS = 20


def calibrate(
    gram: FloatArray,
    epsilon: float,
    delta: float,
    *,
    seconds: float = 30.0,
    seed: int | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """A certificate with a sigma that is close to the least one; NotCertifiedError where the time does not suffice.

    With more `seconds` than needed for a margin of 5 percent of delta, the rest is not used; the estimate that comes
    first takes its own time. `seed` is for tests; by default it is drawn afresh, as every attempt needs. `progress` is
    told, in words, what happens.

    Compare strategies by `estimate` and certify the one that was chosen: the best of m certificates has m times
    the probability of failure.

    >>> import numpy as np
    >>> certificate = calibrate(np.array([[1.0]]), 1.0, 1e-6)  # one position: the Gaussian mechanism has 4.2247
    >>> 4.2247 < certificate.sigma < 4.25, certificate.delta
    (True, 1e-06)
    """
    gram = checked_gram(gram)
    seconds = _check.real("seconds", seconds, 0, open_low=True)
    root = secrets.randbits(120) if seed is None else _check.whole("seed", seed, 0, 2**120 - 1)
    tell = progress or (lambda text: None)
    pilot = estimate(gram, epsilon, delta, samples=_pilot_samples(gram), seed=root)
    tell(f"estimate: sigma={pilot.sigma:.4g}")
    if pilot.add >= 1:
        raise NotCertifiedError(
            f"epsilon={epsilon}: the add direction cannot be bounded near sigma={pilot.sigma:.4g} for delta={delta}; "
            "raise epsilon, use a strategy with more correlation, or cyclic Poisson sampling"
        )
    start = time.perf_counter()
    sigma, failed = 0.0, NotCertifiedError("no attempt was made")
    for attempt in range(1, _MOST_ATTEMPTS):
        left = seconds - (time.perf_counter() - start)
        share = FAILURE * delta / 2.0**attempt / 2
        chosen = choose(gram, pilot, epsilon, delta, _USED * left, share, seed=root, workers=workers)
        if chosen is None:
            break
        # After a failure, by what is missing, and a little; never by less than the plan for this attempt says.
        missing = math.log(max(failed.remove, failed.add) / delta) if math.isfinite(failed.remove) else 0.0
        sigma = max(chosen.sigma, sigma * math.exp(max(missing, 0.0) / abs(pilot.slope) + 0.002))
        tell(f"attempt {attempt}: sigma={sigma:.5g}, {chosen.samples} samples, about {chosen.seconds:.0f} s")
        try:
            return certify(
                gram,
                sigma,
                epsilon,
                delta,
                length=pilot.tilt.length,
                samples=chosen.samples,
                rate=chosen.rate,
                add_samples=chosen.add_samples,
                add_rate=chosen.add_rate,
                seed=root + (attempt << 120),
                attempt=attempt,
                workers=workers,
            )
        except NotCertifiedError as missed:
            failed = missed
    raise NotCertifiedError(
        f"seconds={seconds:g}: not enough to certify epsilon={epsilon}, delta={delta} with cycle={len(gram)}; "
        f"give more seconds or raise delta ({failed})",
        failed.remove,
        failed.add,
    )


@dataclass(frozen=True)
class Choice:
    """What to certify, and how long it takes."""

    sigma: float
    samples: int
    rate: float
    add_samples: int
    add_rate: float
    margin: float  # of delta, luck included
    seconds: float


def choose(
    gram: FloatArray,
    pilot: Estimate,
    epsilon: float,
    delta: float,
    seconds: float,
    share: float,
    *,
    seed: int = 0,
    workers: int | None = None,
) -> Choice | None:
    """As many samples as a margin of 5 percent of delta needs, or as there are seconds for; None for hardly any."""
    loss, allowed = raised_loss(gram, pilot.sigma), delta * (1 - FAILURE)
    adding = added(loss, epsilon)
    assert adding is not None
    start = time.perf_counter()
    removing = removed(loss, epsilon, pilot.tilt)
    rows = _pilot_samples(gram)
    shown = _draws(removing, rows, loss, seed)
    add_shown = _draws(adding, rows, loss, seed)
    pace = (time.perf_counter() - start) / rows / (workers or 1)
    most = min(int(seconds / pace), most_samples(len(gram), pilot.tilt.length))
    if most < _LEAST:
        return None
    samples, rate, margin = _margin(shown, removing.bound, most, share)
    aim = allowed / (1 + margin)
    rise = math.log(delta / aim) / abs(pilot.slope) + _PILOT_LUCK * pilot.relative_standard_error
    add_samples, add_rate = 0, 0.0
    if adding.bound * math.exp(-abs(pilot.slope) * rise / 2) > allowed:  # its own slope is no less than half of that
        room = allowed / max(float(add_shown.mean()) * aim / delta, 1e-3 * allowed) - 1
        add_samples, add_rate, _ = _margin(add_shown, adding.bound, most, share, max(room, 0.02))
    return Choice(
        pilot.sigma * math.exp(rise), samples, rate, add_samples, add_rate, margin, pace * max(samples, add_samples)
    )


def _margin(
    shown: FloatArray, bound: float, most: int, share: float, wanted: float = _MARGIN
) -> tuple[int, float, float]:
    """Samples for this margin of the upper bound above the mean, luck included; the rate, and the margin they have."""
    mean, deviation = float(shown.mean()), float(shown.std())
    count = _LEAST
    while True:
        rate, upper = best_rate(shown, bound, count, share)
        margin = upper / mean - 1 + LUCK * deviation / mean / math.sqrt(count)
        if margin <= wanted or count >= most:
            return count, rate, margin
        count = min(int(1.2 * count), most)


def _draws(of: Samples, rows: int, loss: PrivacyLoss, seed: int) -> FloatArray:
    piece = max(32, 2**14 // loss.cycle)
    with one_thread(loss.cycle):
        return np.concatenate([of.draw(generator(seed, PILOT, chunk), piece) for chunk in range(-(-rows // piece))])


def _pilot_samples(gram: FloatArray) -> int:
    """Fewer where each takes longer."""
    return min(max(2**19 // len(gram), 2**9), 2**13)
