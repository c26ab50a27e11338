"""The Gram matrix of a long cycle, never written out: C = T D, T Toeplitz, D the scales of its columns, by FFT.

With A = the cycle x n matrix whose row j is m_j, the sum of the columns j, j + cycle, ... of |C|, G is A A', and

    A x:   correlate x with the coefficients of T, multiply by D, and add up the steps j, j + cycle, ...;
    A'p:   repeat p in every epoch, multiply by D, convolve with the coefficients.

Every m_j is at most one and the same column moved down by j, that of the largest scales of each epoch. So
G[i, j] <= G'[|i - j|], the autocorrelation of that column.

What all positions share (see loss.py): with weights w, u - (w.u) 1 has the covariance K - 1 r' - r 1' + s 1 1',
r = K w, s = w.r; with c = 2 max r - s, c 1 1' added, it is no smaller than K in any entry. The best w is
K^-1 1 / (1' K^-1 1), for which r and c are that constant; conjugate gradients come close to it.

Guarantees: coefficients and scales are float64 numbers no smaller than those of the strategy, and everything is
computed for the exact G that they have; what FFTs round is in `rounding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import fft

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins import gram
from bandmf.accounting.bins.gram import checked_gram, marks, raised_coefficients
from bandmf.accounting.bins.loss import Law, PrivacyLoss, law, log_mean_exp
from bandmf.strategies import BandedToeplitz
from bandmf.strategies.base import Strategy
from bandmf.strategies.scaled import Scaled

MOST_WRITTEN_OUT = 2048  # positions
_ITERATIONS = 200  # of conjugate gradients
_UNIT = 2.0**-53
_RAISE = 1e-10  # of variances, as they are computed: r, s, c and the envelope err by less


@dataclass(frozen=True, eq=False)
class LongGram:
    """G of |C| = T D for so many positions."""

    coefficients: FloatArray  # of T, >= 0
    scales: FloatArray  # D, one for each step
    cycle: int

    def __len__(self) -> int:
        return self.cycle

    @property
    def steps(self) -> int:
        return len(self.scales)

    @property
    def numbers(self) -> FloatArray:
        """All that it depends on."""
        return np.concatenate([self.coefficients, self.scales, [self.cycle]])

    def times(self, x: FloatArray) -> FloatArray:
        """A x, for rows x of n numbers."""
        found = fft.irfft(fft.rfft(x, self._size) * np.conj(self._spectrum), self._size)[:, : self.steps] * self.scales
        padded = np.pad(found, ((0, 0), (0, -self.steps % self.cycle)))
        return padded.reshape(len(x), padded.shape[1] // self.cycle, self.cycle).sum(axis=1)

    def transposed(self, p: FloatArray) -> FloatArray:
        """A'p, for rows p of `cycle` numbers."""
        repeated = np.tile(p, -(-self.steps // self.cycle))[:, : self.steps] * self.scales
        return fft.irfft(fft.rfft(repeated, self._size) * self._spectrum, self._size)[:, : self.steps]

    @cached_property
    def diagonal(self) -> FloatArray:
        """G_jj: for plain T, sums of squares of one column; else each column of its own."""
        column = self._column(np.array([self.scales[e] for e in range(0, self.steps, self.cycle)]))
        if np.ptp(self.scales) == 0:
            return np.cumsum(np.square(column))[::-1][: self.cycle].copy()
        rows = max(1, 2**22 // self.steps)
        parts = []
        for begin in range(0, self.cycle, rows):
            unit = np.eye(min(rows, self.cycle - begin), self.cycle, begin)
            parts.append(np.square(self.transposed(unit)).sum(axis=1))
        return np.concatenate(parts)

    @cached_property
    def envelope(self) -> FloatArray:
        """G'[d] >= G[i, j] for |i - j| = d."""
        padded = np.pad(self.scales, (0, -self.steps % self.cycle)).reshape(-1, self.cycle)
        column = self._column(padded.max(axis=1))
        size = fft.next_fast_len(self.steps + self.cycle, real=True)
        found = fft.irfft(np.abs(fft.rfft(column, size)) ** 2, size)[: self.cycle]
        return found + 64 * math.log2(size) * _UNIT * float(column @ column)

    @cached_property
    def shared(self) -> tuple[FloatArray, FloatArray, float, float]:
        """w, r = G w, s = w.r and c."""
        ones = np.ones((1, self.cycle))
        x, residual = np.zeros_like(ones), ones.copy()
        direction, size = residual.copy(), float(self.cycle)
        best: tuple[FloatArray, FloatArray, float, float] | None = None
        for iteration in range(_ITERATIONS):
            product = self.times(self.transposed(direction))
            step = size / float((direction * product).sum())
            x, residual = x + step * direction, residual - step * product
            following = float(np.square(residual).sum())
            direction, size = residual + following / size * direction, following
            if iteration % 10 == 9 or following < 1e-16:
                w = x[0] / x.sum()
                r = self.times(self.transposed(w[None]))[0]
                s = float(w @ r)
                found = w, r, s, 2 * float(r.max()) - s
                if best is not None and found[3] > 0.999 * best[3]:
                    break
                best = found
        assert best is not None
        return best

    @cached_property
    def marks(self) -> tuple[float, float, float]:
        """As `gram.marks`: trace, sum, and a sum with pseudo-random weights."""
        weights = np.random.Generator(np.random.Philox(self.cycle)).random((1, self.cycle))
        both = self.transposed(np.concatenate([np.ones((1, self.cycle)), weights]))
        return float(self.diagonal.sum()), float(both[0] @ both[0]), float(both[1] @ both[1])

    def rounding(self, length: float) -> float:
        """By how much an entry of A x may be off, |x| <= length: FFTs err by log2(size) units of the largest sums."""
        norm = float(self.coefficients.sum()) * float(self.scales.max()) * -(-self.steps // self.cycle)
        return 16 * math.log2(self._size) * _UNIT * norm * length

    def _column(self, scales: FloatArray) -> FloatArray:
        """The column of position 0 with these scales of its steps."""
        ones = np.zeros(self.steps)
        ones[:: self.cycle] = scales
        found = fft.irfft(fft.rfft(ones, self._size) * self._spectrum, self._size)[: self.steps]
        return np.maximum(found, 0.0) + self.rounding(float(scales.max()))

    @cached_property
    def _spectrum(self) -> np.ndarray:
        return np.asarray(fft.rfft(self.coefficients, self._size))

    @cached_property
    def _size(self) -> int:
        return int(fft.next_fast_len(self.steps + len(self.coefficients), real=True))


def long_gram(strategy: Strategy, cycle: int) -> LongGram:
    """The Gram matrix of balls-in-bins for a cycle of any length: a Toeplitz strategy, or one with scaled columns.

    >>> from bandmf.strategies import BandedToeplitz
    >>> C = BandedToeplitz([1.0, -0.5], steps=4, normalize_columns=False)
    >>> long_gram(C, cycle=2).diagonal.round(6)
    array([2.5 , 2.25])
    """
    n = strategy.steps
    cycle = _check.whole("cycle", cycle, 1, n, f"steps={n}")
    found = _factors(strategy)
    if found is None:
        remedy = "use a Toeplitz strategy, a banded inverse or a BLT, with step scales or without"
        raise _check.fail("cycle", cycle, "too long for a general strategy", remedy)
    coefficients, scales = found
    up = 1 + 2 * (n + 2 * len(coefficients) + 64) * _UNIT
    return LongGram(coefficients[:n] * up, np.abs(scales) * up, cycle)


def _factors(strategy: Strategy) -> tuple[FloatArray, FloatArray] | None:
    """T and D, no smaller than those of |C| but for rounding, which is added later; None for other strategies."""
    n = strategy.steps
    plain, scales = (strategy.strategy, strategy.scales) if isinstance(strategy, Scaled) else (strategy, np.ones(n))
    if isinstance(plain, BandedToeplitz) and plain.normalize_columns:
        coefficients = np.abs(plain.coefficients)
        norms = np.sqrt(np.cumsum(np.square(coefficients)))
        return coefficients, scales / norms[np.minimum(n - np.arange(n), len(coefficients)) - 1]
    found = raised_coefficients(plain)
    return None if found is None else (found, scales)


@dataclass(frozen=True, eq=False)
class LongLoss:
    """The law of u for one sigma, as PrivacyLoss: `shared` in common, and the rest."""

    gram: LongGram
    sigma: float

    @property
    def cycle(self) -> int:
        return self.gram.cycle

    @property
    def shared(self) -> float:
        return (self.gram.shared[3] + _RAISE * self.gram.envelope[0]) / self.sigma**2

    @cached_property
    def diagonal(self) -> FloatArray:
        _, r, s, _ = self.gram.shared
        return (self.gram.diagonal - 2 * r + s) / self.sigma**2

    @cached_property
    def largest(self) -> float:
        return float(self.diagonal.max())

    @cached_property
    def envelope(self) -> FloatArray:
        """No smaller than the covariance of the rest, by distance."""
        _, r, s, _ = self.gram.shared
        return (
            self.gram.envelope * (1 + _RAISE) - 2 * float(r.min()) + s + _RAISE * self.gram.envelope[0]
        ) / self.sigma**2

    def noise(self, generator: np.random.Generator, rows: int) -> FloatArray:
        return self._rest(self.gram.times(generator.standard_normal((rows, self.gram.steps)))) / self.sigma

    def shift(self, positions: IntArray) -> FloatArray:
        """Sums of rows of the covariance."""
        counts = np.zeros((len(positions), self.cycle))
        np.add.at(counts, (np.arange(len(positions))[:, None], positions), 1.0)
        return self.times(counts)

    def times(self, p: FloatArray) -> FloatArray:
        """K p, for rows p."""
        _, r, s, _ = self.gram.shared
        product = self.gram.times(self.gram.transposed(p)) - (p @ r)[:, None]  # G p - 1 r'p
        total = p.sum(axis=1)[:, None]
        return (product + (s * total - r * total)) / self.sigma**2

    def rows(self) -> FloatArray:
        middle = np.abs(np.arange(self.cycle) - self.cycle // 2)
        return np.array([self.envelope, self.envelope[middle]])

    def log_terms(self, u: FloatArray) -> FloatArray:
        return u - self.diagonal / 2

    def rounding(self, tilt: float) -> float:
        root = math.sqrt(float(self.gram.envelope[0])) / self.sigma
        length = math.sqrt(self.gram.steps) + 10 + (1 + tilt) * root
        weights = 1 + float(np.abs(self.gram.shared[0]).sum())
        extra = _RAISE * (1 + tilt) ** 2 * (1 + root) ** 2  # of variances and of sums of rows of K
        return (1 + tilt) * (1 + root) * weights * self.gram.rounding(length) / self.sigma + extra

    def hubs(self, copies: int) -> EnvelopeHubs:
        return EnvelopeHubs(self, copies)

    def _rest(self, u: FloatArray) -> FloatArray:
        return u - (u @ self.gram.shared[0])[:, None]


class EnvelopeHubs:
    """Positions around a hub, with weights exp(q/2 envelope[|i - j|]): windows of one array of sums."""

    def __init__(self, loss: LongLoss, copies: int) -> None:
        self.envelope, self.copies, b = loss.envelope, copies, loss.cycle
        exponents = copies / 2 * np.concatenate([self.envelope[:0:-1], self.envelope])
        top = float(exponents.max())
        self._sums = np.concatenate([[0.0], np.cumsum(np.exp(exponents - top))])
        # Position j given the hub i is entry j - i + b - 1.
        self._start = self._sums[b - 1 - np.arange(b)]
        self._total = self._sums[2 * b - 1 - np.arange(b)] - self._start
        hub = (copies - 1) * (np.log(self._total / b) + top)
        self.log_scale = float(log_mean_exp(hub[None])[0][0])
        self._hub = np.cumsum(np.exp(hub - hub.max()))

    def propose(self, draws: FloatArray) -> IntArray:
        b = len(self._start)
        hub = np.minimum(np.searchsorted(self._hub, draws[:, 0] * self._hub[-1], side="right"), b - 1)
        wanted = self._start[hub][:, None] + draws[:, 1:] * self._total[hub][:, None]
        others = np.searchsorted(self._sums, wanted, side="right") - 1 + hub[:, None] - (b - 1)
        return np.concatenate([hub[:, None], np.clip(others, 0, b - 1)], axis=1)

    def plausible(self, positions: IntArray, log_draws: FloatArray) -> tuple[IntArray, FloatArray | None]:
        """Those that would be kept if K were the envelope, and log mean_r exp(q/2 star_r) of the envelope for them."""
        distances = np.abs(positions[:, :, None] - positions[:, None, :])
        stars = self.envelope[distances].sum(axis=2) - self.envelope[0]
        allowed = log_mean_exp(self.copies / 2 * stars)[0]
        kept = np.flatnonzero(log_draws < stars.sum(axis=1) / 2 - allowed)
        return kept, allowed[kept]


@dataclass(frozen=True, eq=False)
class LongLaw:
    """The law for every sigma."""

    gram: LongGram

    @property
    def cycle(self) -> int:
        return self.gram.cycle

    @property
    def shared(self) -> float:
        return self.gram.shared[3]

    @property
    def scale(self) -> float:
        """The norm of the longest column: sigma without amplification, but for a factor."""
        return math.sqrt(float(self.gram.envelope[0]))

    def at(self, sigma: float) -> LongLoss:
        sigma = _check.real("sigma", sigma, 0, 1e100, open_low=True, remedy="it is the deviation of z")
        largest = float(self.gram.envelope[0]) / sigma**2
        _check.real("largest of gram / sigma^2", largest, 1e-12, 1e4, remedy="sigma is far from any use")
        return LongLoss(self.gram, sigma)


Loss = PrivacyLoss | LongLoss
Gram = FloatArray | LongGram  # of bins: written out, or for a long cycle


def law_of(gram: Gram) -> Law | LongLaw:
    """The law of L for either."""
    return LongLaw(gram) if isinstance(gram, LongGram) else law(gram)


def checked(gram: Gram) -> Gram:
    """`gram`, if it can be one."""
    return gram if isinstance(gram, LongGram) else checked_gram(gram)


def marks_of(gram: Gram) -> tuple[float, float, float]:
    """Three numbers by which it is recognized."""
    return gram.marks if isinstance(gram, LongGram) else marks(gram)


def gram_matrix(strategy: Strategy, cycle: int) -> Gram:
    """The Gram matrix of balls-in-bins: written out, or as an operator where the cycle is long."""
    if cycle <= MOST_WRITTEN_OUT or _factors(strategy) is None:
        return gram.gram_matrix(strategy, cycle)
    return long_gram(strategy, cycle)
