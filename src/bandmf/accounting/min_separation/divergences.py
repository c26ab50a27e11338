"""Samples of the two divergences, and the number of copies that suits them. Each use of a seed has its own stream."""

from __future__ import annotations

import time

from bandmf.accounting.min_separation.copies import Copies, most_copies
from bandmf.accounting.min_separation.half_space import half_space, sample_add
from bandmf.accounting.min_separation.loss import Loss
from bandmf.accounting.samples import Sums, sample_sums

REMOVE, ADD, PILOT, ESTIMATE, CLOCK = range(5)  # streams; certificates use the first two alone
_NUMBERS = 2**20  # computed at once: rows * steps
_PIECE = 2**14  # what sample_sums divides by the width for the number of rows


def remove_sums(
    proposal: Copies, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = REMOVE
) -> Sums:
    """Samples whose expectation is the remove divergence."""
    return sample_sums(
        lambda generator, rows: proposal.sample(epsilon, generator, rows),
        samples,
        _width(proposal.loss),
        seed,
        stream,
        workers,
    )


def add_sums(
    loss: Loss, epsilon: float, samples: int, seed: int, workers: int | None = None, stream: int = ADD
) -> tuple[Sums, float] | None:
    """Samples whose expectation is the add divergence, with their bound; None where there is no half space."""
    side = half_space(loss, epsilon)
    if side is None:
        return None
    sums = sample_sums(
        lambda generator, rows: sample_add(side, loss, epsilon, generator, rows),
        samples,
        _width(loss),
        seed,
        stream,
        workers,
    )
    return sums, side.bound(loss.rounding(side.distance))


def best_copies(loss: Loss, epsilon: float) -> Copies:
    """About the number of copies with the least bound on the weights: it falls, then rises."""
    most = most_copies(loss.separation, loss.steps)
    best, copies = Copies(loss, 2), 3
    while copies <= most:
        tried = Copies(loss, copies)
        if tried.bound(epsilon) > best.bound(epsilon):
            break
        best = tried
        copies = min(copies + max(1, copies // 4), max(most, copies + 1))
    return best


def seconds_per_sample(proposal: Copies, epsilon: float, workers: int | None = None) -> float:
    """Of a sample of each direction, by the clock."""
    samples = 2**11
    start = time.perf_counter()
    remove_sums(proposal, epsilon, samples, 0, workers, CLOCK)
    add_sums(proposal.loss, epsilon, samples, 0, workers, CLOCK)
    return (time.perf_counter() - start) / samples


def _width(loss: Loss) -> int:
    rows = max(32, min(1024, _NUMBERS // loss.steps))
    return max(1, _PIECE // rows)
