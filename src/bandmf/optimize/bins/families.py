"""Families of Toeplitz strategies T with c >= 0, by unknowns that are free: any x is a member of the family.

    InverseFamily     T^-1 = r,  r_0 = 1,  r_i = -exp(x_i) / (1 + sum_j exp(x_j)): all r_i < 0 and their sum is above
                      -1, so that c = 1 / r has no negative coefficient and dies out
    BufferedFamily    BLT by the gaps between the poles of T and T^-1 (optimize/buffered.py), scales above 0
    BandedFamily      T = 1, exp(x_1), ..., exp(x_{b-1})

Each knows c, and the squared error of D^-1 T^-1 for any public gains 1 / d_t, with derivatives: tr(Q R R'), where R is
T^-1 and Q_st = M_st / (d_s d_t) what noise costs (costs.py). Sampling with c >= 0 needs no absolute values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error.toeplitz_response import divide_series
from bandmf.optimize.banded_inverse import chain_to_inverse
from bandmf.optimize.bins.costs import Costs
from bandmf.optimize.bins.lagged import lagged
from bandmf.optimize.buffered import (
    COMPLEX_STEP,
    MOST_BUFFERS,
    Numbers,
    from_logs,
    log1m,
    partial_fractions,
    residues,
    to_logs,
)
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Strategy, banded_inverse_square_root
from bandmf.strategies.square_root import square_root_coefficients

_FAINT = 1e-6  # a coefficient that a shorter start does not have: small, but not so small that it has no slope
_UNSTABLE = 1e6  # a coefficient of T^-1: T is then beyond the edge of stability
_DECAYS_NO_MORE = 1e3  # times n: a buffer that loses less than one part in this during the run


class Error(NamedTuple):
    """A squared error, with its derivatives by the unknowns and by the logarithms of the gains."""

    value: float
    by_x: FloatArray
    by_log_gains: FloatArray


class Family(Protocol):
    """What the search asks of a family."""

    def starts(self) -> list[FloatArray]:
        """Members to begin with when no better are known."""
        ...

    def unknowns(self, strategy: Strategy) -> FloatArray:
        """The x of a strategy, or of the member nearest to it in kind."""
        ...

    def strategy(self, x: FloatArray) -> Strategy:
        """The member with these unknowns."""
        ...

    def squared_error(self, x: FloatArray, costs: Costs, gains: FloatArray) -> Error:
        """Of one unit of noise."""
        ...

    def coefficients(self, x: FloatArray) -> FloatArray:
        """c, the first column of T, at full length."""
        ...

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        """d/dx from d/dc."""
        ...


def family_named(name: str, size: int, steps: int) -> Family:
    """The family of this name: `size` bands of T^-1, buffers, or bands of T."""
    name = _check.choice("family", name, ("banded-inverse", "blt", "banded"))
    if name == "blt":
        return BufferedFamily(_check.whole("size", size, 1, MOST_BUFFERS), steps)
    size = _check.whole("size", size, 1, steps, f"steps={steps}")
    return InverseFamily(size, steps) if name == "banded-inverse" else BandedFamily(size, steps)


def _refuse(strategy: Strategy, kind: type[Strategy]) -> ValueError:
    return _check.fail("start", strategy, f"must be a {kind.__name__} for this family", "leave it out")


@dataclass(frozen=True, eq=False)
class InverseFamily:
    """C^-1 has `bands` coefficients r_0 = 1, r_i < 0, of sum above zero."""

    bands: int
    steps: int

    def starts(self) -> list[FloatArray]:
        return [self.unknowns(banded_inverse_square_root(self.steps, self.bands))]

    def unknowns(self, strategy: Strategy) -> FloatArray:
        if not isinstance(strategy, BandedInverse):
            raise _refuse(strategy, BandedInverse)
        given = strategy.inverse_coefficients / strategy.inverse_coefficients[0]
        falls = np.full(self.bands - 1, _FAINT)
        shared = min(len(given), self.bands)
        falls[: shared - 1] = np.maximum(-given[1:shared], _FAINT)
        rest = max(1 - float(np.sum(falls)), _FAINT)
        return np.log(falls / rest)

    def inverse_coefficients(self, x: FloatArray) -> FloatArray:
        """r."""
        return np.append(1.0, -_shares(x))

    def strategy(self, x: FloatArray) -> Strategy:
        return BandedInverse(self.inverse_coefficients(x), self.steps)

    def squared_error(self, x: FloatArray, costs: Costs, gains: FloatArray) -> Error:
        value, by_r, by_log_gains = error_of_inverse(self.inverse_coefficients(x), costs, gains)
        return Error(value, self._chain(x, by_r), by_log_gains)

    def coefficients(self, x: FloatArray) -> FloatArray:
        return divide_series(np.eye(1, self.steps)[0], self.inverse_coefficients(x))

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        r = self.inverse_coefficients(x)
        return self._chain(x, chain_to_inverse(r, self.coefficients(x), slope))

    @staticmethod
    def _chain(x: FloatArray, by_r: FloatArray) -> FloatArray:
        """d/dx from d/dr: r_i = -share_i, and d share_i / dx_j = share_i ([i = j] - share_j)."""
        shares = _shares(x)
        return shares * (shares @ by_r[1:] - by_r[1:])


def error_of_inverse(r: FloatArray, costs: Costs, gains: FloatArray) -> Error:
    """tr(Q R R') by the bands of Q, as many as r has coefficients; the derivatives are by r and the gains.

    With time turned around, rows of R diag(gains) are columns.
    """
    products = lagged(r, gains[::-1], len(r))
    band = costs.band(len(r))[::-1] * np.where(np.arange(len(r)), 2.0, 1.0)
    by_r, by_log_gains = products.gradient(band)
    return Error(float(np.vdot(band, products.table)), by_r[: len(r)], by_log_gains[::-1])


def _shares(x: FloatArray) -> FloatArray:
    """exp(x_i) / (1 + sum_j exp(x_j)), without overflow."""
    top = max(0.0, float(x.max(initial=0.0)))
    weights = np.exp(x - top)
    return weights / (math.exp(-top) + float(np.sum(weights)))


@dataclass(frozen=True, eq=False)
class BufferedFamily:
    """BLTs with so many buffers."""

    buffers: int
    steps: int

    def starts(self) -> list[FloatArray]:
        ranges = [(low / (self.steps + 10), high) for low in (0.5, 5.0) for high in (0.3, 0.8, 0.99)]
        return [self._unbounded(np.linspace(math.log(low), math.log(high), 2 * self.buffers)) for low, high in ranges]

    def unknowns(self, strategy: Strategy) -> FloatArray:
        if not isinstance(strategy, BufferedToeplitz):
            raise _refuse(strategy, BufferedToeplitz)
        if strategy.buffers != self.buffers or np.any(strategy.scales < 0) or np.any(strategy.decays < 0):
            raise _check.fail("start", strategy, f"must have size={self.buffers} buffers, without negative scales")
        # C^-1 decays by the eigenvalues of diag(decays) - 1 scales'; this has the same, and is symmetric.
        root = np.sqrt(strategy.scales)
        inverse_decays = np.linalg.eigvalsh(np.diag(strategy.decays) - np.outer(root, root))
        poles = np.sort(np.concatenate([strategy.decays, inverse_decays]))[::-1]
        return self._unbounded(np.log1p(-np.clip(poles, _FAINT, 1 - 1e-12)))

    def strategy(self, x: FloatArray) -> Strategy:
        a, _, omega, _ = self._fractions(x)
        return BufferedToeplitz(np.real(omega), 1 - np.real(a), self.steps)

    def squared_error(self, x: FloatArray, costs: Costs, gains: FloatArray) -> Error:
        """With r_u = sum_k w_k q_k^(u-1), and h_k(s) = sum_{u <= s} r_u q_k^u,

        tr(Q R R') = sum_s Q_ss sum_{u <= s} r_u^2 + 2 sum_k w_k sum_{s < t} h_k(s) Q_st q_k^(t-s-1).
        """
        complements, w = self._inverse(self._perturbed(x))
        q, w_now = 1 - complements[0].real, w[0].real
        ages = np.arange(self.steps - 1)
        powers = np.pad(np.exp(np.outer(log1m(complements[0]).real, ages)), ((0, 0), (1, 0)))  # q^(u-1), from u = 1 on
        r = w_now @ powers
        r[0] = 1.0
        rising = powers * q[:, None]  # q^u
        rising[:, 0] = 1.0
        h = np.cumsum(r * rising, axis=1)
        squares = np.cumsum(r**2)
        noise = costs.diagonal * gains**2
        sums = [costs.decaying(float(q[k]), h[k] * gains, gains) for k in range(self.buffers)]
        value = float(noise @ squares) + 2 * sum(w_now[k] * found.value for k, found in enumerate(sums))
        by_h = 2 * w_now[:, None] * gains * np.array([found.by_x for found in sums])
        by_log_gains = 2 * noise * squares + np.sum(by_h * h, axis=0)
        by_log_gains += 2 * gains * (w_now @ np.array([found.by_y for found in sums]))
        later = np.cumsum(by_h[:, ::-1], axis=1)[:, ::-1]  # by r_u q^u
        by_r = np.sum(later * rising, axis=0) + 2 * r * np.cumsum(noise[::-1])[::-1]
        by_w = powers[:, 1:] @ by_r[1:] + 2 * np.array([found.value for found in sums])
        lowered = np.pad(ages[1:] * powers[:, 1:-1], ((0, 0), (2, 0)))[:, : self.steps]  # (u - 1) q^(u-2)
        by_q = w_now * (lowered @ by_r) + np.sum(later * r * np.arange(self.steps) * powers, axis=1)
        by_q += 2 * w_now * np.array([found.by_q for found in sums])
        return Error(value, (w.imag @ by_w - complements.imag @ by_q) / COMPLEX_STEP, by_log_gains)

    def coefficients(self, x: FloatArray) -> FloatArray:
        a, _, omega, _ = self._fractions(x)
        powers = np.exp(np.outer(np.real(log1m(a)), np.arange(self.steps - 1)))
        return np.append(1.0, np.real(omega) @ powers)

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        a, _, omega, _ = self._fractions(self._perturbed(x))
        logs, ages = log1m(a), np.arange(self.steps - 1)
        powers = np.exp(np.outer(logs[0].real, ages))
        by_omega, by_log = powers @ slope[1:], omega[0].real * (powers @ (ages * slope[1:]))
        return (omega.imag @ by_omega + logs.imag @ by_log) / COMPLEX_STEP

    def _fractions(self, x: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        return partial_fractions(self._reach * np.expm1(to_logs(x) / self._reach))

    def _inverse(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """1 - q and w of T^-1 = 1 + sum_k w_k x / (1 - q_k x)."""
        a, poles, _, _ = self._fractions(x)
        return poles[..., 1:], residues(poles[..., 1:], a)

    def _unbounded(self, logs: FloatArray) -> FloatArray:
        """The unknowns at given, sorted log(1 - pole)."""
        return from_logs(self._reach * np.log1p(np.maximum(logs / self._reach, -0.99)))

    @property
    def _reach(self) -> float:
        """No log(1 - pole) is below minus this: a buffer that is not needed goes to where it decays no more within n
        steps, and not so far that differences lose their digits."""
        return math.log(_DECAYS_NO_MORE * self.steps)

    @staticmethod
    def _perturbed(x: FloatArray) -> Numbers:
        """One row for each unknown, moved along the imaginary axis: exact derivatives."""
        return x + 1j * COMPLEX_STEP * np.eye(len(x))


@dataclass(frozen=True, eq=False)
class BandedFamily:
    """C has `bands` positive coefficients, the first of them one."""

    bands: int
    steps: int

    def starts(self) -> list[FloatArray]:
        return [np.log(square_root_coefficients(self.bands)[1:])]

    def unknowns(self, strategy: Strategy) -> FloatArray:
        given = strategy.toeplitz()
        if given is None:
            raise _check.fail("start", strategy, "must be Toeplitz, without normalized columns", "leave it out")
        theta = np.full(self.bands, _FAINT)
        shared = min(len(given), self.bands)
        theta[:shared] = np.maximum(given[:shared] / given[0], _FAINT)
        return np.log(theta[1:])

    def strategy(self, x: FloatArray) -> Strategy:
        return BandedToeplitz(self._theta(x), self.steps, normalize_columns=False)

    def squared_error(self, x: FloatArray, costs: Costs, gains: FloatArray) -> Error:
        theta = self._theta(x)
        r = divide_series(np.eye(1, self.steps)[0], theta)
        if not np.abs(r).max() < _UNSTABLE:
            return Error(math.inf, np.zeros_like(x), np.zeros_like(gains))
        value, by_r, by_log_gains = error_of_inverse(r, costs, gains)
        return Error(value, (chain_to_inverse(theta, r, by_r) * theta)[1:], by_log_gains)

    def coefficients(self, x: FloatArray) -> FloatArray:
        return np.pad(self._theta(x), (0, self.steps - self.bands))

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        return slope[1 : self.bands] * np.exp(x)

    @staticmethod
    def _theta(x: FloatArray) -> FloatArray:
        return np.exp(np.append(0.0, x))
