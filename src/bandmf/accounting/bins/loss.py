"""The likelihood ratio of balls-in-bins, and the two divergences as expectations.

With K = G / sigma^2 and b positions, under the law Q of the noise alone,

    L = mean_j v_j,    v_j = exp(u_j - K_jj / 2),    u ~ N(0, K),
    remove:  delta = E_Q (L - e^epsilon)+,        add:  delta = E_Q (1 - e^epsilon L)+.

Both are convex functions of L, so both grow with every entry of K (Kahane's inequality).

Guarantees: everything is computed for the law of u = F x, x ~ N(0, I), with F a float64 matrix whose exact F F'
is no smaller than K in any entry, so the divergences bound those of K from above.
  - F is the Cholesky factor of (1 + t) K + t k (I + 1 1'), k the largest diagonal entry and t >= 1e-10. Its
    backward error is at most (b + 2) 2^-53 k in each entry (Higham, Theorem 10.3): a hundredth of t k.
  - `rounding` bounds what rounding moves log L and log-weights by; estimates are raised by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.gram import checked_gram

_LEAST_RAISE, _MOST_RAISE = 1e-10, 1e-6


@dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """K = F F' and its factor, for one sigma."""

    factor: FloatArray  # F, lower triangular
    K: FloatArray
    diagonal: FloatArray  # of K
    largest: float  # entry of K: on its diagonal

    @property
    def cycle(self) -> int:
        """b, the number of positions."""
        return len(self.K)

    def noise(self, generator: np.random.Generator, rows: int) -> FloatArray:
        """Draws of u under Q, one a row."""
        return generator.standard_normal((rows, self.cycle)) @ self.factor.T

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


def privacy_loss(gram: FloatArray, sigma: float) -> PrivacyLoss:
    """The law of L for noise z of deviation sigma."""
    gram = checked_gram(gram)
    sigma = _check.real("sigma", sigma, 0, 1e100, open_low=True, remedy="it is the deviation of z")
    K = gram / sigma**2
    largest = float(K.max())
    _check.real("largest of gram / sigma^2", largest, 1e-12, 1e4, remedy="sigma is far from any use")
    raise_by = _LEAST_RAISE
    while raise_by <= _MOST_RAISE:
        try:
            raised = (1 + raise_by) * K + raise_by * largest * (1 + np.eye(len(K)))
            factor = linalg.cholesky(raised, lower=True, check_finite=False)
            product = factor @ factor.T
            return PrivacyLoss(factor, product, np.diag(product).copy(), float(product.max()))
        except linalg.LinAlgError:
            raise_by *= 10
    raise ValueError("gram: not positive semidefinite, so no Gram matrix; use gram_matrix")


def log_mean_exp(logs: FloatArray, power: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """log mean_j v_j and log mean_j v_j^power of rows of log v_j."""
    top = logs.max(axis=1)
    shifted = logs - top[:, None]
    first = top + np.log(np.exp(shifted).mean(axis=1))
    if power == 1:
        return first, first
    shifted *= power
    return first, power * top + np.log(np.exp(shifted, out=shifted).mean(axis=1))


def log_removed(log_likelihood: FloatArray, epsilon: float) -> FloatArray:
    """log (L - e^epsilon)+: minus infinity where that is zero."""
    excess = np.maximum(log_likelihood - epsilon, 0.0)
    with np.errstate(divide="ignore"):
        return log_likelihood + np.log(-np.expm1(-excess))


def added(log_likelihood: FloatArray, epsilon: float) -> FloatArray:
    """(1 - e^epsilon L)+."""
    return -np.expm1(np.minimum(log_likelihood + epsilon, 0.0))
