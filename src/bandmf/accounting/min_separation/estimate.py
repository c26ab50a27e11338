"""Sigma by Monte Carlo, with its standard error. An estimate proves nothing; `calibrate` certifies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from bandmf import _check
from bandmf.accounting.events import MAX_EPSILON, MIN_EPSILON
from bandmf.accounting.min_separation.copies import MAX_COPIES, Copies, TooLittleNoiseError, most_copies
from bandmf.accounting.min_separation.divergences import ESTIMATE, PILOT, add_sums, best_copies, remove_sums
from bandmf.accounting.min_separation.half_space import closed_bound, log_never
from bandmf.accounting.min_separation.loss import Loss, privacy_loss
from bandmf.accounting.sampled_root import RELIABLE, approach, not_found, solve
from bandmf.accounting.samples import Sums
from bandmf.strategies.base import Strategy

_BOUND_OVER_DELTA = 30.0  # about, for the best number of copies
_FEW = 4  # copies, for a first look
_BELOW = 0.95  # of sigma: copies must serve there, too, as their moments soar while sigma falls
_ROUGH = (2**10, 2**12, 2**15)  # samples: more where fewer show nothing


@dataclass(frozen=True)
class Estimate:
    """Sigma at which the larger divergence is delta, as sampled."""

    sigma: float
    relative_standard_error: float
    slope: float  # of log delta over log sigma
    copies: int  # of the proposal
    relative_variance: float  # of its weights, and their bound: over delta^2 and delta
    relative_bound: float
    add: float  # the add divergence there; 1 where no half space bounds it


def estimate_sigma(
    strategy: Strategy,
    separation: int,
    probability: float,
    epsilon: float,
    delta: float,
    *,
    samples: int = 2**13,
    seed: int = 0,
    workers: int | None = None,
) -> Estimate:
    """The deviation of z at which b-min-sep sampling (warm start) with this strategy spends (epsilon, delta).

    >>> from bandmf.strategies import Identity
    >>> found = estimate_sigma(Identity(8), 1, 1.0, 1.0, 1e-6)  # always: sqrt(8) times the Gaussian mechanism's 4.2247
    >>> abs(found.sigma / (4.2247 * 8**0.5) - 1) < 4 * found.relative_standard_error < 0.01
    True
    """
    epsilon = _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON)
    delta = _check.real("delta", delta, 1e-15, 1, open_high=True)
    samples = _check.whole("samples", samples, 64)
    law = partial(privacy_loss, strategy, separation=separation, probability=probability)
    first = law(sigma=strategy.largest_column_norm())
    taking_part = -math.expm1(log_never(first))
    if delta >= taking_part:
        remedy = "lower delta: this budget would be met without any noise"
        raise _check.fail("delta", delta, f"must be below {taking_part:g}, the probability of taking part", remedy)
    try:
        return _estimate(law, strategy.largest_column_norm(), epsilon, delta, samples, seed, workers)
    except (ArithmeticError, TooLittleNoiseError):
        raise not_found(delta) from None


def _estimate(
    law: partial[Loss], norm: float, epsilon: float, delta: float, samples: int, seed: int, workers: int | None
) -> Estimate:
    sigma, copies = _tuned(law, norm, epsilon, delta, seed)

    def remove(sigma: float, samples: int) -> Sums:
        return remove_sums(Copies(law(sigma=sigma), copies), epsilon, samples, seed, workers, ESTIMATE)

    def add(sigma: float, samples: int) -> Sums:
        return _added(law(sigma=sigma), epsilon, samples, seed, workers)

    sigma, sums, slope = solve(remove, sigma, delta, samples)
    bound = Copies(law(sigma=sigma), copies).bound(epsilon)
    variance, bound = sums.relative_variance, bound / sums.mean
    added = add(sigma, samples).mean
    if delta < added < 1:  # never seen, but not excluded
        sigma, sums, slope = solve(add, sigma, delta, samples)
    error = sums.standard_error / sums.mean / abs(slope)
    return Estimate(sigma, error, slope, copies, variance, bound, added)


def _added(loss: Loss, epsilon: float, samples: int, seed: int, workers: int | None) -> Sums:
    if closed_bound(loss, epsilon) == 0:
        return Sums(samples, 0.0, 0.0, 0.0)
    sampled = add_sums(loss, epsilon, samples, seed, workers, ESTIMATE)
    return Sums(samples, samples, samples, 1.0) if sampled is None else sampled[0]


def _tuned(law: partial[Loss], norm: float, epsilon: float, delta: float, seed: int) -> tuple[float, int]:
    """A sigma near the solution, and a number of copies that suits it."""

    def look(sigma: float) -> tuple[float, int]:
        copies = best_copies(law(sigma=_BELOW * sigma), epsilon).copies
        proposal = Copies(law(sigma=sigma), copies)
        for rough in _ROUGH:
            sums = remove_sums(proposal, epsilon, rough, seed, stream=PILOT)
            if sums.mean > RELIABLE * sums.standard_error:
                return sums.mean, copies
        if (most := proposal.bound(epsilon)) < delta:  # certainly too much noise
            return most, copies
        raise not_found(delta, sigma, rough)

    return approach(look, _guess(law, norm, epsilon, delta), delta)


def _guess(law: partial[Loss], norm: float, epsilon: float, delta: float) -> float:
    """Where the least bound on the weights is about thirty times delta: bisection, no sampling.

    A few copies are computed, more are guessed: log M_q is about proportional to q (q - 1).
    """
    more = np.arange(_FEW, MAX_COPIES + 1.0)
    peaks = (more - 1) * np.log(more - 1) - more * np.log(more) - (more - 1) * epsilon
    low, high = math.log(norm / 8), math.log(norm) + 12
    for _ in range(16):
        middle = (low + high) / 2
        try:
            loss = law(sigma=math.exp(middle))
            few = [Copies(loss, q) for q in range(2, min(_FEW, most_copies(loss.separation, loss.steps)) + 1)]
            guessed = few[-1].log_moment / (few[-1].copies * (few[-1].copies - 1)) * more * (more - 1) + peaks
            least = min(float(guessed.min()), *(math.log(some.bound(epsilon)) for some in few))
        except (ValueError, ArithmeticError):  # overflow
            least = math.inf
        low, high = (middle, high) if least > math.log(_BOUND_OVER_DELTA * delta) else (low, middle)
    return math.exp(high)
