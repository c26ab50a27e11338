"""When an example takes part, and how the sigma that this needs depends on C: through products of its columns alone.

At noise sigma, (epsilon, delta) depends on X = C'C / sigma^2 and the law of the steps S in which an example takes part.
With p_s the posterior probability of s in S, the derivative of delta by X_st is proportional to E[p_s p_t | L =
e^epsilon] (Kahane). A law says which sums of X_st count, in a table, and has the posterior in the same form.

    FixedBins      S = {j, j + b, j + 2b, ...}, j drawn once: the table is the b x b Gram matrix of the bins' columns
    RedrawnBins    a position in every epoch, each drawn anew: X itself, up to `width` steps from the diagonal
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from scipy.fft import irfft, next_fast_len, rfft
from scipy.linalg import toeplitz

from bandmf._types import FloatArray
from bandmf.optimize.bins.lagged import Lagged, lagged

Indices = npt.NDArray[np.signedinteger]
Spectrum = npt.NDArray[np.complex128]
_MOST_WORK = 2**24  # of a product of all columns: some milliseconds
_GROUPS = 64


class Table(Protocol):
    """Products of the columns of one C = T D, and the gradient of sums over them."""

    @property
    def table(self) -> FloatArray: ...
    @property
    def d(self) -> FloatArray: ...

    def gradient(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """d(sum weights table) by c and by log d."""
        ...


class Law(Protocol):
    """What the search must know of a law of participation: `weights` are posteriors in the form of the table."""

    def products(self, c: FloatArray, d: FloatArray) -> Table:
        """Those of T with first column c and D = diag(d) that count."""
        ...

    def plausible(self, epsilon: float) -> FloatArray:
        """Weights to begin with."""
        ...


@dataclass(frozen=True, eq=False)
class FixedBins:
    """Every example draws one of `cycle` positions, once and for all.

    Where there are many, the Gram matrix is summed up in groups of neighbors, and single entries count beside it only
    near the diagonal: exact for posteriors that are smooth elsewhere.
    """

    cycle: int
    groups: int | None = None  # None: as many as positions

    @staticmethod
    def for_steps(cycle: int, steps: int) -> FixedBins:
        """With groups where a product of all columns takes long."""
        return FixedBins(cycle, None if steps * cycle**2 <= _MOST_WORK else _GROUPS)

    def products(self, c: FloatArray, d: FloatArray) -> Table:
        if self.groups is None:
            return gram(c, d, self.cycle)
        return grouped(c, d, self.cycle, self.groups, self._near)

    def weights(self, posterior: FloatArray) -> FloatArray:
        """Of E[p_i p_j] for the positions i and j."""
        if self.groups is None:
            return posterior
        b, own = self.cycle, _group(np.arange(self.cycle), self.cycle, self.groups)
        starts = np.searchsorted(own, np.arange(self.groups))
        sums = np.add.reduceat(np.add.reduceat(posterior, starts, axis=0), starts, axis=1)
        sizes = np.bincount(own, minlength=self.groups)
        means = sums / np.outer(sizes, sizes)
        near = np.zeros((b, self._near))
        for lag in range(min(self._near, b)):
            excess = np.diag(posterior, lag) - means[own[: b - lag], own[lag:]]
            near[lag:, lag] = excess if lag == 0 else 2 * excess
        return np.concatenate([means.ravel(), near.ravel()])

    def plausible(self, epsilon: float) -> FloatArray:
        lags = np.arange(self.cycle)
        return self.weights(toeplitz(_nearby(np.minimum(lags, self.cycle - lags), epsilon)))

    @property
    def _near(self) -> int:
        """Lags around the diagonal: two groups."""
        return 2 * -(-self.cycle // (self.groups or self.cycle))


def _nearby(lags: FloatArray, epsilon: float) -> FloatArray:
    """How much more often two positions are suspected together the nearer they are: seen at many budgets."""
    known = epsilon / (epsilon + 2)
    nearby = (1.0 + lags) ** (-epsilon / 4)
    return 1 - known + known * nearby / nearby.mean()


@dataclass(frozen=True, eq=False)
class Gram:
    """G_ij = <m_i, m_j>, m_j = sum over t = j, j + b, ... of d_t times column t of T."""

    table: FloatArray
    columns: FloatArray  # m, one a row
    shifted: FloatArray  # the first columns of T, one a row
    d: FloatArray

    def gradient(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        b, n = self.columns.shape
        slope = (weights + weights.T) @ self.columns
        by_shifted, by_d = np.zeros((b, n + b)), np.zeros(n)
        for start, bins, rows in _epochs(n, b):
            part = slope[:bins, start:]
            by_d[start : start + bins] = np.einsum("ju,ju->j", self.shifted[:bins, :rows], part)
            by_shifted[:bins, :rows] += self.d[start : start + bins, None] * part
        down, right = by_shifted.strides
        by_c = as_strided(by_shifted, (b, n), (down + right, right)).sum(axis=0)
        return by_c, by_d * self.d


def gram(c: FloatArray, d: FloatArray, cycle: int) -> Gram:
    """G of T diag(d), T the Toeplitz matrix with first column c.

    >>> gram(np.array([1.0, 0.5, 0.25]), np.array([1.0, 1.0, 2.0]), 2).table
    array([[6.3125, 1.625 ],
           [1.625 , 1.25  ]])
    """
    n = len(d)
    padded = np.concatenate([np.zeros(cycle), c])
    right = padded.strides[0]
    shifted = as_strided(padded[cycle:], (cycle, n), (-right, right), writeable=False)
    columns = np.zeros((cycle, n))
    for start, bins, rows in _epochs(n, cycle):
        columns[:bins, start:] += d[start : start + bins, None] * shifted[:bins, :rows]
    return Gram(columns @ columns.T, columns, shifted, d)


def _epochs(n: int, cycle: int) -> Iterator[tuple[int, int, int]]:
    """First step, bins, and rows of C from there on, of every epoch."""
    for start in range(0, n, cycle):
        yield start, min(cycle, n - start), n - start


@dataclass(frozen=True, eq=False)
class Grouped:
    """G summed up in groups of bins, and beside it single products of columns of one epoch that are near each other."""

    table: FloatArray
    columns: FloatArray  # m of each group, one a row
    spectra: tuple[Spectrum, Spectrum]  # of d, step by step in the row of its group, and of c
    group: Indices  # of every step
    near: Lagged
    together: npt.NDArray[np.bool_]  # whether the steps t - r and t are of one epoch, at [t % cycle, r]
    d: FloatArray

    def gradient(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        (groups, n), (placed, c) = self.columns.shape, self.spectra
        size, between = _padded_size(n), weights[: groups**2].reshape(groups, groups)
        slope = rfft((between + between.T) @ self.columns, size)
        by_c = irfft(np.einsum("gk,gk->k", placed.conj(), slope), size)[:n]
        by_d = irfft(c.conj() * slope, size)[self.group, np.arange(n)]
        near = weights[groups**2 :].reshape(self.together.shape) * self.together
        own_c, own_log_d = self.near.gradient(near[np.arange(n) % len(near)])
        return by_c + own_c, by_d * self.d + own_log_d


def grouped(c: FloatArray, d: FloatArray, cycle: int, groups: int, near: int) -> Grouped:
    """Products of T diag(d) in so many groups of bins, and single ones up to `near` steps apart."""
    n, steps = len(d), np.arange(len(d))
    size, group = _padded_size(n), _group(steps % cycle, cycle, groups)
    placed = np.zeros((groups, size))
    placed[group, steps] = d
    spectra = rfft(placed), rfft(c, size)
    columns = irfft(spectra[0] * spectra[1], size)[:, :n]
    single, together = lagged(c, d, near), np.arange(cycle)[:, None] >= np.arange(near)
    epochs = np.zeros((-(-n // cycle) * cycle, near))
    epochs[:n] = single.table
    folded = epochs.reshape(-1, cycle, near).sum(axis=0) * together
    table = np.concatenate([(columns @ columns.T).ravel(), folded.ravel()])
    return Grouped(table, columns, spectra, group, single, together, d)


def _group(bins: Indices, cycle: int, groups: int) -> Indices:
    found: Indices = bins * groups // cycle
    return found


def _padded_size(n: int) -> int:
    return int(next_fast_len(2 * n - 1, real=True))


@dataclass(frozen=True, eq=False)
class RedrawnBins:
    """Every example draws one of `cycle` positions in each epoch; products farther than `width` steps do not count."""

    cycle: int
    steps: int
    width: int

    def products(self, c: FloatArray, d: FloatArray) -> Table:
        return lagged(c, d, self.width)

    def plausible(self, epsilon: float) -> FloatArray:
        b, lags, steps = self.cycle, np.arange(self.width), np.arange(self.steps)[:, None]
        together = steps // b == (steps - lags) // b  # in the same epoch
        lags = np.minimum(lags, b - 1)
        return self.symmetric(np.where(together, _nearby(np.minimum(lags, b - lags), epsilon), 1.0))

    @staticmethod
    def symmetric(posterior: FloatArray) -> FloatArray:
        """E[p_{t-r} p_t] at [t, r] as weights of the table: off the diagonal each stands for two."""
        return posterior * np.where(np.arange(posterior.shape[1]), 2.0, 1.0)

    def weights(self, posterior: FloatArray) -> FloatArray:
        """Of E[p_s p_{s+r}] at [s, r]."""
        n, width = posterior.shape
        by_later = np.zeros((self.steps, self.width))
        for lag in range(min(width, self.width, n)):
            by_later[lag:, lag] = posterior[: n - lag, lag]
        return self.symmetric(by_later)
