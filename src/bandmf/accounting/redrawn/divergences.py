"""Samples of the two divergences, and the number of copies that suits them. Each use of a seed has its own stream."""

from __future__ import annotations

import math
import time

from bandmf.accounting.min_separation.copies import MAX_COPIES, TooLittleNoiseError
from bandmf.accounting.min_separation.half_space import half_space, sample_add
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.loss import Loss
from bandmf.accounting.samples import Sums, sample_sums

REMOVE, ADD, ESTIMATE, POSTERIOR, CLOCK = range(5)  # streams; certificates use the first two alone
_NUMBERS = 2**19  # computed at once: rows * steps
_PIECE = 2**14  # what sample_sums divides by the width for the number of rows


def remove_sums(
    proposal: Copies, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = REMOVE
) -> Sums:
    """Samples whose expectation is the remove divergence."""
    return sample_sums(
        lambda generator, rows: proposal.sample(epsilon, generator, rows),
        samples,
        width(proposal.loss),
        seed,
        stream,
        workers,
        proposal.bound(epsilon),
    )


def add_sums(
    loss: Loss, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = ADD
) -> tuple[Sums, float] | None:
    """Samples whose expectation is the add divergence, with their bound; None where there is no half space."""
    side = half_space(loss, epsilon)
    if side is None:
        return None
    bound = side.bound(loss.rounding(side.distance))
    sums = sample_sums(
        lambda generator, rows: sample_add(side, loss, epsilon, generator, rows),
        samples,
        width(loss),
        seed,
        stream,
        workers,
        bound,
    )
    return sums, bound


def closed_add(loss: Loss, epsilon: float) -> float:
    """A bound on the add divergence, without sampling."""
    side = half_space(loss, epsilon)
    return 1.0 if side is None else side.deterministic_bound()


def best_copies(loss: Loss, epsilon: float, near: int = 2) -> Copies:
    """The number of copies with the least bound on the weights: it falls, then rises. The search starts `near` it."""
    tried = dict[int, Copies | None]()

    def bound(copies: int) -> float:
        if copies not in tried:
            try:
                tried[copies] = Copies(loss, copies)
            except TooLittleNoiseError:
                tried[copies] = None
        found = tried[copies]
        return math.inf if found is None else found.bound(epsilon)

    best = min(max(near, 2), MAX_COPIES)
    while best > 2 and bound(best) == math.inf:
        best = max(2, best // 2)
    step = max(1, best // 4)
    while True:
        following = min((best, best - step, best + step), key=lambda q: bound(q) if 2 <= q <= MAX_COPIES else math.inf)
        if following == best and step == 1:
            break
        step = max(1, step // 2) if following == best else step
        best = following
    found = tried[best]
    return Copies(loss, best) if found is None else found  # the error where even two overflow


def seconds_per_sample(proposal: Copies, epsilon: float, workers: int | None = None) -> tuple[float, float]:
    """Of a sample of the remove and of the add direction, by the clock."""
    samples = max(512, min(2**13, 2**23 // proposal.loss.steps))
    times = [time.perf_counter()]
    remove_sums(proposal, epsilon, samples, 0, workers, CLOCK)
    times.append(time.perf_counter())
    add_sums(proposal.loss, epsilon, samples, 0, workers, CLOCK)
    times.append(time.perf_counter())
    return (times[1] - times[0]) / samples, (times[2] - times[1]) / samples


def width(loss: Loss) -> int:
    """Of a sample, for `sample_sums`."""
    rows = max(32, min(512, _NUMBERS // loss.steps))
    return max(1, _PIECE // rows)
