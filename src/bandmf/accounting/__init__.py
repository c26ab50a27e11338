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

import math
from functools import partial

from bandmf import _check
from bandmf.accounting import accountant
from bandmf.accounting.cache import cached
from bandmf.accounting.calibrate import calibrate
from bandmf.accounting.events import ADJACENCIES, MAX_EPSILON, MIN_EPSILON, Event, capped, checked_delta

__all__ = ["ADJACENCIES", "Event", "calibrated", "confirmed", "epsilon", "noise_multiplier", "spent"]


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
    """The smallest noise multiplier that meets (epsilon, delta) over `rounds` Poisson-sampled rounds.

    `sampling_probability=1` means no amplification: `rounds` releases of the Gaussian mechanism.
    `max_batch_size` caps a batch: of a larger sample a random subset of that size is used. What the cap costs
    depends on `examples`, how many examples a round samples *from* (with b bands, the size of one of the b
    parts of the data). Under "add-remove" the neighbor with `examples + 1` of them is counted too.

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
    events = _events(sampling_probability, rounds, adjacency, max_batch_size, examples)
    return max(calibrated(event, epsilon, delta) for event in events)


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
    """The epsilon that `rounds` Poisson-sampled rounds with this noise multiplier spend at `delta`.

    An upper bound, with the arguments and guarantees of `noise_multiplier`; infinite above 200. A release
    with noise of standard deviation s and sensitivity c, whatever the strategy, costs
    `epsilon(s / c, delta, 1.0, 1)`: what a run with known participations has spent.

    >>> round(epsilon(3.0, 1e-6, 0.1, 512), 4)
    3.7697
    """
    events = _events(sampling_probability, rounds, adjacency, max_batch_size, examples)
    return max(spent(event, noise_multiplier, delta) for event in events)


def _events(
    q: float, rounds: int, adjacency: str, max_batch_size: int | None, examples: int | None
) -> tuple[Event, ...]:
    """The events of rounds whose batches are cut to `max_batch_size`, if at all; the worst one counts."""
    checked = Event(q, rounds, adjacency, max_batch_size, examples)
    return capped(checked, max_batch_size, () if examples is None else (int(examples),))


def calibrated(event: Event, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier with which this event meets (epsilon, delta).

    >>> event = Event(sampling_probability=0.01, rounds=1000)
    >>> round(calibrated(event, epsilon=4.0, delta=1e-6), 3)
    0.779
    """
    target, delta = checked_epsilon(epsilon), checked_delta(delta, event)
    sampled_ever = -math.expm1(event.rounds * math.log1p(-min(event.sampling_probability, 1 - 1e-16)))
    if delta >= sampled_ever:
        raise _check.fail(
            "delta",
            delta,
            f"must be below {sampled_ever:g}, the probability that an example is sampled at all",
            "lower delta: this budget would be met without any noise",
        )
    verdict_on = partial(_verdict, event, delta)
    search = partial(calibrate, event, delta, target, verdict_on)
    return cached("noise_multiplier", event, delta, target, search)


def spent(event: Event, noise_multiplier: float, delta: float) -> float:
    """The epsilon of this event with this noise multiplier, at `delta`.

    >>> round(spent(Event(sampling_probability=0.01, rounds=1000), noise_multiplier=1.0, delta=1e-6), 3)
    2.125
    """
    return _verdict(event, checked_delta(delta, event), _checked_noise(noise_multiplier))


def confirmed(event: Event, noise_multiplier: float, delta: float) -> float:
    """The same, computed by the accountant in this process: no answer on disk is believed."""
    return accountant.evaluate(event, checked_delta(delta, event), _checked_noise(noise_multiplier))


def _checked_noise(noise_multiplier: float) -> float:
    remedy = "without noise there is no privacy to account for"
    return _check.real("noise_multiplier", noise_multiplier, 0, 1e12, open_low=True, remedy=remedy)


def _verdict(event: Event, delta: float, sigma: float) -> float:
    """What the accountant says, once for all processes."""
    return cached("epsilon", event, delta, sigma, partial(accountant.evaluate, event, delta, sigma))


def checked_epsilon(epsilon: float) -> float:
    """`epsilon`, if it is one that means something and can be certified."""
    remedy = "a larger epsilon protects nothing, a smaller one cannot be certified"
    return _check.real("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON, remedy=remedy)
