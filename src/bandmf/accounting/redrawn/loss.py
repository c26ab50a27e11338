"""The likelihood ratio of bins that are redrawn in every epoch.

In each epoch e an example draws one of b positions, uniformly and independently of the other epochs, and takes part in
the step e b + j; in none where that is past the last step. With c_i the columns of |C| / sigma and m_S their sum over
its set S of steps,

    L(x) = E_S exp(<m_S, x> - |m_S|^2 / 2),    remove: E (L - e^epsilon)+,    add: E (1 - e^epsilon L)+,    x ~ N(0, I).

Columns two epochs apart do not overlap as long as they have at most b + 1 entries. So with E_e(j) = <c, x> - |c|^2 / 2
for the column c of position j in epoch e, all sets are summed epoch by epoch, the last one first:

    f_e(j) = e^(E_e(j)) mean_j' exp(-<c_ej, c_e+1,j'>) f_e+1(j'),    L = mean_j f_0(j).

Columns that are longer (BLT, C^-1 banded) are cut after b + 1 entries, and what was cut off is replaced by the same
vector for all positions of an epoch: the largest entries, row by row. The sum t of these vectors belongs to every m_S,
so it adds -<c, t> to every E and the factor exp(<t, x> - |t|^2 / 2) to L. No m_S got smaller in any entry.

|C|, not C: gradients are chosen adaptively (see accounting.bins.gram).

Guarantees: no m_S is smaller than the exact one in any entry, and both divergences grow with every inner product of two
of them (Kahane's inequality). `rounding` bounds how far the computed log L may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.gram import raised_columns
from bandmf.accounting.blocks import Blocks, blocks, size_of
from bandmf.strategies.base import Strategy

_ROUNDING = 2.0**-53
_MOST_ENTRIES = 2**27  # of the blocks of C, and of the overlaps of neighboring epochs
_LARGEST_NORM = 20.0  # of a column over sigma: beyond, exp overflows, and there is no privacy


@dataclass(frozen=True, eq=False)
class Loss:
    """|C| / sigma by compact columns, and the law of S.

    Arrays of several x have one in each column. Products and counts have a row for every position of every epoch, those
    past the last step included, and one more for t.
    """

    columns: FloatArray  # steps x at most cycle + 1
    tail: FloatArray  # t
    cycle: int
    products_of: Blocks
    overlaps: tuple[FloatArray, ...]  # by epoch: its last positions x the first ones of the next, <c_ej, c_e+1,j'>
    crossings: tuple[FloatArray, ...]  # exp(-overlaps)
    squares: FloatArray  # |c|^2, by position
    pulls: FloatArray  # <c, t>

    @property
    def steps(self) -> int:
        return len(self.columns)

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.cycle)

    @property
    def reach(self) -> int:
        """Last positions of an epoch that overlap with the first ones of the next: so many."""
        return min(self.columns.shape[1] - 1, self.cycle)

    def means(self, counts: FloatArray) -> FloatArray:
        """C counts + t times the last count."""
        result = self.products_of.times(counts[: self.steps])
        return result + np.outer(self.tail, counts[-1]) if self.tail.any() else result

    def products(self, x: FloatArray) -> FloatArray:
        """<c, x> for every position, and <t, x>."""
        result = np.zeros((self.epochs * self.cycle + 1, x.shape[1]))
        self.products_of.transposed_times(x, result[: self.steps])
        result[-1] = self.tail @ x
        return result

    def log_likelihoods(self, products: FloatArray) -> FloatArray:
        """log L, from `products` of x."""
        return self._backward(*self._odds(products))[1]

    def marginals(self, products: FloatArray) -> tuple[FloatArray, FloatArray]:
        """log L, and the probabilities of every position given x; those of an epoch add up to one."""
        odds, offset = self._odds(products)
        ahead, log_likelihoods = self._backward(odds, offset, keep=True)
        before = np.ones_like(ahead[0])  # the sum over the positions of the epochs before
        for e in range(self.epochs):
            here = ahead[e] * before
            if e + 1 < self.epochs:
                before = self._carry(e, odds[e] * before, forward=True)
                before /= before.max(axis=0)
            ahead[e] = here / here.sum(axis=0)
        return log_likelihoods, ahead.reshape(-1, products.shape[1])

    def posterior(self, x: FloatArray) -> tuple[float, FloatArray]:
        """log L of one x, and counts p with C p + t the gradient of log L."""
        log_likelihoods, marginals = self.marginals(self.products(x[:, None]))
        return float(log_likelihoods[0]), np.append(marginals[:, 0], 1.0)

    def _odds(self, products: FloatArray) -> tuple[FloatArray, FloatArray]:
        """e^E by epoch and position, the largest of each epoch 1, and the logarithm of what was divided out."""
        odds = (products[:-1] - (self.squares / 2 + self.pulls)[:, None]).reshape(self.epochs, self.cycle, -1)
        top = odds.max(axis=1)
        odds -= top[:, None]
        np.exp(odds, out=odds)
        return odds, top.sum(axis=0) + (products[-1] - self.tail @ self.tail / 2)

    def _backward(self, odds: FloatArray, offset: FloatArray, keep: bool = False) -> tuple[FloatArray, FloatArray]:
        """f by epoch, each up to a factor (if kept), and log L."""
        f, logs = odds[-1], offset
        kept = np.empty_like(odds) if keep else odds
        kept[-1] = f
        for e in range(self.epochs - 2, -1, -1):
            f = self._carry(e, f)
            f *= odds[e]
            scale = f.max(axis=0)
            f /= scale
            logs = logs + np.log(scale)
            if keep:
                kept[e] = f
        return kept, logs + np.log(f.mean(axis=0))

    def _carry(self, epoch: int, f: FloatArray, forward: bool = False) -> FloatArray:
        """mean_j' exp(-<c_ej, c_e+1,j'>) f(j') for every j; forward, the mean over j for every j'.

        Positions that overlap with none of the other epoch all get the plain mean.
        """
        b, reach = self.cycle, self.reach
        if not reach:
            return np.broadcast_to(f.mean(axis=0), f.shape).copy()
        weights, result = self.crossings[epoch], np.empty_like(f)
        if forward:
            result[reach:] = f.sum(axis=0)
            result[:reach] = weights.T @ f[b - reach :] + f[: b - reach].sum(axis=0)
        else:
            result[: b - reach] = f.sum(axis=0)
            result[b - reach :] = weights @ f[:reach] + f[reach:].sum(axis=0)
        result /= b
        return result

    def overlap(self, epoch: int, positions: IntArray, following: IntArray) -> FloatArray:
        """<c_ej, c_e+1,j'> of these positions j of an epoch and j' of the next."""
        result = np.zeros(positions.shape)
        first = self.cycle - self.reach
        some = (positions >= first) & (following < self.reach)
        result[some] = self.overlaps[epoch][positions[some] - first, following[some]]
        return result

    @cached_property
    def grams(self) -> tuple[FloatArray, ...]:
        """<m_S, m_S'> but for what crosses the borders of epochs: by epoch, position x position.

        That is <c_j, c_j'>, and the share of t. Epochs that are alike have the same matrix in memory.
        """
        b, bands, result = self.cycle, self.columns.shape[1], list[FloatArray]()
        for e in range(self.epochs):
            here = slice(e * b, (e + 1) * b)
            last = slice(here.start - b, here.start)
            columns, pulls = self.columns[here], self.pulls[here]
            if e and np.array_equal(columns, self.columns[last]) and np.array_equal(pulls, self.pulls[last]):
                result.append(result[-1])
                continue
            dense = np.zeros((b, b + bands - 1))
            for j, column in enumerate(columns):
                dense[j, j : j + bands] = column
            result.append(dense @ dense.T + pulls[:, None] + pulls + self.tail @ self.tail / self.epochs)
        return tuple(result)

    @property
    def farthest(self) -> float:
        """|m_S| is at most this."""
        by_epoch = np.sqrt(self.squares.reshape(self.epochs, self.cycle).max(axis=1))
        return float(by_epoch.sum() + np.linalg.norm(self.tail))

    def rounding(self, distance: float) -> float:
        """What rounding moves log L by, where x is noise moved by at most `distance`: at most this.

        A product of length m errs by m 2^-53 times the norms; the norm of the noise is below sqrt(n) + 10 but for a
        probability below 1e-20. Every epoch has one position, with a product, an exponential and an overlap, and a
        mean over b positions. What underflows is too small to count, as no overlap is above _LARGEST_NORM^2.
        """
        length = math.sqrt(self.steps) + 10 + distance
        root, tail = math.sqrt(float(self.squares.max())), float(np.linalg.norm(self.tail))
        size = self.products_of.width + self.cycle + self.epochs + 16
        one = size * root * (length + root + tail) + self.cycle + 16
        return 4 * (self.epochs * one + (self.steps + 16) * tail * (length + tail)) * _ROUNDING


def privacy_loss(strategy: Strategy, sigma: float, cycle: int) -> Loss:
    """The law of L for noise z of deviation sigma, in epochs of `cycle` steps.

    >>> from bandmf.strategies import BandedToeplitz
    >>> loss = privacy_loss(BandedToeplitz([1.0, 0.5], steps=4, normalize_columns=False), 1.0, cycle=2)
    >>> loss.log_likelihoods(loss.products(np.ones((4, 1)))).round(8)
    array([1.45600109])
    """
    sigma = _check.real("sigma", sigma, 0, 1e100, open_low=True, remedy="it is the deviation of z")
    n = strategy.steps
    cycle = _check.whole("cycle", cycle, 1, n, f"steps={n}")
    columns, tail = _cut(strategy, cycle)
    raised = 1 + 4 * (strategy.bands + n // cycle + 8) * _ROUNDING
    columns, tail = columns / sigma * raised, tail / sigma * raised
    epochs, bands = -(-n // cycle), columns.shape[1]
    if max(n * (size_of(bands) + bands), (epochs - 1) * min(bands, cycle) ** 2) > _MOST_ENTRIES:
        raise _check.fail("cycle", cycle, f"too large for steps={n} and bands={strategy.bands}", "use fewer bands")
    products_of = blocks(columns)
    squares, pulls = np.zeros(epochs * cycle), np.zeros(epochs * cycle)
    squares[:n] = np.square(columns).sum(axis=1)
    pulls[:n] = products_of.transposed_times(tail[:, None])[:, 0]
    largest = math.sqrt(float(squares.max()))
    _check.real("largest column over sigma", largest, 1e-6, _LARGEST_NORM, remedy="sigma is far from any use")
    overlaps = _overlaps(columns, cycle)
    crossings = tuple(np.exp(-overlap) for overlap in overlaps)
    return Loss(columns, tail, cycle, products_of, overlaps, crossings, squares, pulls)


def _cut(strategy: Strategy, cycle: int) -> tuple[FloatArray, FloatArray]:
    """The first cycle + 1 entries of every column of |C|, and t: the largest of the others, epoch by epoch."""
    n, width = strategy.steps, min(strategy.bands, cycle + 1)
    columns, tail = np.zeros((n, width)), np.zeros(n)
    source = raised_columns(strategy)
    for begin in range(0, n, cycle):
        stop = min(begin + cycle, n)
        whole = source(begin, stop)
        columns[begin:stop] = whole[:, :width]
        largest = np.zeros(n)
        for column, entries in zip(range(begin, stop), whole[:, width:], strict=True):
            rows = largest[column + width : column + width + len(entries)]
            np.maximum(rows, entries[: len(rows)], out=rows)
        tail += largest
    return columns, tail


def _overlaps(columns: FloatArray, cycle: int) -> tuple[FloatArray, ...]:
    """<c_ej, c_e+1,j'> for the last positions j of every epoch and the first j' of the next."""
    n, bands = columns.shape
    reach, result = min(bands - 1, cycle), []
    for border in range(cycle, n, cycle):
        last, first = np.zeros((reach, reach)), np.zeros((reach, reach))  # entries in the rows from the border on
        for i in range(reach):
            into = columns[border - reach + i, reach - i :]
            last[i, : len(into)] = into
            if border + i < n:
                first[i, i:] = columns[border + i, : reach - i]
        result.append(last @ first.T)
    return tuple(result)
