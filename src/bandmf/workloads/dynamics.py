"""What an optimizer makes of gradients, as far as that is linear: momentum, schedule and weight decay.

The weights move by -y_i in all after step i, rate_i being the learning rate and beta_i the momentum there:

    m_i = beta_i m_{i-1} + a_i (g_i - coupled y_{i-1})
    y_i = (1 - rate_i decoupled) y_{i-1} + rate_i s_i m_i

SGD has a_0 = 1, then a_i = 1 - dampening, and s_i = 1; Nesterov's momentum puts g_i - coupled y_{i-1} + beta_i m_i in
place of m_i in the second line. Adam's first moment has a_i = 1 - beta_i and s_i = 1 / (1 - beta_i^(i+1)), the
correction of its bias. Weight decay is coupled (part of the gradient) or decoupled (of the weights alone).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from bandmf import _check, band_columns, streaming
from bandmf._types import FloatArray
from bandmf.streaming import Matrices, StreamingOperator, lfilter

_NO_DECAY = 1e-15
Columns = Callable[[int, int], FloatArray]


@dataclass(frozen=True, eq=False)
class Dynamics:
    """The numbers of all `steps` steps, or of every one of them alike (arrays of length one)."""

    steps: int
    momentum: FloatArray
    rates: FloatArray
    shares: FloatArray  # a
    coupled: float = 0.0
    decoupled: float = 0.0
    nesterov: bool = False

    @staticmethod
    def sgd(
        steps: int,
        momentum: FloatArray,
        rates: FloatArray,
        decay: float,
        *,
        coupled: bool,
        nesterov: bool,
        dampening: float,
    ) -> Dynamics:
        """SGD; a dampening spares the first gradient, as in PyTorch."""
        shares = np.ones(1)
        if dampening and np.any(momentum):
            shares = np.append(1.0, np.full(steps - 1, 1 - dampening))
        decays = (decay, 0.0) if coupled else (0.0, decay)
        return Dynamics(steps, momentum, rates, shares, *decays, nesterov=nesterov)

    @staticmethod
    def adam(steps: int, beta: FloatArray, rates: FloatArray, decay: float) -> Dynamics:
        """Adam's first moment, without its bias; s_i is put into a_i, m_i and beta_i, which leaves y_i as it is."""
        if not np.any(beta):
            return Dynamics(steps, beta, rates, np.ones(1), decoupled=decay)
        unbiased = 1 - np.broadcast_to(beta, steps) ** np.arange(1, steps + 1)
        before = np.append(0.0, unbiased[:-1])
        return Dynamics(steps, beta * before / unbiased, rates, (1 - beta) / unbiased, decoupled=decay)

    @property
    def constant(self) -> bool:
        """Whether every step is the same: A is Toeplitz."""
        return len(self.momentum) == len(self.rates) == len(self.shares) == 1

    def operator(self) -> StreamingOperator:
        """A as an operator with two vectors of state, m and y."""
        stacked = self._transitions
        if self.constant:
            always = self._matrices(stacked, 0)
            return streaming.state_space(lambda i: always, 2)
        return streaming.state_space(partial(self._matrices, stacked), 2, self.steps)

    @staticmethod
    def _matrices(transitions: FloatArray, i: int) -> Matrices:
        F = transitions[i]
        return Matrices(F[:, :2], F[:, 2], F[1, :2], float(F[1, 2]))

    @cached_property
    def _transitions(self) -> FloatArray:
        """(m, y) after a step from (m, y, g) before it: shape (steps or 1, 2, 3)."""
        count = 1 if self.constant else self.steps
        beta, rate, a = (np.broadcast_to(each, count) for each in (self.momentum, self.rates, self.shares))
        m = np.stack([beta, -a * self.coupled, a], axis=1)
        moved = m
        if self.nesterov:
            moved = beta[:, None] * m + np.array([0.0, -self.coupled, 1.0])
        y = rate[:, None] * moved
        y[:, 1] += 1 - rate * self.decoupled
        return np.stack([m, y], axis=1)

    # --- Toeplitz ---------------------------------------------------------------------------------------

    def coefficients(self) -> tuple[FloatArray, FloatArray]:
        """Numerator and denominator of the first column's power series; needs `constant`."""
        F, G = self._transitions[0, :, :2], self._transitions[0, :, 2]
        keep = 1 - self.rates[0] * (self.decoupled + (self.coupled if self.nesterov else 0.0))
        denominator = np.array([1.0, -np.trace(F), self.momentum[0] * keep])  # 1 - x tr F + x^2 det F
        numerator = np.array([G[1], F[1] @ G - np.trace(F) * G[1] if self.nesterov else 0.0])
        return np.trim_zeros(numerator, "b"), np.trim_zeros(denominator, "b")

    def limit(self) -> float:
        """What the first column settles to; an error where it grows."""
        _, first, second = np.append(self.coefficients()[1], [0.0, 0.0])[:3]  # 1 + first x + second x^2
        if self.steps > 1 and (1 - first + second <= 0 or second >= 1):
            decay = self.coupled or self.decoupled
            raise _check.fail("weight_decay", decay, "is so large that the weights grow", "it must be below 2 / rate")
        if 1 + first + second > _NO_DECAY:
            return 0.0
        moved = self.shares[0] / (1 - self.momentum[0])  # by one gradient, in the end
        return float(self.rates[0] * ((1 + self.momentum[0] * moved) if self.nesterov else moved))

    # --- the inverse ------------------------------------------------------------------------------------

    def inverse_columns(self) -> Columns | None:
        """Columns of A^-1, which has three diagonals; None where it has more, or a rate of zero makes A singular."""
        if self.constant:
            numerator, denominator = self.coefficients()
            if len(numerator) > 1:
                return None
            return partial(band_columns.toeplitz_columns, denominator / numerator[0], self.steps)
        if (self.nesterov and np.any(self.momentum)) or not np.all(self.rates):
            return None
        # g_i = coupled y_{i-1} + (m_i - beta_i m_{i-1}) / a_i with m_i = (y_i - keep_i y_{i-1}) / rate_i, by columns.
        beta, rate, a = (np.broadcast_to(each, self.steps) for each in (self.momentum, self.rates, self.shares))
        keep = 1 - rate * self.decoupled
        columns = np.zeros((self.steps, 3))
        columns[:, 0] = 1 / (a * rate)
        columns[:-1, 1] = self.coupled - keep[1:] / (a * rate)[1:] - beta[1:] / (a[1:] * rate[:-1])
        columns[:-2, 2] = beta[2:] * keep[1:-1] / (a[2:] * rate[1:-1])
        return lambda start, stop: columns[start:stop]


def first_column(numerator: FloatArray, denominator: FloatArray, count: int) -> FloatArray:
    """The power series numerator(x) / denominator(x)."""
    impulse = np.eye(1, count)[0]
    found: FloatArray = lfilter(numerator, denominator, impulse)
    return found
