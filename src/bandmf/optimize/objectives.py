"""Objectives: how the squared errors of all steps become the one number that is minimized.

"mean" (the paper's), "max", "last", or an array of positive weights, one for each step. All are smooth but
the maximum; that one is reached by reweighting (`minimax`) or, for the few candidate steps of a Toeplitz
strategy, through p-norms of growing p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import OBJECTIVES

_SHARPNESS = tuple(4.0**k for k in range(1, 11))
# Minimizing the last error alone lets all others grow without bound; this share of their mean prevents it.
_MEAN_IN_LAST = 1e-3
_POWER, _LEAST_POWER = 4.0, 2.0  # of its error that a step's weight is multiplied by
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Objective:
    """A named aggregate of per-step errors; `weights` only for "weighted", `sharpness` is the p of "max"."""

    name: str
    weights: FloatArray | None = None
    sharpness: float = _SHARPNESS[-1]

    def value(self, errors: FloatArray) -> float:
        """The aggregate itself, without any smoothing."""
        if self.name == "mean":
            return float(np.mean(errors))
        if self.name == "last":
            return float(errors[-1])
        if self.name == "max":
            return float(np.max(errors))
        assert self.weights is not None
        return float(self.weights @ errors)

    def smooth(self, errors: FloatArray) -> tuple[float, FloatArray]:
        """The aggregate that is minimized and its derivative with respect to the errors."""
        n = len(errors)
        if self.name == "mean":
            return float(np.mean(errors)), np.full(n, 1 / n)
        if self.name == "last":
            weights = np.full(n, _MEAN_IN_LAST / n)
            weights[-1] += 1 - _MEAN_IN_LAST
            return float(weights @ errors), weights
        if self.name == "max":
            return p_norm(errors, self.sharpness)
        assert self.weights is not None
        return float(self.weights @ errors), self.weights

    def proof_weights(self, errors: FloatArray) -> FloatArray:
        """Weights that sum to one and whose weighted errors are at most `value`: a bound on them is one on it."""
        if self.name == "last":
            return np.eye(1, len(errors), len(errors) - 1)[0]
        weights = self.smooth(errors)[1]
        return weights / weights.sum()

    def stages(self) -> list[Objective]:
        """The objectives to minimize one after the other, each from where the one before ended."""
        if self.name != "max":
            return [self]
        return [replace(self, sharpness=p) for p in _SHARPNESS]


def p_norm(errors: FloatArray, p: float) -> tuple[float, FloatArray]:
    """(mean of errors^p)^(1/p) and its gradient: from the mean (p = 1) towards the maximum."""
    largest = float(np.max(errors))
    powers = (errors / largest) ** p
    mean = float(np.mean(powers))
    norm = largest * mean ** (1 / p)
    return norm, (powers / errors) * (norm / (len(errors) * mean))


def parse(objective: str | FloatArray, steps: int) -> Objective:
    """An objective from what the user gave: a name or weights."""
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, str):
        return Objective(_check.choice("objective", objective, OBJECTIVES))
    weights = _check.array("objective", objective, 1)
    if len(weights) != steps:
        raise ValueError(f"objective: there are {len(weights)} weights, but steps={steps}")
    if not np.all(weights > 0):
        at = int(np.argmin(weights))
        raise ValueError(
            f"objective[{at}]={weights[at]:g}: every weight must be positive; give steps that hardly matter a small one"
        )
    return Objective("weighted", weights / weights.sum())


# --- the largest error, by reweighting ----------------------------------------------------------------


class Weighted(NamedTuple, Generic[T]):
    """A solution of one weighted problem: its errors, and what no strategy's weighted mean goes below."""

    candidate: T
    errors: FloatArray
    lower: float
    iterations: int
    stopped: bool = False


class Minimax(NamedTuple, Generic[T]):
    """The candidate of least maximum, and its proved gap (relative, of the root)."""

    candidate: T
    gap: float
    iterations: int
    stopped: bool


def minimax(solve: Callable[[FloatArray], Weighted[T]], steps: int, gap: float, attempts: int) -> Minimax[T]:
    """Run `solve(weights)` with better and better weights until the proved gap is at most `gap`.

    For any weights w that sum to one, max_i error_i >= sum_i w_i error_i, so the best weighted mean is a
    lower bound on the best maximum, and the best weights close the gap (the problem is convex in X = C'C).
    Multiply the weight of each step by a power of its error and solve the smooth weighted problem again,
    until the largest error and the bound meet.
    """
    weights, power = np.full(steps, 1 / steps), _POWER
    best, largest, lower, iterations = None, math.inf, 0.0, 0
    for _ in range(attempts):
        found = solve(weights)
        iterations += found.iterations
        if found.lower < lower:  # the weights overshot
            power = max(0.9 * power, _LEAST_POWER)
        lower = max(lower, found.lower)
        if (worst := float(found.errors.max())) < largest:
            best, largest = found.candidate, worst
        proved = math.sqrt(largest / lower) - 1 if lower > 0 else math.inf
        if proved <= gap or found.stopped:
            break
        weights = weights * (found.errors / worst) ** power
        weights = np.maximum(weights / weights.sum(), 1e-12 / steps)
        weights /= weights.sum()
    assert best is not None
    return Minimax(best, proved, iterations, found.stopped)
