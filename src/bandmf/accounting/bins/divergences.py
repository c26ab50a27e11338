"""Samples of the two divergences, and how long they take. Each use of a seed has a stream of its own."""

from __future__ import annotations

import time

from bandmf.accounting.bins.chain import Chain
from bandmf.accounting.bins.half_space import half_space
from bandmf.accounting.bins.loss import PrivacyLoss
from bandmf.accounting.samples import Sums, sample_sums

REMOVE, ADD, PILOT, ESTIMATE, POSTERIOR, CLOCK = range(6)  # streams; certificates use the first two alone


def remove_sums(
    loss: PrivacyLoss,
    epsilon: float,
    chain: Chain,
    samples: int,
    seed: int,
    workers: int | None = None,
    stream: int = REMOVE,
) -> Sums:
    """Samples whose expectation is the remove divergence."""
    return sample_sums(
        lambda generator, rows: chain.sample(loss, epsilon, generator, rows), samples, loss.cycle, seed, stream, workers
    )


def add_sums(
    loss: PrivacyLoss, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = ADD
) -> tuple[Sums, float] | None:
    """Samples whose expectation is the add divergence, with their bound; None where there is no half space."""
    side = half_space(loss, epsilon)
    if side is None:
        return None
    sums = sample_sums(
        lambda generator, rows: side.sample(loss, epsilon, generator, rows), samples, loss.cycle, seed, stream, workers
    )
    return sums, side.bound(side.rounding(loss))


def seconds_per_sample(loss: PrivacyLoss, epsilon: float, chain: Chain, workers: int | None = None) -> float:
    """Of a sample of each direction, by the clock."""
    samples = max(512, min(2**13, 2**20 // loss.cycle))
    start = time.perf_counter()
    remove_sums(loss, epsilon, chain, samples, 0, workers, CLOCK)
    add_sums(loss, epsilon, samples, 0, workers, CLOCK)
    return (time.perf_counter() - start) / samples
