"""The privacy profile: delta for many epsilons, of one mechanism; and what it says of attacks.

Certified plans: log L is sampled with the example (P) and without it (Q), and for every epsilon of a grid

    remove:  delta = E_P (1 - e^epsilon / L)+,        add:  delta = E_Q (1 - e^epsilon L)+,

are means of the same samples, in [0, 1], with an upper bound for each (samples.upper_bound); all of them hold but for
`failure`, which is added. Deltas that are too small for that are those of the plan's own certificate.

delta is convex in e^epsilon, so between two points the line in e^epsilon is an upper bound. An attack that takes the
example to be present with probability FPR where it is absent does so with probability TPR where it is present, with

    TPR <= e^epsilon FPR + delta,        1 - FPR <= e^epsilon (1 - TPR) + delta    for every epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting import accountant, min_separation
from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.bins.loss import log_mean_exp
from bandmf.accounting.bins.loss import privacy_loss as loss_of_bins
from bandmf.accounting.events import Event
from bandmf.accounting.min_separation.law import start_probabilities
from bandmf.accounting.samples import Sums, generator, upper_bound
from bandmf.error.threads import one_thread
from bandmf.strategies import Strategy

Draw = Callable[[np.random.Generator, int], tuple[FloatArray, FloatArray]]  # log L under P and under Q, and rounding
_ROWS = 2**9  # at once
_STREAM = 97  # of random numbers: no other use of a seed has it


def by_accountant(events: Sequence[Event], sigma: float, delta: float, epsilons: FloatArray) -> FloatArray:
    """Deltas of these events, the worst for each epsilon."""
    return np.max([accountant.deltas(event, delta, sigma, epsilons) for event in events], axis=0)


def by_samples(
    draw: Draw, rounding: float, epsilons: FloatArray, samples: int, seed: int, failure: float
) -> FloatArray:
    """Upper bounds of delta, all right but for `failure`, which they hold."""
    share, pieces = failure / (2 * len(epsilons)), -(-samples // _ROWS)
    sums = np.zeros((2, 3, len(epsilons)))
    with one_thread():
        for piece in range(pieces):
            present, absent = draw(generator(seed, _STREAM, piece), _ROWS)
            for place, log in enumerate((-present, absent)):  # of what e^epsilon is multiplied by
                values = -np.expm1(np.minimum(epsilons[:, None] + log - rounding, 0.0))
                sums[place] += [values.sum(axis=1), np.square(values).sum(axis=1), 0 * epsilons]
                sums[place, 2] = np.maximum(sums[place, 2], values.max(axis=1))
    count = pieces * _ROWS
    bounds = [[upper_bound(Sums(count, *column), 1.0, share) for column in each.T] for each in sums]
    return np.minimum(np.max(bounds, axis=0) + failure, 1.0)


def in_bins(strategy: Strategy, cycle: int, sigma: float) -> tuple[Draw, float]:
    """Of balls-in-bins: log L with and without the example, and its rounding."""
    loss = loss_of_bins(gram_matrix(strategy, cycle), sigma)

    def draw(own: np.random.Generator, rows: int) -> tuple[FloatArray, FloatArray]:
        noise = loss.noise(own, rows)
        moved = noise + loss.K[own.integers(cycle, size=rows)]
        return log_mean_exp(loss.log_terms(moved))[0], log_mean_exp(loss.log_terms(noise))[0]

    return draw, loss.rounding(2.0)


def separated(strategy: Strategy, separation: int, probability: float, sigma: float) -> tuple[Draw, float]:
    """Of b-min-sep."""
    loss = min_separation.privacy_loss(strategy, sigma, separation, probability)

    def draw(own: np.random.Generator, rows: int) -> tuple[FloatArray, FloatArray]:
        noise = own.standard_normal((loss.steps, rows))
        moved = noise + loss.means(_participations(own, loss.steps, rows, separation, probability))
        return loss.log_likelihoods(loss.products(moved)), loss.log_likelihoods(loss.products(noise))

    return draw, loss.rounding(loss.farthest)


def _participations(own: np.random.Generator, steps: int, rows: int, separation: int, probability: float) -> FloatArray:
    """One in every column and step where an example takes part."""
    wait = own.choice(separation, size=rows, p=start_probabilities(separation, probability))
    joined = np.zeros((steps, rows))
    for step in range(steps):
        joined[step] = (wait == 0) & (own.random(rows) < probability)
        wait = np.where(joined[step], separation - 1, np.maximum(wait - 1, 0))
    return joined


def between(table: FloatArray, epsilons: FloatArray) -> FloatArray:
    """Deltas at these epsilons, from a table of epsilons and deltas: on lines in e^epsilon, no further than it goes.

    >>> between(np.array([[0.0, 1.0], [0.2, 0.1]]), np.array([0.0, 0.5, 1.0, 2.0])).round(4)
    array([0.2   , 0.1622, 0.1   , 0.1   ])
    """
    return np.interp(np.expm1(epsilons), np.expm1(table[0]), table[1])


def attack_rates(table: FloatArray, false_positive_rates: FloatArray) -> FloatArray:
    """The largest true positive rates that the table permits."""
    scales, deltas = np.exp(table[0])[:, None], table[1][:, None]
    above, below = scales * false_positive_rates + deltas, 1 - (1 - false_positive_rates - deltas) / scales
    return np.clip(np.minimum(above, below).min(axis=0), false_positive_rates, 1.0)
