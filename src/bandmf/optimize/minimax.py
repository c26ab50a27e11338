"""The objective "max": the largest error of any step, by reweighting.

For any weights w that sum to one, max_i error_i >= sum_i w_i error_i, so the best weighted mean is a lower
bound on the best maximum, and the best weights close the gap (the problem is convex in X = C'C). Multiply the
weight of each step by a power of its error and solve the smooth weighted problem again, until the largest
error and the bound meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from bandmf._check import FloatArray

T = TypeVar("T")
_POWER = 2.0


class Weighted(NamedTuple, Generic[T]):
    """A solution of one weighted problem: its errors, and what no strategy's weighted mean goes below."""

    candidate: T
    errors: FloatArray
    lower: float
    iterations: int


class Minimax(NamedTuple, Generic[T]):
    """The candidate of least maximum, and its proved gap (relative, of the root)."""

    candidate: T
    gap: float
    iterations: int


def minimax(solve: Callable[[FloatArray], Weighted[T]], steps: int, gap: float, rounds: int) -> Minimax[T]:
    """Run `solve(weights)` with better and better weights until the proved gap is at most `gap`."""
    weights = np.full(steps, 1 / steps)
    best, largest, lower, iterations = None, math.inf, 0.0, 0
    for _ in range(rounds):
        found = solve(weights)
        iterations += found.iterations
        lower = max(lower, found.lower)
        if (worst := float(found.errors.max())) < largest:
            best, largest = found.candidate, worst
        proved = math.sqrt(largest / lower) - 1 if lower > 0 else math.inf
        if proved <= gap:
            break
        weights = weights * (found.errors / worst) ** _POWER
        weights = np.maximum(weights / weights.sum(), 1e-12 / steps)
        weights /= weights.sum()
    assert best is not None
    return Minimax(best, proved, iterations)
