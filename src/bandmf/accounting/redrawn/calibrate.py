"""From (epsilon, delta) to a certified sigma, within a time budget: estimate, aim a little below delta, certify.

The margin between a certificate's bound and the mean of its samples falls with their number. The search aims at the
divergence that leaves room for it, for bad luck and for `failure`: 0.96 of delta where there is time for it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable

from bandmf import _check
from bandmf.accounting.certified import FAILURE, NotCertifiedError, margin, samples_with
from bandmf.accounting.redrawn.certificate import Certificate, certify, most_samples
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.divergences import ESTIMATE, add_sums, closed_add, seconds_per_sample
from bandmf.accounting.redrawn.estimate import Estimate, estimate
from bandmf.accounting.redrawn.loss import Loss, privacy_loss
from bandmf.strategies.base import Strategy

_AIM = 0.96  # of delta
_USED = 0.7  # of the time that is left: the rest is for another attempt
_LEAST = 2_000  # samples
_PILOT_LUCK = 1.5  # standard errors of the estimate
_MOST_ATTEMPTS = 20
_LONG = 10.0  # seconds: with fewer, the estimate has fewer samples, too


def calibrate(
    strategy: Strategy,
    cycle: int,
    epsilon: float,
    delta: float,
    *,
    seconds: float = 30.0,
    seed: int | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """A certificate with a sigma that is close to the least one; NotCertifiedError where the time does not suffice.

    With more `seconds` than needed for .96 of delta, the rest is not used; the estimate that comes first takes its own
    time, too. `seed` is for tests; by default it is drawn afresh, as every attempt needs. `progress` is told, in
    words, what happens.

    Compare strategies by `estimate` and certify the one that was chosen: the best of m certificates has m times
    the probability of failure.

    >>> from bandmf.strategies import Identity
    >>> certificate = calibrate(Identity(8), 1, 1.0, 1e-6, seconds=5)  # sqrt(8) * 4.2247 = 11.949, exactly
    >>> 11.949 < certificate.sigma < 12.2, certificate.delta
    (True, 1e-06)
    """
    seconds = _check.real("seconds", seconds, 0, open_low=True)
    root = secrets.randbits(120) if seed is None else _check.whole("seed", seed, 0, 2**120 - 1)
    tell = progress or (lambda text: None)
    pilot = 2**14 if seconds >= _LONG else 2**12
    found = estimate(strategy, cycle, epsilon, delta, samples=pilot, seed=root, workers=workers)
    tell(f"estimate: sigma={found.sigma:.4g}")
    if found.add >= 1:
        raise NotCertifiedError(
            f"epsilon={epsilon}: the add direction cannot be bounded near sigma={found.sigma:.4g} for delta={delta}; "
            "raise epsilon, use a strategy with more correlation, or cyclic Poisson sampling"
        )
    start = time.perf_counter()
    loss = privacy_loss(strategy, found.sigma, cycle)
    pace, add_pace = seconds_per_sample(Copies(loss, found.copies), epsilon, workers)
    sigma, failed = 0.0, NotCertifiedError("no attempt was made")
    for attempt in range(1, _MOST_ATTEMPTS):
        left = _USED * (seconds - (time.perf_counter() - start))
        most = min(int(left / pace), most_samples(loss.steps, loss.cycle))
        if most < _LEAST:
            break
        aimed, samples = _aim(found, delta, most, log_term := math.log(1 / (FAILURE * delta / 2.0**attempt / 2)))
        # After a failure, by what is missing, and a little; never by less than the plan for this attempt says.
        missing = math.log(max(failed.remove, failed.add) / delta) if math.isfinite(failed.remove) else 0.0
        sigma = max(aimed, sigma * math.exp(max(missing, 0.0) / abs(found.slope) + 0.002))
        add_most = max(int((left - samples * pace) / add_pace), samples)
        add_samples = _add_samples(privacy_loss(strategy, sigma, cycle), epsilon, delta, add_most, log_term)
        takes = samples * pace + add_samples * add_pace
        tell(f"attempt {attempt}: sigma={sigma:.5g}, {samples + add_samples} samples, about {takes:.0f} s")
        try:
            return certify(
                strategy,
                cycle,
                sigma,
                epsilon,
                delta,
                samples=samples,
                seed=root + (attempt << 120),
                copies=found.copies,
                add_samples=add_samples,
                attempt=attempt,
                workers=workers,
            )
        except NotCertifiedError as missed:
            failed = missed
    raise NotCertifiedError(
        f"seconds={seconds:g}: not enough to certify epsilon={epsilon}, delta={delta} with cycle={cycle}; "
        f"give more seconds or raise delta ({failed})",
        failed.remove,
        failed.add,
    )


def _add_samples(loss: Loss, epsilon: float, delta: float, most: int, log_term: float) -> int:
    """Samples that show the add direction to be below what is allowed; 0 where that needs none."""
    allowed = delta * (1 - FAILURE)
    if closed_add(loss, epsilon) <= allowed:
        return 0
    sampled = add_sums(loss, epsilon, 2 * _LEAST, 0, stream=ESTIMATE)
    if sampled is None:
        return 0
    sums, bound = sampled
    mean = max(sums.mean + sums.standard_error, 1e-3 * allowed)
    room = max(allowed / mean - 1, 0.01)
    needed = samples_with((math.sqrt(sums.variance) / mean) ** 2, bound / mean, room, log_term)
    return min(max(int(1.5 * needed), _LEAST), most, most_samples(loss.steps, loss.cycle))


def _aim(found: Estimate, delta: float, most: int, log_term: float) -> tuple[float, int]:
    """Sigma to certify, and samples."""
    allowed = delta * (1 - FAILURE)
    wanted = samples_with(found.relative_variance, found.relative_bound, allowed / (_AIM * delta) - 1, log_term)
    samples = min(max(int(wanted), _LEAST), most)
    aim = max(allowed / (1 + margin(found.relative_variance, found.relative_bound, log_term, samples)), 1e-3 * delta)
    rise = math.log(delta / aim) / abs(found.slope) + _PILOT_LUCK * found.relative_standard_error
    return found.sigma * math.exp(rise), samples
