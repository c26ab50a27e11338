"""The add direction: a half space that holds all of its divergence, and samples on its normal.

log L is convex in x (u = F x), and for every probability vector p over the positions (Gibbs' inequality)

    log L >= p.(u - diag K / 2) - KL(p | uniform) = s (y + d) - epsilon,
    y = p.u / s ~ N(0, 1) under Q,    s^2 = p'K p,    s d = epsilon - p.diag K / 2 - KL(p | uniform).

So (1 - e^epsilon L)+ <= (1 - e^(s (y + d)))+, whose expectation is closed: a bound without sampling,

    delta_add <= Phi(-d) - e^(s d + s^2 / 2) Phi(-d - s).

Where that is not enough: sample u with y moved by -d, N(0, K) - d K p / s. The weights
(1 - e^epsilon L)+ e^(d y + d^2 / 2) are, with r = -(y + d) > 0, at most

    max_r (1 - e^(-s r)) e^(-d r - d^2 / 2) = e^(-d^2 / 2) s / (d + s) (d / (d + s))^(d / s).

Any p is valid; the best one is the posterior at the point of {log L <= -epsilon} that is nearest to 0. Where even
that has d <= 0 (0 lies in the set: K_jj > 2 epsilon, about), nothing is proved here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from bandmf._types import FloatArray
from bandmf.accounting.bins.long import Loss
from bandmf.accounting.bins.loss import added, log_mean_exp

_ROUNDS = 200


@dataclass(frozen=True, eq=False)
class HalfSpace:
    """{y <= -distance}, with y = p.u / steepness."""

    positions: FloatArray  # p
    steepness: float  # s
    distance: float  # d

    def deterministic_bound(self) -> float:
        """Of the add divergence, without sampling."""
        s, d = self.steepness, self.distance
        inside = special.ndtr(-d)
        # The difference loses digits where s is small; so much is added.
        excess = inside - math.exp(s * d + s**2 / 2 + special.log_ndtr(-d - s))
        return float(min(max(excess, 0.0) + 1e-12 * inside, 1.0)) * (1 + 1e-9)

    def bound(self, rounding: float) -> float:
        """The most that a weight can be whose log L was moved by `rounding`, and the weight itself."""
        s, d = self.steepness, self.distance
        slack = (1 + d / s) * rounding + 1e-9
        log = -(d**2) / 2 + math.log(s / (d + s)) + d / s * math.log(d / (d + s)) + slack
        return math.exp(min(log, 700.0))  # beyond, it certifies nothing in any case

    def rounding(self, loss: Loss) -> float:
        """What rounding may have taken from a sample's log L."""
        return loss.rounding(1 + self.distance / self.steepness)

    def sample(self, loss: Loss, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with the add divergence as expectation."""
        s, d, p = self.steepness, self.distance, self.positions
        shared = math.sqrt(loss.shared) * generator.standard_normal((rows, 1))
        u = loss.noise(generator, rows) + shared - d / s * (loss.times(p[None])[0] + loss.shared)
        log_L = log_mean_exp(loss.log_terms(u))[0] - loss.shared / 2
        slack = self.rounding(loss)
        # Where the divergence is positive the exponent is below -d^2 / 2; elsewhere it must not overflow.
        exponent = np.minimum(d * (u @ p) / s + d**2 / 2 + slack, 1.0)
        return added(log_L - slack, epsilon) * np.exp(exponent)


def half_space(loss: Loss, epsilon: float) -> HalfSpace | None:
    """The farthest half space found; None where none has a positive distance."""
    diagonal = loss.diagonal + loss.shared
    p = np.full(loss.cycle, 1 / loss.cycle)
    best: HalfSpace | None = None
    for round_ in range(_ROUNDS):
        shift = loss.times(p[None])[0] + loss.shared
        s = math.sqrt(p @ shift)
        gap = epsilon - float(p @ diagonal) / 2 - _divergence(p)
        distance = gap / s - (loss.rounding(1.0 + abs(gap) / s**2) / s + 1e-12)
        if best is None or distance > best.distance * (1 + 1e-9):
            best = HalfSpace(p, s, distance)
        elif round_ > 20 and distance > best.distance * (1 - 1e-9):
            break
        logs = -max(distance, 0.0) / s * shift - diagonal / 2
        posterior = np.exp(logs - logs.max())
        p = p / 2 + posterior / posterior.sum() / 2
        p /= p.sum()
    assert best is not None
    return best if best.distance > 0 else None


def _divergence(p: FloatArray) -> float:
    """KL(p | uniform)."""
    return float(special.xlogy(p, p * len(p)).sum())
