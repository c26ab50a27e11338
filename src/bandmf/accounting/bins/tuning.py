"""Which chain of positions, and how many samples: choices that affect the time a certificate takes, never its truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting.bins.chain import MAX_LENGTH, Chain
from bandmf.accounting.bins.divergences import PILOT, remove_sums
from bandmf.accounting.bins.loss import PrivacyLoss
from bandmf.accounting.certified import samples_for

_POWERS = (1.0, 1.5, 2.0)
_COST = (7.0, 1.0)  # microseconds of a sample, and of each position in its chain (128 positions)
_MARGIN = 0.05  # of delta, to which costs are compared


@dataclass(frozen=True)
class Pilot:
    """A chain with what a few of its samples showed."""

    chain: Chain
    mean: float
    relative_variance: float
    relative_bound: float

    def margin_samples(self, margin: float, log_term: float) -> float:
        """Samples until the upper bound is `margin` above the mean, relatively, luck included."""
        return samples_for(self.relative_variance, self.relative_bound, margin, log_term)

    @property
    def cost(self) -> float:
        base, each = _COST
        return self.margin_samples(_MARGIN, 20.0) * (base + each * self.chain.length)


def tune(loss: PrivacyLoss, epsilon: float, samples: int, seed: int) -> Pilot:
    """A chain with few samples needed: from the one of least bound, longer while it pays, at each power."""
    best: Pilot | None = None
    for power in _POWERS:
        length = int(np.argmin(log_bounds(np.array([loss.K[0]]), epsilon, power))) + 1
        previous = math.inf
        while length <= MAX_LENGTH:
            tried = pilot(loss, epsilon, Chain(power, length), samples, seed)
            if best is None or tried.cost < best.cost:
                best = tried
            if not tried.cost < previous:
                break
            previous, length = tried.cost, length + max(1, length // 4)
    assert best is not None
    return best


def pilot(loss: PrivacyLoss, epsilon: float, chain: Chain, samples: int, seed: int) -> Pilot:
    """What so many samples show of a chain."""
    sums = remove_sums(loss, epsilon, chain, samples, seed, stream=PILOT)
    if sums.mean <= 0:
        return Pilot(chain, 0.0, math.inf, math.inf)
    bound = chain.bound(loss, epsilon) / sums.mean
    return Pilot(chain, sums.mean, sums.relative_variance, bound)


def log_bounds(rows: FloatArray, epsilon: float, power: float) -> FloatArray:
    """log B for the lengths 1 ... MAX_LENGTH as these rows of K alone would have it: a guess of the bound."""
    lengths = np.arange(1, MAX_LENGTH + 1)
    tilts = power + lengths - 1
    exponents = tilts[:, None, None] * rows
    top = exponents.max(axis=2, keepdims=True)
    means = (top[..., 0] + np.log(np.exp(exponents - top).mean(axis=2))).max(axis=1)
    q = power + lengths
    peak = (q - 1) * np.log(q - 1) - q * np.log(q) - (q - 1) * epsilon
    return (power**2 - power) / 2 * rows.max() + np.cumsum(means) + peak
