"""The proposal for the remove direction: q copies of a position that attract each other, with a proved bound.

Under Q, E L^q is a mean over q independent uniform positions,

    M = E_Q L^q = E exp(pairs),    pairs = sum over r < s of K[i_r, i_s],

and Q L^q / M is the law of u = K_{i_1} + ... + K_{i_q} + N(0, K) (rows of K), the positions drawn with exp(pairs) as
weight. This is done by rejection, from positions of which one, the hub i, attracts the others:

1. the hub has the weight Z_i^(q-1), with Z_i = mean_j exp(q/2 K_ij), and each other position j the weight
   exp(q/2 K_ij) given the hub;
2. all are kept with probability exp(pairs) / mean_r exp(q/2 star_r), star_r = sum over s != r of K[i_r, i_s]. That is
   at most 1: pairs is the mean over r of q/2 star_r, and exp is convex.

The hub may be any of the q, so proposed positions have the density mean_r exp(q/2 star_r) / W relative to uniform
ones, W = mean_i Z_i^(q-1), and those that are kept exp(pairs) / W. With them, u has the density L^q / W relative to Q:
the exponents of the Gaussian shift and of the choices cancel. So with h what L contributes to the divergence,

    w = h W / L^q for those that are kept, 0 for others:    E w = E_Q h = delta,    w <= B = W max_L h / L^q.

Each draw is used with a noise vector and with its negative; the mean of the two weights is one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.long import Loss
from bandmf.accounting.bins.loss import log_mean_exp, log_removed
from bandmf.accounting.bins.peak import evaluation, log_peak

MAX_COPIES = 256


@dataclass(frozen=True, eq=False)
class Drawn:
    """Of so many proposals, the draws of u that were kept, and their numbers."""

    kept: IntArray
    shift: FloatArray  # K_{i_1} + ... + K_{i_q}


class Copies:
    """q copies for one law of L.

    Guarantees: no weight is above `bound`, and their expectation is the remove divergence.
    """

    def __init__(self, loss: Loss, copies: int) -> None:
        self.loss, self.copies = loss, _check.whole("copies", copies, 2, MAX_COPIES)
        self.hubs = loss.hubs(self.copies)
        self.log_scale = self.hubs.log_scale  # log W

    def bound(self, epsilon: float) -> float:
        """B, the most that a weight can be."""
        log = float(log_peak(np.array([self.copies]), epsilon, self.loss.shared)[0]) + self.log_scale
        return math.exp(min(log + 2 * self.copies * self._slack + 1e-12, 700.0))

    @property
    def misdrawn(self) -> float:
        """How far rounding takes the law of the positions from the one meant, in total variation: at most this.

        A number below b errs by b 2^-53; each of the q positions is decided by at most b of them.
        """
        return self.copies * self.loss.cycle**2 * 2.0**-51

    @property
    def _slack(self) -> float:
        return self.loss.rounding(self.copies)

    def draw(self, generator: np.random.Generator, rows: int) -> Drawn:
        """So many proposals, and what is kept of them."""
        draws = generator.random((rows, self.copies + 1))
        positions, log_draws = self.hubs.propose(draws[:, :-1]), np.log(np.maximum(draws[:, -1], 1e-300))
        kept, allowed = self.hubs.plausible(positions, log_draws)
        positions, log_draws = positions[kept], log_draws[kept]
        shift = self.loss.shift(positions)
        stars = np.take_along_axis(shift, positions, axis=1) - self.loss.diagonal[positions]
        if allowed is None:
            allowed = log_mean_exp(self.copies / 2 * stars)[0]
        inside = log_draws < stars.sum(axis=1) / 2 - allowed
        return Drawn(kept[inside], shift[inside])

    def sample(self, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with expectation delta."""
        drawn = self.draw(generator, rows)
        noise = self.loss.noise(generator, len(drawn.kept))
        result = np.zeros(rows)
        for u in (drawn.shift + noise, drawn.shift - noise):
            result[drawn.kept] += self.weights(u, epsilon) / 2
        return result

    def weights(self, u: FloatArray, epsilon: float) -> FloatArray:
        """w, raised by what rounding may have taken."""
        log_L, slack = log_mean_exp(self.loss.log_terms(u))[0], self._slack
        log_h = log_removed(log_L + slack, epsilon, self.loss.shared) + evaluation(self.loss.shared)
        return np.exp(np.minimum(log_h + self.log_scale - self.copies * (log_L - slack), 700.0))  # as the bound

    def near(
        self, epsilon: float, width: float, generator: np.random.Generator, rows: int
    ) -> tuple[FloatArray, FloatArray]:
        """Posteriors of the position, weighted by how likely log L is epsilon, give or take `width`."""
        drawn = self.draw(generator, rows)
        logs = self.loss.log_terms(drawn.shift + self.loss.noise(generator, len(drawn.kept)))
        log_L = log_mean_exp(logs)[0]
        off = (epsilon + self.loss.shared / 2 - log_L) / math.hypot(width, math.sqrt(self.loss.shared))
        return np.exp(logs - log_L[:, None]) / self.loss.cycle, np.exp(-(off**2) / 2 - self.copies * (log_L - epsilon))
