"""The proposal for the remove direction: a chain of tilted positions, with a proved bound on its weights.

Draw a first position i with weight exp((a^2 - a) K_ii / 2), then c more, each given those before it,

    i_t = j  with weight  exp(S_t[j]),    S_t = a K_i + K_{i_1} + ... + K_{i_{t-1}},

and then u = a K_i + K_{i_1} + ... + K_{i_c} + N(0, K). Positions attract each other: a chain tilts one
neighborhood, several, or all positions evenly, as they come about when L is large.

Weights. Under this law (i, i_1, ..., i_c, u) has, relative to counting times Q, the density

    v_i^a v_{i_1} ... v_{i_c} / (b^(c+1) W Z_1 ... Z_c),
    W = mean_i exp((a^2 - a) K_ii / 2),    Z_t = mean_j exp(S_t[j]):

the exponents of the Gaussian shift and of the choices cancel. The target h = (L - e^epsilon)+ is spread over
the chains by the posteriors of a position, v_i^a / (b mean_j v_j^a) and v_i / (b L), which add up to one.
Their ratio is the weight

    w = h W Z_1 ... Z_c / (L^c mean_j v_j^a),    E w = E_Q h = delta.

Bound. a >= 1: mean_j v_j^a >= L^a, so h / (L^c mean v^a) <= max_L (L - e^epsilon) / L^q
= e^(-(q-1) epsilon) (q-1)^(q-1) / q^q with q = a + c. Hoelder: Z_t <= max_i mean_j exp((a + t - 1) K_ij), since
S_t[j] is a sum of rows of K with weights that add up to a + t - 1. So w <= B, the product of these, always.

Each chain is used with a noise vector and with its negative; the mean of the two weights is one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.loss import PrivacyLoss, log_mean_exp, log_removed

MAX_LENGTH = 256
_VANISHES = 1e-200  # a sum of exponentials of which underflow may have taken a part


@dataclass(frozen=True)
class Chain:
    """The proposal's parameters: power a >= 1 of the first position, length c of the rest.

    Guarantees: no weight is above `bound`, and their expectation is the remove divergence.
    """

    power: float
    length: int

    def __post_init__(self) -> None:
        remedy = "a smaller power breaks the bound on the weights"
        object.__setattr__(self, "power", _check.real("power", self.power, 1, 64, remedy=remedy))
        object.__setattr__(self, "length", _check.whole("length", self.length, 1, MAX_LENGTH))

    @property
    def tilt(self) -> float:
        """q: of which power of L this is an approximation."""
        return self.power + self.length

    def bound(self, loss: PrivacyLoss, epsilon: float) -> float:
        """B, the most that a weight can be."""
        largest = [float(_mean_exp(t * loss.K).max()) for t in self.power + np.arange(self.length)]
        first = float(_mean_exp(self._first(loss)[None])[0])
        q = self.tilt
        peak = (q - 1) * math.log(q - 1) - q * math.log(q) - (q - 1) * epsilon
        slack = (q + 2) * loss.rounding(q) + 1e-12  # of weights raised in log L, which has the power q
        return math.exp(min(first + sum(largest) + peak + slack, 700.0))

    def misdrawn(self, loss: PrivacyLoss) -> float:
        """How far rounding takes the law of the chain from the one meant, in total variation: at most this."""
        return (self.length + 1) * loss.cycle * 2.0**-50

    def sample(self, loss: PrivacyLoss, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with expectation delta."""
        shift, log_scale = self._positions(loss, generator, rows)
        noise = loss.noise(generator, rows)
        pair = [self._weights(loss, epsilon, shift + signed, log_scale) for signed in (noise, -noise)]
        return (pair[0] + pair[1]) / 2

    def near(
        self, loss: PrivacyLoss, epsilon: float, window: float, generator: np.random.Generator, rows: int
    ) -> tuple[FloatArray, FloatArray]:
        """Posteriors of the position where |log L - epsilon| < window, and their weights.

        The weights undo the proposal, but for the factor L^q that evens out the window.
        """
        shift, log_scale = self._positions(loss, generator, rows)
        logs = loss.log_terms(shift + loss.noise(generator, rows))
        log_L, log_power = log_mean_exp(logs, self.power)
        kept = np.abs(log_L - epsilon) < window
        logs, log_L = logs[kept], log_L[kept]
        weights = np.exp(log_scale[kept] - log_power[kept] + self.power * log_L - self.tilt * epsilon)
        return np.exp(logs - log_L[:, None]) / loss.cycle, weights

    def _positions(self, loss: PrivacyLoss, generator: np.random.Generator, rows: int) -> tuple[FloatArray, FloatArray]:
        """S after the last draw, and log(W Z_1 ... Z_c)."""
        a, b, K = self.power, loss.cycle, loss.K
        first = self._first(loss)
        first_sum = np.cumsum(np.exp(first - first.max()))
        draws = generator.random((self.length + 1, rows))
        S = a * K[np.searchsorted(first_sum, draws[0] * first_sum[-1])]
        log_scale = np.full(rows, math.log(first_sum[-1] / b) + first.max())
        running = np.empty_like(S)
        for t, draw in enumerate(draws[1:]):
            top = (a + t) * loss.largest  # no entry of S is above it
            np.subtract(S, top, out=running)
            np.cumsum(np.exp(running, out=running), axis=1, out=running)
            total = running[:, -1].copy()
            if (lost := np.flatnonzero(total < _VANISHES)).size:  # far below that bound: by their own largest
                own = S[lost].max(axis=1)
                running[lost] = np.cumsum(np.exp(S[lost] - own[:, None]), axis=1)
                total[lost] = running[lost, -1]
                log_scale[lost] += own - top
            log_scale += np.log(total / b) + top
            S += K[(running >= (draw * total)[:, None]).argmax(axis=1)]
        return S, log_scale

    def _first(self, loss: PrivacyLoss) -> FloatArray:
        return (self.power**2 - self.power) / 2 * loss.diagonal

    def _weights(self, loss: PrivacyLoss, epsilon: float, u: FloatArray, log_scale: FloatArray) -> FloatArray:
        """w, raised by what rounding may have taken."""
        log_L, log_power = log_mean_exp(loss.log_terms(u), self.power)
        slack = loss.rounding(self.tilt)
        return np.exp(log_removed(log_L + slack, epsilon) + log_scale - self.length * log_L - log_power + slack)


def _mean_exp(logs: FloatArray) -> FloatArray:
    return log_mean_exp(logs)[0]
