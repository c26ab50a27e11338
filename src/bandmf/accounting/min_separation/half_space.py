"""The add direction: a half space that holds all of its divergence, and samples on its normal.

log L is convex in x, so it lies above its tangent at any point x0: with g its gradient there and s = |g|,

    log L(x) >= log L(x0) + <g, x - x0> = s (y + d) - epsilon,    y = <g, x> / s ~ N(0, 1) under Q.

From here on all is as for balls-in-bins (`accounting.bins.half_space`): a bound without sampling, and samples moved
by -d along g, with bounded weights. Any x0 is valid; the best is the point of {log L <= -epsilon} nearest to 0.

L is at least the probability that the example never takes part; where that exceeds e^-epsilon, nothing is added.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting.bins.half_space import HalfSpace
from bandmf.accounting.bins.loss import added
from bandmf.accounting.min_separation.loss import Loss

_ROUNDS = 60
_SLACK = 1e-9  # of a distance, beside the rounding of log L and of the normal


class Likelihood(Protocol):
    """What is asked of a likelihood ratio, as a mean of exp(<m_S, x> - |m_S|^2 / 2)."""

    @property
    def steps(self) -> int: ...

    def means(self, counts: FloatArray) -> FloatArray: ...

    def products(self, x: FloatArray) -> FloatArray: ...

    def log_likelihoods(self, products: FloatArray) -> FloatArray: ...

    def posterior(self, x: FloatArray) -> tuple[float, FloatArray]:
        """log L, and the counts of which `means` makes its gradient."""
        ...

    @property
    def farthest(self) -> float:
        """The most that |m_S| can be."""
        ...

    def rounding(self, distance: float) -> float: ...


def half_space(loss: Likelihood, epsilon: float) -> HalfSpace | None:
    """The farthest half space found, `positions` being the normal g; None where none has a positive distance."""
    x0, best = np.zeros(loss.steps), None
    for round_ in range(_ROUNDS):
        log_likelihood, taking_part = loss.posterior(x0)
        normal = loss.means(taking_part[:, None])[:, 0]
        s = float(np.linalg.norm(normal))
        if s < 1e-12:
            break
        gap = epsilon + log_likelihood - float(normal @ x0)
        length = float(np.linalg.norm(x0))  # the posterior, and so the normal, errs as log L does
        farthest = math.sqrt(loss.steps) + 10 + 2 * length  # x from x0
        slack = loss.rounding(length) * (1 + 2 * loss.farthest * farthest) + _SLACK * (1 + abs(gap))
        distance = (gap - slack) / s - _SLACK
        if best is None or distance > best.distance * (1 + 1e-6):
            best = HalfSpace(normal, s, distance)
        elif round_ > 10:
            break
        x0 = x0 / 2 - max(distance, 0.0) / s * normal / 2
    return best if best is not None and best.distance > 0 else None


def sample_add(
    side: HalfSpace, loss: Likelihood, epsilon: float, generator: np.random.Generator, rows: int
) -> FloatArray:
    """Independent samples with the add divergence as expectation, none above its bound."""
    s, d, normal = side.steepness, side.distance, side.positions
    x = generator.standard_normal((loss.steps, rows)) - (d / s * normal)[:, None]
    y = normal @ x / s
    slack = loss.rounding(d)
    logs = loss.log_likelihoods(loss.products(x))
    # Where the divergence is positive the exponent is below -d^2 / 2; elsewhere it must not overflow.
    return added(logs - slack, epsilon) * np.exp(np.minimum(d * y + d**2 / 2 + slack, 1.0))


def closed_bound(loss: Loss, epsilon: float) -> float:
    """Of the add divergence, without sampling."""
    if log_never(loss) - _SLACK >= -epsilon:
        return 0.0
    side = half_space(loss, epsilon)
    return 1.0 if side is None else side.deterministic_bound()


def log_never(loss: Loss) -> float:
    """log of the probability that an example never takes part."""
    if loss.probability == 1:
        late = loss.start[loss.steps :].sum()
        return math.log(late) if late else -math.inf
    left = np.maximum(loss.steps - np.arange(loss.separation), 0)  # steps at which it may join
    return math.log(float(loss.start @ (1 - loss.probability) ** left))
