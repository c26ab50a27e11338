"""The likelihood ratio of b-min-sep sampling with a banded strategy.

An example takes part at the steps S, drawn by the law of `law`. With m_S the sum of the columns S of |C| / sigma,

    L(x) = E_S exp(<m_S, x> - |m_S|^2 / 2),    remove: E (L - e^epsilon)+,    add: E (1 - e^epsilon L)+,    x ~ N(0, I).

C has at most b bands and steps in S are at least b apart, so their columns c_i do not overlap: the exponent is a sum
over S of E_i = <c_i, x> - |c_i|^2 / 2, and with f_i the same expectation for an example that is free at step i,

    f_i = (1 - p) f_{i+1} + p e^{E_i} f_{i+b},    f_i = 1 for i >= n,    L = sum_w start_w f_w.

|C|, not C: gradients are chosen adaptively (see accounting.bins.gram).

Guarantees: columns are no smaller than the exact |C| / sigma, entry by entry, and both divergences grow with every
inner product of columns (Kahane's inequality). `rounding` bounds how far the computed log L may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.min_separation.law import checked_law, start_probabilities
from bandmf.strategies.base import Strategy

_BLOCK = 64  # columns multiplied at once, at least
_ROUNDING = 2.0**-53
_MOST_ENTRIES = 2**27  # of the blocks of C
_LARGEST_NORM = 20.0  # of a column over sigma: beyond, exp overflows, and there is no privacy


@dataclass(frozen=True, eq=False)
class Loss:
    """|C| / sigma by compact columns, and the law of S. Arrays of several x have one in each column."""

    columns: FloatArray  # steps x separation
    separation: int
    probability: float
    start: FloatArray  # probabilities of the waits at step 0
    blocks: tuple[FloatArray, ...]  # of C', for products: columns x rows
    norms: FloatArray  # |c_i|^2

    @property
    def steps(self) -> int:
        return len(self.columns)

    @property
    def most(self) -> int:
        """Participations that an example can have."""
        return -(-self.steps // self.separation)

    def means(self, counts: FloatArray) -> FloatArray:
        """C counts."""
        result = np.zeros_like(counts, dtype=np.float64)
        for begin, block in self._placed():
            rows = slice(begin, begin + block.shape[1])
            result[rows] += block.T @ counts[begin : begin + len(block)]
        return result

    def products(self, x: FloatArray) -> FloatArray:
        """C' x: <c_i, x> for every step i."""
        result = np.empty_like(x)
        for begin, block in self._placed():
            np.matmul(block, x[begin : begin + block.shape[1]], out=result[begin : begin + len(block)])
        return result

    def log_likelihoods(self, products: FloatArray) -> FloatArray:
        """log L of every column of C' x, whose memory is used. Sums of positive terms, scaled block by block."""
        n, b, keep = self.steps, self.separation, 1 - self.probability
        odds = products
        odds -= self.norms[:, None] / 2
        np.exp(odds, out=odds)
        odds *= self.probability
        ahead, logs = np.ones((b, odds.shape[1])), np.zeros(odds.shape[1])  # f of the next block
        f = np.ones((b + 1, odds.shape[1]))
        for begin in range((n - 1) // b * b, -1, -b):
            stop = min(begin + b, n)
            joined = odds[begin:stop]
            joined *= ahead[: stop - begin]
            f[stop - begin] = ahead[0]
            for j in range(stop - begin - 1, -1, -1):
                np.multiply(f[j + 1], keep, out=f[j])
                f[j] += joined[j]
            scale = f[:b].max(axis=0)
            np.divide(f[:b], scale, out=ahead)
            logs += np.log(scale)
        return logs + np.log(self.start @ ahead)

    def posterior(self, x: FloatArray) -> tuple[float, FloatArray]:
        """log L of one x, and the probabilities that S holds each step, given it: log L has the gradient C p."""
        n, b, p = self.steps, self.separation, self.probability
        odds = (self.products(x[:, None])[:, 0] - self.norms / 2 + math.log(p)).tolist()
        log_keep = math.log1p(-p) if p < 1 else -math.inf
        ahead, past = [0.0] * (n + b), [-math.inf] * (n + b)  # of being free at i: log f_i; what leads there
        past[:b] = [math.log(probability) if probability else -math.inf for probability in self.start]
        for i in range(n - 1, -1, -1):
            ahead[i] = _log_sum(log_keep + ahead[i + 1], odds[i] + ahead[i + b])
        for i in range(n):
            past[i + 1] = _log_sum(past[i + 1], past[i] + log_keep)
            past[i + b] = _log_sum(past[i + b], past[i] + odds[i])
        log_likelihood = float(np.logaddexp.reduce(np.log(np.maximum(self.start, 1e-300)) + ahead[:b]))
        joined = np.array(past[:n]) + odds + np.array(ahead[b:])
        return log_likelihood, np.exp(joined - log_likelihood)

    @property
    def farthest(self) -> float:
        """|m_S| is at most this."""
        return math.sqrt(float(self.norms.max()) * self.most)

    def rounding(self, distance: float) -> float:
        """What rounding moves log L by, where x is noise moved by at most `distance`: at most this.

        A product of length m errs by m 2^-53 times the norms; the norm of the noise is below sqrt(n) + 10 but for a
        probability below 1e-20, and S has at most `most` steps. The recursion has n steps of three operations each.
        """
        length = math.sqrt(self.steps) + 10 + distance
        width = self.blocks[0].shape[1] + self.separation
        root = math.sqrt(float(self.norms.max()))
        return 4 * (self.most * width * root * length + 4 * self.steps + 16) * _ROUNDING

    def _placed(self) -> list[tuple[int, FloatArray]]:
        size = len(self.blocks[0])
        return [(number * size, block) for number, block in enumerate(self.blocks)]


def privacy_loss(strategy: Strategy, sigma: float, separation: int, probability: float, *, warm: bool = True) -> Loss:
    """The law of L for noise z of deviation sigma; `warm=False` for a start with all examples free.

    >>> from bandmf.strategies import BandedToeplitz
    >>> C = BandedToeplitz([1.0, 0.5], steps=3, normalize_columns=False)
    >>> for warm in (False, True):
    ...     loss = privacy_loss(C, 1.0, 2, 0.5, warm=warm)
    ...     print(loss.log_likelihoods(loss.products(np.ones((3, 1)))).round(8))
    [0.92397989]
    [0.83293984]
    """
    separation, probability = checked_law(separation, probability)
    sigma = _check.real("sigma", sigma, 0, 1e100, open_low=True, remedy="it is the deviation of z")
    n, bands = strategy.steps, strategy.bands
    if bands > separation:
        raise _check.fail(
            "separation",
            separation,
            f"must be at least the strategy's bands={bands}: columns of one example must not overlap",
            "use fewer bands, or balls-in-bins sampling",
        )
    size = max(_BLOCK, separation)
    if n * (size + separation) > _MOST_ENTRIES:
        raise _check.fail("separation", separation, f"too large for steps={n}", "use fewer bands")
    raised = np.abs(strategy.columns()) / sigma * (1 + 4 * (bands + 8) * _ROUNDING)
    columns = np.zeros((n, separation))
    columns[:, :bands] = raised
    norms = np.square(columns).sum(axis=1)
    largest = math.sqrt(float(norms.max()))
    _check.real("largest column over sigma", largest, 1e-6, _LARGEST_NORM, remedy="sigma is far from any use")
    start = start_probabilities(separation, probability) if warm else np.eye(1, separation)[0]
    return Loss(columns, separation, probability, start, _blocks(raised, size), norms)


def _blocks(columns: FloatArray, size: int) -> tuple[FloatArray, ...]:
    """Dense transposes of the columns, `size` at a time, with the rows that they reach."""
    n, bands = columns.shape
    blocks = []
    for begin in range(0, n, size):
        part = columns[begin : begin + size]
        block = np.zeros((len(part), len(part) + bands - 1))
        for r in range(bands):
            block[np.arange(len(part)), np.arange(len(part)) + r] = part[:, r]
        blocks.append(np.ascontiguousarray(block[:, : n - begin]))
    return tuple(blocks)


def _log_sum(a: float, b: float) -> float:
    """log(e^a + e^b)."""
    low, high = (a, b) if a < b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
