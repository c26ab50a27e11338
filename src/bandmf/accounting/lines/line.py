"""Lines through the noise, along which both divergences have a closed form.

Let p be a probability vector over the positions. Then u ~ N(0, K) is

    u = a z + r,    a = K p / s,  s^2 = p'K p,  z = p.u / s ~ N(0, 1),    r ~ N(0, R),  R = K - a a',

with z and r independent. All u with the same r lie on a line, and on it, as a >= 0,

    L(z) = mean_j exp(a_j z - a_j^2 / 2) v_j,    v_j = exp(r_j - R_jj / 2),

rises with z. With z* where it crosses e^epsilon, or e^-epsilon, and Phi the normal distribution function,

    remove:  E_z (L - e^epsilon)+    = mean_j v_j Phi(a_j - z*) - e^epsilon Phi(-z*),
    add:     E_z (1 - e^epsilon L)+  = Phi(z*) - e^epsilon mean_j v_j Phi(z* - a_j).

Averaged over r, these are the divergences. Where epsilon is small, or positions are many, L varies mostly along the
line: what is left to chance is little, and a few samples of r tell the divergences well.

Guarantees: `removed` and `added` are never below the exact integrals, for numbers log v_j that err by at most
`slack`: log v_j is moved by it, to where the integral grows; for an approximate crossing z the formulas are
below the integrals, by less than |L(z) - level| times the mass between z and z*, which is added.
  - The law of r is that of F x - a (p'F x) / s with the float64 numbers F, a and s. With a z added, its covariance
    is K but for rounding, 2 / s times that of K p and less; K is raised by more than that (`_RAISE`) before F is
    computed, so that it still is no smaller than G / sigma^2 in any entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from bandmf._types import FloatArray
from bandmf.accounting.bins.gram import checked_gram
from bandmf.accounting.bins.loss import PrivacyLoss, privacy_loss

_RAISE = 1e-9  # of the largest entry
_UNIT = 2.0**-53
_STEPS, _CLOSE = 40, 1e-11  # of Newton's method; of log L


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines in direction K p, for one sigma."""

    loss: PrivacyLoss
    positions: FloatArray  # p
    steepness: float  # s
    slopes: FloatArray  # a
    spread: FloatArray  # R_jj

    def across(self, generator: np.random.Generator, rows: int) -> FloatArray:
        """Draws of r."""
        u = self.loss.noise(generator, rows)
        u -= np.outer(u @ self.positions / self.steepness, self.slopes)
        return u

    def rounding(self, tilt: int) -> float:
        """What rounding moves products of `tilt` of the v_j, r shifted by as many rows of R, by: at most this."""
        ratio = self.slopes.max() / self.steepness
        return (1 + ratio) * self.loss.rounding(tilt) + (1 + tilt) ** 2 * _RAISE * self.loss.largest

    def removed(self, log_v: FloatArray, epsilon: float, slack: float) -> FloatArray:
        """E_z (L - e^epsilon)+ for every row of log v_j."""
        log_v = log_v + slack
        z, off = self.crossing(log_v, epsilon)
        level = math.exp(epsilon)
        first = (np.exp(log_v) * special.ndtr(self.slopes - z[:, None])).mean(axis=1)
        return self._raised(first, level * special.ndtr(-z), level, z, off)

    def added(self, log_v: FloatArray, epsilon: float, slack: float) -> FloatArray:
        """E_z (1 - e^epsilon L)+ for every row of log v_j."""
        log_v = log_v - slack
        z, off = self.crossing(log_v, -epsilon)
        second = (np.exp(log_v) * special.ndtr(z[:, None] - self.slopes)).mean(axis=1)
        return self._raised(special.ndtr(z), math.exp(epsilon) * second, 1.0, z, off)

    def crossing(self, log_v: FloatArray, log_level: float) -> tuple[FloatArray, FloatArray]:
        """z where log L is log_level, by Newton's method, and by how much it is off there.

        log L is convex in z and rises, so the method converges from everywhere, from the right.
        """
        top = log_v.max(axis=1)
        base = log_v - top[:, None] - self.slopes**2 / 2
        z = np.full(len(log_v), log_level / self.steepness)
        for step in range(_STEPS):
            terms = np.exp(base + self.slopes * z[:, None])
            total = terms.sum(axis=1)
            off = np.log(total / self.loss.cycle) + top - log_level
            if step == _STEPS - 1 or np.abs(off).max() < _CLOSE:
                break
            z -= off * total / (terms @ self.slopes)
        return z, np.abs(off)

    def _raised(
        self, first: FloatArray, second: FloatArray, level: float, z: FloatArray, off: FloatArray
    ) -> FloatArray:
        """first - second, raised by the rounding of both and by what lies between z and the crossing.

        log L has at least the least slope, so the crossing is at most off / that away from z.
        """
        rounding = (self.loss.cycle + 256) * 4 * _UNIT
        off = off + rounding
        away = off / self.slopes.min()
        densest = np.exp(-(np.maximum(np.abs(z) - away, 0.0) ** 2) / 2) / math.sqrt(2 * math.pi)
        return np.maximum(first - second, 0.0) + rounding * (first + second) + level * np.expm1(off) * away * densest


def raised_loss(gram: FloatArray, sigma: float) -> PrivacyLoss:
    """The law of L, raised so that lines through it may be rounded."""
    gram = checked_gram(gram)
    return privacy_loss(gram * (1 + _RAISE) + _RAISE * gram.max(), sigma)


def lines(loss: PrivacyLoss, positions: FloatArray | None = None) -> Lines:
    """Lines through a `raised_loss`, along K p; p is uniform unless given.

    >>> import numpy as np
    >>> one = lines(raised_loss(np.array([[1.0]]), 2.0))  # one position: a single line, and so no chance
    >>> f"{one.removed(np.zeros((1, 1)), 1.0, 0.0)[0]:.6f}"  # the Gaussian mechanism
    '0.006830'
    """
    b = loss.cycle
    p = np.full(b, 1 / b) if positions is None else positions
    product = loss.K @ p
    steepness = math.sqrt(p @ product)
    slopes = product / steepness
    ratio = float(slopes.max()) / steepness
    # Of K p, (3 b + 8) units times the largest entry; of p'K p, (4 b + 8).
    if not (2 * ratio * (3 * b + 8) + ratio**2 * (4 * b + 8)) * _UNIT < _RAISE / 2:
        raise ValueError("positions: a line in this direction is too steep at some of the positions to be rounded")
    return Lines(loss, p, steepness, slopes, np.maximum(loss.diagonal - slopes**2, 0.0))
