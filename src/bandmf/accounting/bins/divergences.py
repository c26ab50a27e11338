"""Samples of the two divergences, and how long they take. Each use of a seed has a stream of its own."""

from __future__ import annotations

import time

from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.half_space import half_space
from bandmf.accounting.bins.long import Loss
from bandmf.accounting.samples import Sums, sample_sums

REMOVE, ADD, PILOT, ESTIMATE, POSTERIOR, CLOCK = range(6)  # streams; certificates use the first two alone


def remove_sums(
    copies: Copies, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = REMOVE
) -> Sums:
    """Samples whose expectation is the remove divergence."""
    width, bound = copies.loss.cycle, copies.bound(epsilon)
    return sample_sums(
        lambda generator, rows: copies.sample(epsilon, generator, rows), samples, width, seed, stream, workers, bound
    )


def add_sums(
    loss: Loss, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = ADD
) -> tuple[Sums, float] | None:
    """Samples whose expectation is the add divergence, with their bound; None where there is no half space."""
    side = half_space(loss, epsilon)
    if side is None:
        return None
    bound = side.bound(side.rounding(loss))
    sums = sample_sums(
        lambda generator, rows: side.sample(loss, epsilon, generator, rows),
        samples,
        loss.cycle,
        seed,
        stream,
        workers,
        bound,
    )
    return sums, bound


def seconds_per_sample(copies: Copies, epsilon: float, workers: int | None = None) -> tuple[float, float]:
    """Of a sample of the remove and of the add direction, by the clock."""
    samples = max(512, min(2**13, 2**20 // copies.loss.cycle))
    times = [time.perf_counter()]
    remove_sums(copies, epsilon, samples, 0, workers, CLOCK)
    times.append(time.perf_counter())
    add_sums(copies.loss, epsilon, samples, 0, workers, CLOCK)
    times.append(time.perf_counter())
    return (times[1] - times[0]) / samples, (times[2] - times[1]) / samples
