"""Sigma by Monte Carlo, with its standard error; and how delta depends on every entry of the Gram matrix.

An estimate proves nothing; `calibrate` certifies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins import tuning
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import ESTIMATE, POSTERIOR, add_sums, remove_sums
from bandmf.accounting.bins.long import Gram, LongGram, LongLaw, checked, law_of
from bandmf.accounting.bins.loss import Law
from bandmf.accounting.bins.tuning import Pilot
from bandmf.accounting.events import MAX_EPSILON, MIN_EPSILON
from bandmf.accounting.sampled_root import RELIABLE, approach, not_found, solve
from bandmf.accounting.samples import Sums, generator
from bandmf.error.threads import one_thread

_ROUGH = (2**10, 2**13, 2**15)  # samples of a first look: more where fewer show nothing
_FAR = 2.0  # times less noise than the first guess: where samples show nothing there either, they never do
_BOUND_OVER_DELTA = 50.0  # about, for the least bound
_WINDOW = 0.1  # of log L around epsilon, for the posterior there
_CLOSE, _WIDEST = 30.0, 100.0  # samples in it, and where to stop widening it


@dataclass(frozen=True, eq=False)
class Estimate:
    """Sigma at which the larger divergence is delta, as sampled.

    `posterior` (on request) is T[i, j] = E[p_i p_j | L = e^epsilon], p the posterior of the position: the
    derivative of delta by G[i, j] is proportional to it, so locally sigma^2 is proportional to sum T G.
    """

    sigma: float
    relative_standard_error: float
    slope: float  # of log delta over log sigma
    pilot: Pilot
    add: float  # the add divergence there; 1 where no half space bounds it
    posterior: FloatArray | None = None


def estimate(
    gram: Gram, epsilon: float, delta: float, *, samples: int = 2**14, seed: int = 0, posterior: bool = False
) -> Estimate:
    """The deviation of z at which balls-in-bins with this Gram matrix spends (epsilon, delta).

    >>> import numpy as np
    >>> found = estimate(np.array([[1.0]]), 1.0, 1e-6)  # one position: the Gaussian mechanism has 4.2247
    >>> abs(found.sigma / 4.2247 - 1) < 4 * found.relative_standard_error < 0.01
    True
    """
    gram = checked(gram)
    if posterior and isinstance(gram, LongGram):
        raise _check.fail("posterior", posterior, "is for Gram matrices that are written out", "use gram_matrix")
    epsilon = _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON)
    delta = _check.real("delta", delta, 1e-15, 1, open_high=True)
    samples = _check.whole("samples", samples, 64)
    with one_thread(len(gram)):
        return _estimate(law_of(gram), epsilon, delta, samples, seed, posterior)


def _estimate(law: Law | LongLaw, epsilon: float, delta: float, samples: int, seed: int, posterior: bool) -> Estimate:
    sigma, pilot = _tuned(law, epsilon, delta, seed)

    def remove(sigma: float, samples: int) -> Sums:
        return remove_sums(Copies(law.at(sigma), pilot.copies), epsilon, samples, seed, stream=ESTIMATE)

    def add(sigma: float, samples: int) -> Sums:
        sampled = add_sums(law.at(sigma), epsilon, samples, seed, stream=ESTIMATE)
        return Sums(samples, samples, samples, 1.0) if sampled is None else sampled[0]

    sigma, sums, slope = solve(remove, sigma, delta, samples)
    bound = Copies(law.at(sigma), pilot.copies).bound(epsilon)
    pilot = Pilot(pilot.copies, sums.mean, sums.relative_variance, bound / sums.mean)
    added = add(sigma, samples).mean
    if delta < added < 1:  # never seen, but not excluded
        sigma, sums, slope = solve(add, sigma, delta, samples)
        added = sums.mean
    T = _posterior(Copies(law.at(sigma), pilot.copies), epsilon, delta, samples, seed) if posterior else None
    error = sums.standard_error / sums.mean / abs(slope)
    return Estimate(sigma, error, slope, pilot, added, T)


def _tuned(law: Law | LongLaw, epsilon: float, delta: float, seed: int) -> tuple[float, Pilot]:
    """A sigma near the solution, and the copies that suit it."""

    def look(sigma: float) -> tuple[float, Pilot]:
        for rough in _ROUGH:
            pilot = tuning.tune(law.at(sigma), epsilon, rough, seed)
            if pilot.mean > 0 and pilot.relative_variance < rough / RELIABLE**2:
                return pilot.mean, pilot
        if sigma < first / _FAR:
            raise not_found(delta, sigma, rough)
        return 0.0, pilot  # a few samples decide: L > e^epsilon is too rare, and less so with less noise

    first = _guess(law, epsilon, delta)
    return approach(look, first, delta)


def _guess(law: Law | LongLaw, epsilon: float, delta: float) -> float:
    """Where the least bound on the weights is some ten times delta: bisection on a log scale, no sampling."""
    scale = law.scale
    one = law.at(scale)
    rows, shared = one.rows(), one.shared

    def excess(log_sigma: float) -> float:
        less = math.exp(2 * (math.log(scale) - log_sigma))
        least = float(tuning.log_bounds(rows * less, epsilon, shared * less).min())
        return least - math.log(_BOUND_OVER_DELTA * delta)

    middle = math.log(scale)
    low, high = middle - 4, middle + 12
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(high)


def _posterior(copies: Copies, epsilon: float, delta: float, samples: int, seed: int) -> FloatArray:
    """T, from samples with log L close to epsilon; where few are close, those not so close count, too."""
    width, rows = _WINDOW, max(32, 2**16 // copies.loss.cycle)
    while True:
        T, total, squares = np.zeros((copies.loss.cycle, copies.loss.cycle)), 0.0, 0.0
        for chunk in range(-(-samples // rows)):
            p, weights = copies.near(epsilon, width, generator(seed, POSTERIOR, chunk), rows)
            T += (p * weights[:, None]).T @ p
            total, squares = total + float(weights.sum()), squares + float(np.square(weights).sum())
        enough = total**2 > _CLOSE * squares  # as many samples, if all had the same weight
        if enough or width > _WIDEST:
            if not T.sum() > 0:  # weights that all vanish
                raise not_found(delta, None, samples)
            return T / T.sum()
        width *= 2
