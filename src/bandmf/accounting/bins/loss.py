"""The likelihood ratio of balls-in-bins, and the two divergences as expectations.

With K = G / sigma^2 and b positions, under the law Q of the noise alone,

    L = mean_j v_j,    v_j = exp(u_j - K_jj / 2),    u ~ N(0, K),
    remove:  delta = E_Q (L - e^epsilon)+,        add:  delta = E_Q (1 - e^epsilon L)+.

Both are convex functions of L, so both grow with every entry of K (Kahane's inequality).

What all positions share is not sampled. For the largest c that leaves K - c 1 1' a covariance (nearly), u is
g + (a draw with that covariance), g ~ N(0, c) on its own, and L = e^(g - c/2) L', L' being the L of K - c 1 1'.
Given L', the expectation over g is a call's (Black, Scholes): with d = (log L' - epsilon) / sqrt c - sqrt c / 2,

    remove:  E_g (L - e^epsilon)+ = L' Phi(d + sqrt c) - e^epsilon Phi(d).

Where positions that are far apart have little but c in common, L' varies little, and few samples tell the rest.

Guarantees: everything is computed for the law of u = g + F x, x ~ N(0, I), with F a float64 matrix whose exact
F F' + c is no smaller than K in any entry, so the divergences bound those of K from above.
  - F is the Cholesky factor of (1 + t) K + t k (I + 1 1') - c 1 1', k the largest diagonal entry and t >= 1e-10. Its
    backward error is at most (b + 2) 2^-53 k in each entry (Higham, Theorem 10.3): a hundredth of t k.
  - `rounding` bounds what rounding moves log L and log-weights by; estimates are raised by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, special

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.gram import checked_gram

_LEAST_RAISE, _MOST_RAISE = 1e-10, 1e-6
_SHARE = 0.99  # of the most that all positions can share: the rest keeps its Cholesky factor well-conditioned
_LITTLE = 1e-6  # of the largest entry: less is not worth a formula


@dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """The law of u for one sigma: variance `shared` in common, and the rest, K = F F'."""

    factor: FloatArray  # F, lower triangular
    K: FloatArray
    diagonal: FloatArray  # of K
    largest: float  # entry of K: on its diagonal
    shared: float = 0.0  # c

    @property
    def cycle(self) -> int:
        """b, the number of positions."""
        return len(self.K)

    def noise(self, generator: np.random.Generator, rows: int) -> FloatArray:
        """Draws of the rest of u under Q, one a row."""
        return generator.standard_normal((rows, self.cycle)) @ self.factor.T

    def shift(self, positions: IntArray) -> FloatArray:
        """Sums of rows of K, those of the positions in each row."""
        total = self.K[positions[:, 0]]
        for column in positions.T[1:]:
            total += self.K[column]
        return total

    def times(self, p: FloatArray) -> FloatArray:
        """K p, for rows p."""
        return p @ self.K

    def rows(self) -> FloatArray:
        """Two of K, by which to guess."""
        return self.K[[0, self.cycle // 2]]

    def hubs(self, copies: int) -> Hubs:
        """Positions around a hub, for so many copies."""
        return Hubs(self, copies)

    def log_terms(self, u: FloatArray) -> FloatArray:
        """log v_j."""
        return u - self.diagonal / 2

    def rounding(self, tilt: float) -> float:
        """What rounding moves log L, and logarithms of products of `tilt` of the v_j, by: at most this.

        An entry of u is a product of a row of F, of norm <= sqrt(k), with x, of norm <= sqrt(b) + 10 + tilt
        sqrt(k) but for a probability below 1e-20; such a product of length b errs by b 2^-53 times the norms.
        """
        root = math.sqrt(self.largest)
        length = math.sqrt(self.cycle) + 10 + tilt * root
        return 4 * (self.cycle + 16) * 2.0**-53 * (1 + root) * length * (1 + tilt)


class Hubs:
    """Positions of which one, the hub i, attracts the others: j has the weight exp(q/2 K_ij), i the (q-1)st power of
    their mean Z_i."""

    def __init__(self, loss: PrivacyLoss, copies: int) -> None:
        self.copies, self.cycle = copies, loss.cycle
        exponents = copies / 2 * loss.K
        top = exponents.max(axis=1)
        sums = np.cumsum(np.exp(exponents - top[:, None]), axis=1)
        hub = (copies - 1) * (np.log(sums[:, -1] / loss.cycle) + top)
        self.log_scale = float(log_mean_exp(hub[None])[0][0])  # log W
        self._hub = np.cumsum(np.exp(hub - hub.max()))
        # Sums of all rows in one increasing array: row i from i to i + 1.
        self._others = (sums / sums[:, -1:] + np.arange(loss.cycle)[:, None]).ravel()

    def propose(self, draws: FloatArray) -> IntArray:
        """Positions, the hub first, from q uniform numbers in each row."""
        b = self.cycle
        hub = np.minimum(np.searchsorted(self._hub, draws[:, 0] * self._hub[-1], side="right"), b - 1)
        others = np.searchsorted(self._others, hub[:, None] + draws[:, 1:], side="right") - b * hub[:, None]
        return np.concatenate([hub[:, None], np.minimum(others, b - 1)], axis=1)

    def plausible(self, positions: IntArray, log_draws: FloatArray) -> tuple[IntArray, FloatArray | None]:
        """Those that may be kept: all, and log mean_r exp(q/2 star_r) by K itself."""
        return np.arange(len(positions)), None


@dataclass(frozen=True, eq=False)
class Law:
    """The same for every sigma: sigma^2 times `shared` and K, and sigma times F."""

    factor: FloatArray
    gram: FloatArray
    shared: float

    @property
    def cycle(self) -> int:
        return len(self.gram)

    @property
    def scale(self) -> float:
        """The norm of the longest column: sigma without amplification, but for a factor."""
        return math.sqrt(float(self.gram.max() + self.shared))

    def at(self, sigma: float) -> PrivacyLoss:
        """The law of L for noise z of deviation sigma."""
        sigma = _check.real("sigma", sigma, 0, 1e100, open_low=True, remedy="it is the deviation of z")
        largest = (float(self.gram.max()) + self.shared) / sigma**2
        _check.real("largest of gram / sigma^2", largest, 1e-12, 1e4, remedy="sigma is far from any use")
        K, up = self.gram / sigma**2, 1 + 2.0**-50
        return PrivacyLoss(self.factor / sigma, K, np.diag(K).copy(), float(K.max()), self.shared / sigma**2 * up)


def law(gram: FloatArray, share: float = _SHARE) -> Law:
    """The law of L for this Gram matrix; `share` of what all positions have in common is kept apart.

    >>> apart = law(np.array([[2.0, 1.0], [1.0, 2.0]]), share=1.0)
    >>> round(apart.shared, 6), apart.gram.round(6).tolist()
    (1.5, [[0.5, -0.5], [-0.5, 0.5]])
    """
    gram = checked_gram(gram)
    largest, raise_by = float(gram.max()), _LEAST_RAISE
    while raise_by <= _MOST_RAISE:
        raised = (1 + raise_by) * gram + raise_by * largest * (1 + np.eye(len(gram)))
        try:
            factor = linalg.cholesky(raised, lower=True, check_finite=False)
            first = linalg.solve_triangular(factor, np.ones(len(gram)), lower=True, check_finite=False)
            shared = share / float(first @ first)  # 1 / (1' K^-1 1) is the most
            if shared < _LITTLE * largest:
                shared = 0.0
            else:
                factor = linalg.cholesky(raised - shared, lower=True, check_finite=False)
            return Law(factor, factor @ factor.T, shared)
        except linalg.LinAlgError:
            raise_by *= 10
    raise ValueError("gram: not positive semidefinite, so no Gram matrix; use gram_matrix")


def privacy_loss(gram: FloatArray, sigma: float) -> PrivacyLoss:
    """The law of L for one sigma, with nothing kept apart."""
    return law(gram, share=0.0).at(sigma)


def log_mean_exp(logs: FloatArray, power: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """log mean_j v_j and log mean_j v_j^power of rows of log v_j."""
    top = logs.max(axis=1)
    shifted = logs - top[:, None]
    first = top + np.log(np.exp(shifted).mean(axis=1))
    if power == 1:
        return first, first
    shifted *= power
    return first, power * top + np.log(np.exp(shifted, out=shifted).mean(axis=1))


def log_removed(log_likelihood: FloatArray, epsilon: float, shared: float = 0.0) -> FloatArray:
    """log (L - e^epsilon)+, minus infinity where that is zero; its mean over what is `shared`, given the rest of L."""
    if shared == 0:
        excess = np.maximum(log_likelihood - epsilon, 0.0)
        with np.errstate(divide="ignore"):
            return log_likelihood + np.log(-np.expm1(-excess))
    root = math.sqrt(shared)
    d = (log_likelihood - epsilon) / root - root / 2
    first = log_likelihood + special.log_ndtr(d + root)
    difference = np.minimum(epsilon + special.log_ndtr(d) - first, -1e-300)
    return first + np.log(-np.expm1(difference))


def added(log_likelihood: FloatArray, epsilon: float) -> FloatArray:
    """(1 - e^epsilon L)+."""
    return -np.expm1(np.minimum(log_likelihood + epsilon, 0.0))
