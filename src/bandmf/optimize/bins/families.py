"""Families of Toeplitz strategies with c >= 0, by unknowns that are free: any x is a member of the family.

    InverseFamily     C^-1 = r,  r_0 = 1,  r_i = -exp(x_i) / (1 + sum_j exp(x_j)): all r_i < 0 and their sum is above
                      -1, so that c = 1 / r has no negative coefficient and dies out
    BufferedFamily    BLT by the gaps between the poles of C and C^-1 (optimize/buffered.py), scales above 0
    BandedFamily      C = 1, exp(x_1), ..., exp(x_{b-1})

Each knows the squared error of one unit of noise and c, with derivatives. Bins with c >= 0 need no absolute values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error.closed_form import BandedInverseError
from bandmf.error.toeplitz import ToeplitzError
from bandmf.error.toeplitz_response import divide_series
from bandmf.optimize import arguments
from bandmf.optimize.banded_inverse import chain_to_inverse
from bandmf.optimize.buffered import (
    COMPLEX_STEP,
    MOST_BUFFERS,
    Numbers,
    from_logs,
    log1m,
    partial_fractions,
    squared_error,
    to_logs,
)
from bandmf.optimize.objectives import Objective
from bandmf.optimize.toeplitz import aggregate
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Strategy, banded_inverse_square_root
from bandmf.strategies.square_root import square_root_coefficients
from bandmf.workloads import Workload

_FAINT = 1e-6  # a coefficient that a shorter start does not have: small, but not so small that it has no slope

_DECAYS_NO_MORE = 1e3  # times n: a buffer that loses less than one part in this during the run


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

    def squared_error(self, x: FloatArray) -> tuple[float, FloatArray]:
        """The objective's squared error of one unit of noise, and its gradient."""
        ...

    def coefficients(self, x: FloatArray) -> FloatArray:
        """c, the first column of C, at full length."""
        ...

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        """d/dx from d/dc."""
        ...


def family_named(name: str, size: int, workload: Workload, objective: str) -> Family:
    """The family of this name: `size` bands of C^-1, buffers, or bands of C."""
    largest = _check.choice("objective", objective, ("mean", "max")) == "max"
    name = _check.choice("family", name, ("banded-inverse", "blt", "banded"))
    if name == "blt":
        if not workload.is_prefix:
            raise ValueError("workload: a BLT is optimized for prefix sums only; leave it out, or use another family")
        return BufferedFamily(_check.whole("size", size, 1, MOST_BUFFERS), workload.steps, largest)
    arguments.require_toeplitz(workload, normalized=False)
    size = _check.whole("size", size, 1, workload.steps, f"steps={workload.steps}")
    return InverseFamily(size, workload, largest) if name == "banded-inverse" else BandedFamily(size, workload, largest)


def _refuse(strategy: Strategy, kind: type[Strategy]) -> ValueError:
    return _check.fail("start", strategy, f"must be a {kind.__name__} for this family", "leave it out")


@dataclass(frozen=True, eq=False)
class InverseFamily:
    """C^-1 has `bands` coefficients r_0 = 1, r_i < 0, of sum above zero."""

    bands: int
    workload: Workload
    largest: bool = False

    def starts(self) -> list[FloatArray]:
        return [self.unknowns(banded_inverse_square_root(self.workload.steps, self.bands))]

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
        return BandedInverse(self.inverse_coefficients(x), self.workload.steps)

    def squared_error(self, x: FloatArray) -> tuple[float, FloatArray]:
        found = BandedInverseError(self.inverse_coefficients(x), self.workload)
        value = found.maximum() if self.largest else found.mean()
        return value, self._chain(x, found.gradient(self.largest))

    def coefficients(self, x: FloatArray) -> FloatArray:
        return divide_series(np.eye(1, self.workload.steps)[0], self.inverse_coefficients(x))

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        r = self.inverse_coefficients(x)
        return self._chain(x, chain_to_inverse(r, self.coefficients(x), slope))

    @staticmethod
    def _chain(x: FloatArray, by_r: FloatArray) -> FloatArray:
        """d/dx from d/dr: r_i = -share_i, and d share_i / dx_j = share_i ([i = j] - share_j)."""
        shares = _shares(x)
        return shares * (shares @ by_r[1:] - by_r[1:])


def _shares(x: FloatArray) -> FloatArray:
    """exp(x_i) / (1 + sum_j exp(x_j)), without overflow."""
    top = max(0.0, float(x.max(initial=0.0)))
    weights = np.exp(x - top)
    return weights / (math.exp(-top) + float(np.sum(weights)))


@dataclass(frozen=True, eq=False)
class BufferedFamily:
    """BLTs with so many buffers on running sums."""

    buffers: int
    steps: int
    largest: bool = False

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

    def squared_error(self, x: FloatArray) -> tuple[float, FloatArray]:
        _, poles, _, weights = self._fractions(self._perturbed(x))
        values = squared_error(weights, log1m(poles), self.steps, self.largest)
        return float(values[0].real), values.imag / COMPLEX_STEP

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
    workload: Workload
    largest: bool = False

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
        return BandedToeplitz(self._theta(x), self.workload.steps, normalize_columns=False)

    def squared_error(self, x: FloatArray) -> tuple[float, FloatArray]:
        theta = self._theta(x)
        try:
            found = ToeplitzError(theta, self.workload, normalize=False)
        except ValueError:  # so near the edge of stability that its response does not settle
            return math.inf, np.zeros_like(x)
        value, head, beyond, tail = aggregate(found, Objective("last" if self.largest else "mean"))
        return value, (found.gradient(head, beyond, tail) * theta)[1:]

    def coefficients(self, x: FloatArray) -> FloatArray:
        return np.pad(self._theta(x), (0, self.workload.steps - self.bands))

    def pull_back(self, x: FloatArray, slope: FloatArray) -> FloatArray:
        return slope[1 : self.bands] * np.exp(x)

    @staticmethod
    def _theta(x: FloatArray) -> FloatArray:
        return np.exp(np.append(0.0, x))
