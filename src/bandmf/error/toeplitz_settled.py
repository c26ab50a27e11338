"""Errors of banded Toeplitz strategies on running sums when n is so large that the response has long settled.

With S = theta(1) and x = 1/S the response is w_i = x + e_i, where e has the generating function

    phi(z) / (S theta(z)),      phi_k = theta_{k+1} + theta_{k+2} + ...,

and dies out. Sums over all of it have closed forms in b numbers: with m1 = sum j theta_j, m2 = sum j (j-1)/2 theta_j,

    sum e_i = m1 / S^2,      sum i e_i = (m2 S - m1^2) / S^3,      sum e_i^2 = I(theta, phi) / S^2,

I the integral of |phi / theta|^2 over the unit circle, by the recursion of Astrom, Jury and Agniel (1970), O(b^2).
Damping e_i by s^i and differentiating gives sum i e_i^2. So n enters through boundary terms alone, and the cost
depends on b only:

    mean squared error = x^2 (n + 1) / 2 + 2 x (sum e - sum i e / n) + sum e^2 - sum i e^2 / n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import hankel, toeplitz

from bandmf import band_columns
from bandmf._types import FloatArray
from bandmf.error.band_covariance import BandCovariance
from bandmf.error.toeplitz import NormalizedColumns, ToeplitzError
from bandmf.error.toeplitz_response import MOST_PEAK, inverse_peak
from bandmf.streaming import lfilter
from bandmf.workloads import Workload

SMALLEST = 1 << 22  # steps from which the closed forms are used: below, the response itself is as quick
_SETTLED = 40  # every mode of e must have shrunk by exp(-_SETTLED)
_STEP = 1e-3  # of the damping, relative to the mean age


@dataclass(frozen=True)
class Integral:
    """I(theta, phi) and its derivatives; infinite where theta has a root inside the unit circle."""

    value: float
    by_theta: FloatArray
    by_phi: FloatArray


def integral(theta: FloatArray, phi: FloatArray) -> Integral:
    """sum_i e_i^2 for the series phi(z) / theta(z), both with as many coefficients.

    >>> integral(np.array([1.0, -0.5]), np.array([1.0, 0.0])).value  # 1 + 1/4 + 1/16 + ...
    1.3333333333333333
    """
    degree = len(theta) - 1
    levels = [(theta, phi)]
    for k in range(degree, 0, -1):
        a, b = levels[-1]
        backward = a[:0:-1]
        levels.append((a[:k] - (a[k] / a[0]) * backward, b[:k] - (b[k] / a[0]) * backward))
        if not levels[-1][0][0] * theta[0] > 0:
            return Integral(math.inf, np.zeros_like(theta), np.zeros_like(phi))
    value = sum(float(b[-1] ** 2 / a[0]) for a, b in levels) / float(theta[0])
    d_a, d_b = np.zeros(0), np.zeros(0)
    for a, b in reversed(levels):
        d_a, d_b = _adjoint(a, b, d_a, d_b)
        d_a[0] -= (b[-1] / a[0]) ** 2 / theta[0]
        d_b[-1] += 2 * b[-1] / a[0] / theta[0]
    d_a[0] -= value / theta[0]
    return Integral(value, d_a, d_b)


def inverse_energy(theta: FloatArray) -> float:
    """theta_0^2 times the sum of squares of the series 1 / theta(z): one for theta = 1; infinite where unstable."""
    energy, a = 1.0, theta
    for k in range(len(theta) - 1, 0, -1):
        reflection = float(a[k] / a[0])
        if not abs(reflection) < 1:
            return math.inf
        energy /= 1 - reflection**2
        a = a[:k] - reflection * a[:0:-1]
    return energy


def _adjoint(a: FloatArray, b: FloatArray, d_a: FloatArray, d_b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The derivatives at one level from those at the level below it."""
    k = len(a) - 1
    if k == 0:
        return np.zeros(1), np.zeros(1)
    alpha, beta, backward = a[k] / a[0], b[k] / a[0], a[:0:-1]
    d_alpha, d_beta = -float(d_a @ backward), -float(d_b @ backward)
    up_a, up_b = np.append(d_a, d_alpha / a[0]), np.append(d_b, d_beta / a[0])
    up_a[1:] -= (alpha * d_a + beta * d_b)[::-1]
    up_a[0] -= (d_alpha * alpha + d_beta * beta) / a[0]
    return up_a, up_b


class SettledToeplitz:
    """The plain Toeplitz strategy with coefficients theta on running sums of n steps, with gradients."""

    def __init__(self, theta: FloatArray, steps: int) -> None:
        self.theta, self.steps = theta, steps
        self._lags = np.arange(len(theta))
        self.sum, self.first = float(theta.sum()), float(self._lags @ theta)
        self.second = float(self._lags * (self._lags - 1) / 2 @ theta)
        self.limit = 1 / self.sum if self.sum else math.inf
        phi = np.append(np.cumsum(theta[:0:-1])[::-1], 0.0)
        self._phi, self._energy = phi, integral(theta, phi)
        self.squares = self._energy.value / self.sum**2 if self.sum else math.inf
        damped = self._lags * (theta * self._energy.by_theta + phi * self._energy.by_phi)
        self.aged_squares = 0.5 * float(damped.sum()) / self.sum**2 if self.sum else math.inf
        self.total = self.first / self.sum**2 if self.sum else math.inf
        self.aged_total = (self.second * self.sum - self.first**2) / self.sum**3 if self.sum else math.inf

    @property
    def applies(self) -> bool:
        """Whether e has died out by the end, every mode of it, and nothing is lost to rounding."""
        if not math.isfinite(self.squares) or inverse_peak(self.theta, self.steps) > MOST_PEAK:
            return False
        grown = np.exp(_SETTLED / self.steps * self._lags)  # still stable: every mode shrinks by exp(-_SETTLED)
        return math.isfinite(inverse_energy(self.theta * grown))

    def mean(self) -> float:
        """The mean squared error."""
        n, x = self.steps, self.limit
        return x * x * (n + 1) / 2 + 2 * x * (self.total - self.aged_total / n) + self.squares - self.aged_squares / n

    def last(self) -> float:
        """The squared error of the last step, which is the largest."""
        return self.steps * self.limit**2 + 2 * self.limit * self.total + self.squares

    def gradient(self, largest: bool) -> FloatArray:
        """d mean / dtheta, or d last / dtheta."""
        n, x, lags = self.steps, self.limit, self._lags
        d_x = -x * x  # for every coefficient alike
        d_total = (lags - 2 * self.first * x) * x * x
        d_squares = self._energy_gradient(self._energy, np.ones_like(self.theta)) * x * x - 2 * self.squares * x
        if largest:
            return 2 * n * x * d_x + 2 * d_x * self.total + 2 * x * d_total + d_squares
        d_aged = (lags * (lags - 1) / 2 * self.sum + self.second - 2 * self.first * lags) * x**3
        d_aged = d_aged - 3 * self.aged_total * x
        inner, d_inner = self.total - self.aged_total / n, d_total - d_aged / n
        slope = x * d_x * (n + 1) + 2 * (d_x * inner + x * d_inner) + d_squares
        return slope - self._aged_squares_gradient() / n

    def _energy_gradient(self, energy: Integral, damping: FloatArray) -> FloatArray:
        """Of I(theta s^j, phi s^j) with respect to theta, phi being sums of theta."""
        by_phi = np.append(0.0, np.cumsum(energy.by_phi * damping)[:-1])
        return energy.by_theta * damping + by_phi

    def _aged_squares_gradient(self) -> FloatArray:
        """By central differences in the damping; it counts one part in n only."""
        step = _STEP * self.squares / max(self.aged_squares, self.squares)
        sides = []
        for s in (1 + step, 1 - step):
            damping = np.power(s, self._lags.astype(np.float64))
            sides.append(self._energy_gradient(integral(self.theta * damping, self._phi * damping), damping))
        d_aged = (sides[0] - sides[1]) / (4 * step)
        return d_aged / self.sum**2 - 2 * self.aged_squares / self.sum

    def lag_sums(self, last: int, count: int) -> FloatArray:
        """sum_{t <= last} w_t w_{t+c} for c = 0 ... count - 1, `last` being near the end."""
        b, x = len(self.theta), self.limit
        e = _first_terms(self._phi / self.sum, self.theta, max(count, b))
        tail = self.total - np.concatenate([[0.0], np.cumsum(e)[: count - 1]])  # sum of e_t from t = c on
        return (last + 1) * x * x + x * (self.total + tail) + self._autocorrelation(e, count)

    def _autocorrelation(self, e: FloatArray, count: int) -> FloatArray:
        """r_c = sum_t e_t e_{t+c}: the Yule-Walker equations sum_j theta_j r_{|c-j|} = sum_t N_t e_{t-c}."""
        b = len(self.theta)
        N = self._phi / self.sum
        right = np.array([float(N[c:] @ e[: b - c]) for c in range(b)])
        matrix = toeplitz(self.theta, np.zeros(b)) + hankel(self.theta)
        matrix[:, 0] -= self.theta  # r_0 stands in both halves
        r = np.linalg.solve(matrix, right)
        for c in range(b, count):  # beyond, the recursion of e itself goes on
            r = np.append(r, -(self.theta[1:] @ r[c - 1 : c - b : -1]) / self.theta[0])
        return r[:count]


class SettledError:
    """The closed errors of a banded Toeplitz strategy, column-normalized or not, on so many running sums.

    As in toeplitz.py, normalizing changes the last b - 1 steps only, from the covariance of the outputs before.
    """

    def __init__(self, theta: FloatArray, workload: Workload, normalize: bool) -> None:
        self._given = theta, workload, normalize
        theta = theta / np.linalg.norm(theta) if normalize else theta
        bands = len(theta) if normalize else 1
        self.steps, self.head = workload.steps, SettledToeplitz(theta, workload.steps - (bands - 1))
        self.applies, self.tail = self.head.applies, np.zeros(0)
        self.condition = self.growth = 1.0
        if self.applies and bands > 1:
            self.tail = self._normalized_tail(theta, workload)

    def _normalized_tail(self, theta: FloatArray, workload: Workload) -> FloatArray:
        assert workload.inverse_columns is not None
        size = len(theta)  # sub-diagonals of M = C A^-1
        first = self.head.steps - size
        earlier = np.tril(np.full((size, size), self.head.limit), -1)
        start = toeplitz(self.head.lag_sums(first, size)) + earlier @ earlier.T
        columns = NormalizedColumns(theta, self.steps - first).compact
        product = band_columns.product(columns, workload.inverse_columns(first, self.steps))
        block = BandCovariance(product, start)
        self.condition = block.condition
        return block.errors

    def per_step(self) -> FloatArray:
        """As many numbers as steps, so the settling is followed after all."""
        return ToeplitzError(*self._given).per_step()

    def mean(self) -> float:
        return (self.head.mean() * self.head.steps + float(np.sum(self.tail))) / self.steps

    def maximum(self) -> float:
        return max([self.head.last(), *self.tail])

    def last(self) -> float:
        """The squared error of the last step."""
        return float(self.tail[-1]) if len(self.tail) else self.head.last()


def _first_terms(numerator: FloatArray, theta: FloatArray, count: int) -> FloatArray:
    return lfilter([1.0], theta, np.pad(numerator, (0, max(0, count - len(numerator))))[:count])
