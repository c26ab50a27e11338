"""How many copies, and how many samples: choices that affect the time a certificate takes, never its truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting.bins.copies import MAX_COPIES, Copies
from bandmf.accounting.bins.divergences import PILOT, remove_sums
from bandmf.accounting.bins.long import Loss
from bandmf.accounting.bins.peak import log_peak
from bandmf.accounting.certified import samples_with

_FEW_OR_MANY = np.unique(np.geomspace(2, MAX_COPIES, 48).astype(int))
_MARGIN = 0.05  # of delta, to which costs are compared


@dataclass(frozen=True)
class Pilot:
    """So many copies, with what a few of their samples showed."""

    copies: int
    mean: float
    relative_variance: float
    relative_bound: float

    def margin_samples(self, margin: float, log_term: float) -> float:
        """Samples until the upper bound is `margin` above the mean, relatively, luck included."""
        return samples_with(self.relative_variance, self.relative_bound, margin, log_term)

    @property
    def cost(self) -> float:
        return self.margin_samples(_MARGIN, 20.0) if self.mean > 0 else math.inf


def tune(loss: Loss, epsilon: float, samples: int, seed: int) -> Pilot:
    """As many copies as need few samples: from the number of least bound, more or fewer while it pays."""
    best = pilot(loss, epsilon, least_bound(loss, epsilon), samples, seed)
    for direction in (-1, 1):
        for _ in range(MAX_COPIES):
            copies = best.copies + direction * max(1, best.copies // 8)
            if not 2 <= copies <= MAX_COPIES:
                break
            tried = pilot(loss, epsilon, copies, samples, seed)
            if not tried.cost < best.cost:
                break
            best = tried
    return best


def pilot(loss: Loss, epsilon: float, copies: int, samples: int, seed: int) -> Pilot:
    """What so many samples show."""
    drawn = Copies(loss, copies)
    sums = remove_sums(drawn, epsilon, samples, seed, stream=PILOT)
    if sums.mean <= 0:
        return Pilot(copies, 0.0, math.inf, math.inf)
    return Pilot(copies, sums.mean, sums.relative_variance, drawn.bound(epsilon) / sums.mean)


def least_bound(loss: Loss, epsilon: float) -> int:
    """The number of copies with the least bound on the weights, as the first and the middle row of K have it."""
    return int(_FEW_OR_MANY[np.argmin(log_bounds(loss.rows(), epsilon, loss.shared))])


def log_bounds(rows: FloatArray, epsilon: float, shared: float) -> FloatArray:
    """log B for some numbers of copies as these rows of K alone would have it: a guess of the bound."""
    copies = _FEW_OR_MANY
    exponents = copies[:, None, None] / 2 * rows
    top = exponents.max(axis=2, keepdims=True)
    means = (top[..., 0] + np.log(np.exp(exponents - top).mean(axis=2))).max(axis=1)
    return (copies - 1) * means + log_peak(copies, epsilon, shared)
