"""Sigma by Monte Carlo, with its standard error; and how delta depends on every inner product of columns.

Samples drawn for one sigma serve others near it: x stays, and only L is computed again. So a few looks, each at three
sigmas at once, lead to the solution along a smooth curve.

An estimate proves nothing; `calibrate` certifies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.loss import log_removed
from bandmf.accounting.events import MAX_EPSILON, MIN_EPSILON
from bandmf.accounting.min_separation.copies import TooLittleNoiseError
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.divergences import ESTIMATE, POSTERIOR, add_sums, best_copies, width
from bandmf.accounting.redrawn.loss import Loss, privacy_loss
from bandmf.accounting.sampled_root import RELIABLE, not_found, solve
from bandmf.accounting.samples import Sums, generator, over_chunks
from bandmf.error.threads import one_thread
from bandmf.strategies.base import Strategy

_BOUND_OVER_DELTA = 12.0  # about, for the best number of copies
_STEP = 0.02  # of log sigma, between the sigmas of a look
_ROUGH = (2**10, 2**13, 2**16)  # samples of a first look: more where fewer show nothing
_SHOWN = 300.0  # times delta: with no larger a bound, that many samples show whether there is too much noise
_LOOKS = 24
_SLOPE, _JUMP = -25.0, 0.5  # of the bound over log sigma, until there are two points; a step where there is none
_NEAR = 0.5  # of its logarithm
_BACK = 0.04  # step of log sigma where nothing is shown
_FARTHEST = 0.2  # step between two looks
_WINDOW = 0.15  # of log L around epsilon, for the posterior there
_CLOSE, _WIDEST = 30, 100.0  # samples in it, and where to stop widening it

Law = Callable[[float], Loss]


@dataclass(frozen=True, eq=False)
class Estimate:
    """Sigma at which the larger divergence is delta, as sampled.

    `posterior` (on request) is T[s, r] = E[p_s p_{s+r} | L = e^epsilon], p_s the posterior probability that the example
    takes part in step s: the derivative of delta by <c_s, c_{s+r}> is proportional to it (twice for r > 0), so locally
    sigma^2 is proportional to the sum of T C'C over all pairs of steps, |C| for C.
    """

    sigma: float
    relative_standard_error: float
    slope: float  # of log delta over log sigma
    copies: int  # of the proposal
    relative_variance: float  # of its weights, and their bound: over delta^2 and delta
    relative_bound: float
    add: float  # the add divergence there; 1 where no half space bounds it
    posterior: FloatArray | None = None


@dataclass(frozen=True)
class _Look:
    """What samples for one sigma showed."""

    sigma: float
    copies: Copies
    sums: tuple[Sums, Sums, Sums]  # at sigma e^-STEP, sigma, sigma e^STEP

    def shown(self) -> bool:
        return all(sums.mean > RELIABLE * sums.standard_error for sums in self.sums)

    def root(self, delta: float) -> tuple[float, float]:
        """The step of log sigma to where delta is met, and the slope there: a parabola through three points."""
        low, middle, high = (math.log(sums.mean / delta) for sums in self.sums)
        slope, bend = (high - low) / (2 * _STEP), (high - 2 * middle + low) / _STEP**2
        step = -middle / slope
        for _ in range(8):
            step = -middle / (slope + bend * step / 2) if abs(bend * step) < abs(slope) else -middle / slope
        return step, slope + bend * step if abs(step) < 2 * _STEP else slope


def estimate(
    strategy: Strategy,
    cycle: int,
    epsilon: float,
    delta: float,
    *,
    samples: int = 2**14,
    seed: int = 0,
    posterior: bool = False,
    workers: int | None = None,
) -> Estimate:
    """The deviation of z at which bins redrawn every `cycle` steps, with this strategy, spend (epsilon, delta).

    >>> from bandmf.strategies import Identity
    >>> found = estimate(Identity(8), 1, 1.0, 1e-6, samples=2**12)  # no choice: sqrt(8) times the Gaussian's 4.2247
    >>> abs(found.sigma / (4.2247 * 8**0.5) - 1) < 4 * found.relative_standard_error < 0.01
    True
    """
    epsilon = _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON)
    delta = _check.real("delta", delta, 1e-15, 1, open_high=True)
    samples = _check.whole("samples", samples, 64)
    norm = strategy.largest_column_norm()
    privacy_loss(strategy, norm, cycle)  # what is wrong with the arguments is said here

    def law(sigma: float) -> Loss:
        return privacy_loss(strategy, sigma, cycle)

    with one_thread(cycle):
        return _estimate(law, norm, epsilon, delta, samples, seed, posterior, workers)


def _estimate(
    law: Law, norm: float, epsilon: float, delta: float, samples: int, seed: int, posterior: bool, workers: int | None
) -> Estimate:
    sigma, copies = _guess(law, norm, epsilon, delta)
    last = False
    for look_number in range(_LOOKS):
        look = _looked(law, sigma, epsilon, delta, copies, samples if last else 0, seed, workers)
        if look is None:
            last, sigma = False, sigma * math.exp(-_BACK)
            continue
        copies, (step, slope) = look.copies.copies, look.root(delta)
        if last and abs(step) < 1.5 * _STEP:
            break
        last = abs(step) < _STEP or look_number > _LOOKS // 2
        sigma *= math.exp(min(max(step, -_FARTHEST), _FARTHEST))
    else:
        raise not_found(delta, sigma, samples)
    sums, sigma = look.sums[1], sigma * math.exp(step)
    loss = law(sigma)
    bound = Copies(loss, copies).bound(epsilon) / delta
    variance = sums.relative_variance
    added = add_sums(loss, epsilon, samples, seed, workers, ESTIMATE)
    if added is not None and added[0].mean > delta:  # never seen, but not excluded
        sigma, sums, slope = solve(
            lambda s, count: _added(law(s), epsilon, count, seed, workers), sigma, delta, samples
        )
        added = sums, added[1]
    error = sums.standard_error / sums.mean / abs(slope)
    T = _posterior(law(sigma), copies, epsilon, delta, samples, seed) if posterior else None
    return Estimate(sigma, error, slope, copies, variance, bound, 1.0 if added is None else added[0].mean, T)


def _added(loss: Loss, epsilon: float, samples: int, seed: int, workers: int | None) -> Sums:
    sampled = add_sums(loss, epsilon, samples, seed, workers, ESTIMATE)
    return Sums(samples, samples, samples, 1.0) if sampled is None else sampled[0]


def _guess(law: Law, norm: float, epsilon: float, delta: float) -> tuple[float, int]:
    """Where the least bound on the weights is about ten times delta, and its number of copies: no sampling."""
    copies = 2

    def excess(log_sigma: float) -> float:
        nonlocal copies
        try:
            found = best_copies(law(math.exp(log_sigma)), epsilon, copies)
        except (TooLittleNoiseError, ValueError):  # a column is too long
            return math.inf
        copies = found.copies
        return math.log(found.bound(epsilon) / (_BOUND_OVER_DELTA * delta))

    low, high, x = -math.inf, math.inf, math.log(norm)
    slope, before = _SLOPE, (x, math.inf)
    for _ in range(_LOOKS):
        value = excess(x)
        if abs(value) < _NEAR or high - low < _STEP:
            break
        low, high = (x, high) if value > 0 else (low, x)
        if math.isfinite(before[1]) and math.isfinite(value) and abs(x - before[0]) > 1e-3:
            slope = min(max((value - before[1]) / (x - before[0]), -100.0), -5.0)
        before = x, value
        x = x - value / slope if math.isfinite(value) else x + _JUMP
        if not low < x < high:
            x = (low + high) / 2
    else:
        raise not_found(delta)
    return math.exp(x), copies


def _looked(
    law: Law, sigma: float, epsilon: float, delta: float, copies: int, samples: int, seed: int, workers: int | None
) -> _Look | None:
    """A look at sigma with so many samples; with 0, as few as show something; None where there is too much noise."""
    proposal = best_copies(law(sigma), epsilon, copies)
    for count in (samples, *_ROUGH):
        if count >= max(samples, _ROUGH[0]):
            look = _Look(sigma, proposal, _curve(law, sigma, epsilon, proposal, count, seed, workers))
            if look.shown():
                return look
    if proposal.bound(epsilon) > _SHOWN * delta:
        raise not_found(delta, sigma, count)
    return None


def _curve(
    law: Law, sigma: float, epsilon: float, proposal: Copies, samples: int, seed: int, workers: int | None
) -> tuple[Sums, Sums, Sums]:
    """The remove divergence at three sigmas, from the same samples, drawn for the middle one."""
    ratios = [math.exp(-_STEP), 1.0, math.exp(_STEP)]
    losses = [law(sigma * ratio) for ratio in ratios]

    def draw(own: np.random.Generator, rows: int) -> FloatArray:
        kept, _, means = proposal.draw(own, rows)
        noise, result = proposal.noise(own, len(kept)), np.zeros((3, rows))
        for products in (means - noise, means + noise):
            logs = [loss.log_likelihoods(products / ratio) for loss, ratio in zip(losses, ratios, strict=True)]
            for weights, log_likelihoods in zip(result, logs, strict=True):
                scaled = log_removed(log_likelihoods, epsilon) + proposal.log_scale - proposal.copies * logs[1]
                weights[kept] += np.exp(scaled) / 2
        return result

    def one(parts: FloatArray) -> FloatArray:
        return np.array([parts.sum(axis=1), np.square(parts).sum(axis=1), parts.max(axis=1)])

    chunks = np.array(over_chunks(draw, one, samples, width(proposal.loss), seed, ESTIMATE, workers))
    totals, squares, largest = chunks[:, 0].sum(axis=0), chunks[:, 1].sum(axis=0), chunks[:, 2].max(axis=0)
    parts = zip(totals.tolist(), squares.tolist(), largest.tolist(), strict=True)
    low, middle, high = (Sums(samples, total, square, most) for total, square, most in parts)
    return low, middle, high


def _posterior(loss: Loss, copies: int, epsilon: float, delta: float, samples: int, seed: int) -> FloatArray:
    """T, from the samples with log L close to epsilon; where few are close, those not so close count, too.

    Copies have the density L^q: in a narrow window it is the same for all.
    """
    proposal, window = Copies(loss, copies), _WINDOW
    rows = 2**14 // width(loss)
    while True:
        T, close = np.zeros((loss.steps, min(loss.steps, 2 * loss.cycle))), 0
        for chunk in range(-(-samples // rows)):
            own = generator(seed, POSTERIOR, chunk)
            kept, _, means = proposal.draw(own, rows)
            products = means + proposal.noise(own, len(kept))
            near = np.abs(loss.log_likelihoods(products) - epsilon) < window
            if near.any():
                _add_pairs(T, loss.marginals(products[:, near])[1][: loss.steps], loss.cycle)
                close += int(near.sum())
        if close >= min(_CLOSE, samples) or window > _WIDEST:
            if not close:
                raise not_found(delta, None, samples)
            return T / close
        window *= 2


def _add_pairs(T: FloatArray, marginals: FloatArray, cycle: int) -> None:
    """Add the sums of p_s p_{s+r} over the samples to T[s, r]."""
    n, most = T.shape
    for begin in range(0, n, cycle):
        products = marginals[begin : begin + cycle] @ marginals[begin : begin + cycle + most].T
        for j, row in enumerate(products):
            following = row[j : j + most]
            T[begin + j, : len(following)] += following
