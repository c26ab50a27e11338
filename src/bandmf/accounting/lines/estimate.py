"""Sigma by samples of lines, with its standard error; and how delta depends on every entry of the Gram matrix.

An estimate proves nothing; `calibrate` certifies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.gram import checked_gram
from bandmf.accounting.bins.loss import PrivacyLoss
from bandmf.accounting.events import MAX_EPSILON, MIN_EPSILON
from bandmf.accounting.lines.divergences import ESTIMATE, POSTERIOR, Samples, added, removed
from bandmf.accounting.lines.line import Lines, lines, raised_loss
from bandmf.accounting.lines.tilt import Tilt, best_tilt
from bandmf.accounting.sampled_root import solve
from bandmf.accounting.samples import Sums, generator, one_thread, sample_sums


@dataclass(frozen=True, eq=False)
class Estimate:
    """Sigma at which the larger divergence is delta, as sampled.

    `posterior` (on request) is T[i, j] = E[p_i p_j | L = e^epsilon], p the posterior of the position: the
    derivative of delta by G[i, j] is proportional to it, so locally sigma^2 is proportional to sum T G.
    """

    sigma: float
    relative_standard_error: float
    slope: float  # of log delta over log sigma
    tilt: Tilt
    remove: Sums
    add: float  # the add divergence there; 1 where no half space bounds it
    posterior: FloatArray | None = None


def estimate(
    gram: FloatArray, epsilon: float, delta: float, *, samples: int = 2**12, seed: int = 0, posterior: bool = False
) -> Estimate:
    """The deviation of z at which balls-in-bins with this Gram matrix spends (epsilon, delta).

    >>> import numpy as np
    >>> found = estimate(np.array([[1.0]]), 1.0, 1e-6)  # one position: the Gaussian mechanism
    >>> f"{found.sigma:.4f}", found.relative_standard_error < 1e-6
    ('4.2247', True)
    """
    gram = checked_gram(gram)
    epsilon = _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON)
    delta = _check.real("delta", delta, 1e-15, 1, open_high=True)
    samples = _check.whole("samples", samples, 64)
    with one_thread(len(gram)):
        return _estimate(gram, epsilon, delta, samples, seed, posterior)


def _estimate(gram: FloatArray, epsilon: float, delta: float, samples: int, seed: int, posterior: bool) -> Estimate:
    unit = math.sqrt(gram.max())
    loss = raised_loss(gram, unit)
    sigma = unit * _guess(lines(loss), epsilon, delta)
    tilt = best_tilt(lines(_scaled(loss, sigma / unit)), epsilon)

    def mean(of: Samples | None, count: int) -> Sums:
        if of is None:
            return Sums(count, count, count, 1.0)
        return sample_sums(of.draw, count, loss.cycle, seed, ESTIMATE)

    def remove(sigma: float, count: int) -> Sums:
        return mean(removed(_scaled(loss, sigma / unit), epsilon, tilt), count)

    def add(sigma: float, count: int) -> Sums:
        return mean(added(_scaled(loss, sigma / unit), epsilon), count)

    sigma, sums, slope = solve(remove, sigma, delta, samples)
    error, adding = sums.standard_error / sums.mean, add(sigma, samples)
    if delta < adding.mean < 1:  # never seen, but not excluded
        sigma, adding, slope = solve(add, sigma, delta, samples)
        error = adding.standard_error / adding.mean
    T = _posterior(lines(_scaled(loss, sigma / unit)), tilt, epsilon, samples, seed) if posterior else None
    return Estimate(sigma, error / abs(slope), slope, tilt, sums, adding.mean, T)


def _scaled(loss: PrivacyLoss, sigma: float) -> PrivacyLoss:
    """The law of L where noise is `sigma` times as large."""
    squared = sigma**2
    return PrivacyLoss(loss.factor / sigma, loss.K / squared, loss.diagonal / squared, loss.largest / squared)


def _guess(unit: Lines, epsilon: float, delta: float) -> float:
    """Where delta is that of a single line, all v_j = 1: as the divergence is convex in v, less than the solution."""
    one = np.zeros((1, unit.loss.cycle))

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        through = replace(unit, steepness=unit.steepness / sigma, slopes=unit.slopes / sigma)
        return float(through.removed(one, epsilon, 0.0)[0]) - delta

    low, high = -7.0, 12.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(high)


def _posterior(through: Lines, tilt: Tilt, epsilon: float, samples: int, seed: int) -> FloatArray:
    """T, from where the lines cross e^epsilon."""
    rows = max(32, 2**16 // through.loss.cycle)
    T = np.zeros_like(through.loss.K)
    for chunk in range(-(-samples // rows)):
        p, weights = tilt.crossings(through, epsilon, generator(seed, POSTERIOR, chunk), rows)
        T += (p * weights[:, None]).T @ p
    return T / T.sum()
