"""From (epsilon, delta) to a certified sigma, within a time budget: estimate, aim a little below delta, certify.

The upper bound of a certificate is above the mean of its samples by a margin that falls with their number. So
the search aims at the divergence that leaves room for this margin, for bad luck and for `failure`: .94 of delta
where there is time for it, less (a larger sigma) where there is not. One percent of sigma is a quarter of delta.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable

from bandmf import _check
from bandmf.accounting.bins.certificate import Certificate, certify, most_samples
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import add_sums, seconds_per_sample
from bandmf.accounting.bins.estimate import Estimate, estimate
from bandmf.accounting.bins.half_space import half_space
from bandmf.accounting.bins.long import Gram, checked, law_of
from bandmf.accounting.certified import FAILURE, NotCertifiedError, margin, samples_with

_AIM = 0.94  # of delta
_USED = 0.8  # of the time that is left: the rest is for another attempt
_LEAST = 2_000  # samples
_PILOT_LUCK = 1.5  # standard errors of the pilot
_MOST_ATTEMPTS = 20


def calibrate(
    gram: Gram,
    epsilon: float,
    delta: float,
    *,
    seconds: float = 30.0,
    seed: int | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """A certificate with a sigma that is close to the least one; NotCertifiedError where the time does not suffice.

    With more `seconds` than needed for .94 of delta, the rest is not used; the estimate that comes first takes its
    own time. `seed` is for tests; by default it is drawn afresh, as every attempt needs. `progress` is told, in
    words, what happens.

    Compare strategies by `estimate` and certify the one that was chosen: the best of m certificates has m times
    the probability of failure.

    >>> import numpy as np
    >>> certificate = calibrate(np.array([[1.0]]), 1.0, 1e-6)  # one position: the Gaussian mechanism has 4.2247
    >>> 4.2247 < certificate.sigma < 4.27, certificate.delta
    (True, 1e-06)
    """
    gram = checked(gram)
    seconds = _check.real("seconds", seconds, 0, open_low=True)
    root = secrets.randbits(120) if seed is None else _check.whole("seed", seed, 0, 2**120 - 1)
    tell = progress or (lambda text: None)
    pilot = estimate(gram, epsilon, delta, samples=_pilot_samples(gram), seed=root)
    tell(f"estimate: sigma={pilot.sigma:.4g}")
    if pilot.add >= 1:
        raise _no_half_space(gram, pilot.sigma, epsilon, delta)
    start = time.perf_counter()
    pace, add_pace = seconds_per_sample(Copies(law_of(gram).at(pilot.sigma), pilot.pilot.copies), epsilon, workers)
    sigma, failed = 0.0, NotCertifiedError("no attempt was made")
    for attempt in range(1, _MOST_ATTEMPTS):
        left = seconds - (time.perf_counter() - start)
        most = min(int(_USED * left / (pace + add_pace)), most_samples(len(gram)))
        if most < _LEAST:
            break
        log_term = math.log(1 / (FAILURE * delta / 2.0**attempt / 2))
        aimed, samples, add_samples = _aim(gram, pilot, epsilon, delta, most, log_term)
        # After a failure, by what is missing, and a little; never by less than the plan for this attempt says.
        missing = math.log(max(failed.remove, failed.add) / delta) if math.isfinite(failed.remove) else 0.0
        sigma = max(aimed, sigma * math.exp(max(missing, 0.0) / abs(pilot.slope) + 0.002))
        takes = samples * pace + add_samples * add_pace
        tell(f"attempt {attempt}: sigma={sigma:.5g}, {samples} samples, about {takes:.0f} s")
        try:
            return certify(
                gram,
                sigma,
                epsilon,
                delta,
                copies=pilot.pilot.copies,
                samples=samples,
                add_samples=add_samples,
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


def _pilot_samples(gram: Gram) -> int:
    """Fewer where each takes longer: a second or so at 128 positions, half a minute at 2048."""
    return min(max(2**21 // len(gram), 2**10), 2**14)


def _aim(
    gram: Gram, pilot: Estimate, epsilon: float, delta: float, most: int, log_term: float
) -> tuple[float, int, int]:
    """Sigma to certify, and samples for both directions."""
    shown, allowed = pilot.pilot, delta * (1 - FAILURE)
    wanted = shown.margin_samples(allowed / (_AIM * delta) - 1, log_term)
    samples = min(max(int(wanted), _LEAST), most)
    aim = max(allowed / (1 + margin(shown.relative_variance, shown.relative_bound, log_term, samples)), 1e-3 * delta)
    rise = math.log(delta / aim) / abs(pilot.slope) + _PILOT_LUCK * pilot.relative_standard_error
    sigma = pilot.sigma * math.exp(rise)
    return sigma, samples, _add_samples(gram, sigma, epsilon, allowed, samples, log_term)


def _add_samples(gram: Gram, sigma: float, epsilon: float, allowed: float, most: int, log_term: float) -> int:
    """Samples that show the add direction to be below what is allowed; 0 where that needs none."""
    loss = law_of(gram).at(sigma)
    side = half_space(loss, epsilon)
    if side is None or side.deterministic_bound() <= allowed:
        return 0
    sampled = add_sums(loss, epsilon, _pilot_samples(gram), 0)
    assert sampled is not None
    sums, bound = sampled
    mean = max(sums.mean, 1e-3 * allowed)
    room = max(allowed / mean - 1, 0.01)
    needed = samples_with((math.sqrt(sums.variance) / mean) ** 2, bound / mean, room, log_term)
    return min(max(int(1.5 * needed), _LEAST), most)


def _no_half_space(gram: Gram, sigma: float, epsilon: float, delta: float) -> NotCertifiedError:
    contribution = (law_of(gram).scale / sigma) ** 2
    return NotCertifiedError(
        f"epsilon={epsilon}: the add direction cannot be bounded near sigma={sigma:.4g} for delta={delta}, since "
        f"an example's contribution {contribution:.3g} is above 2 epsilon; raise epsilon, use a strategy "
        "with more correlation, or cyclic Poisson sampling"
    )
