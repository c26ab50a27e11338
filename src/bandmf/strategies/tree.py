"""Tree aggregation (Dwork et al. 2010; Honaker 2015; Kairouz et al. 2021): noise on a binary tree's nodes.

The encoder E has one row for each node, the indicator of the steps below it; the decoder turns noisy nodes
into running sums. E is not square, but each estimator has a square, lower-triangular strategy C with exactly
its noise:

    full (two-sided)    least squares over all nodes:  the C with C'C = E'E.
    online (Honaker)    a node of height h is estimated from the nodes below it alone, with variance
                        v_h = 1 / (1 + 1 / (2 v_{h-1})),  v_0 = 1;  a running sum adds the estimates x_h of
                        the blocks in the binary expansion of its length.

Online, when step i completes a block of height t, all blocks below merge into one estimate,

    x_t <- sum_{h < t} (p_t / p_h) x_h + g_t z_i,    x_h <- 0 for h < t,    the running sum is sum_h x_h,

with p_h = w_1 w_2 ... w_h, w_h = v_h / (2 v_{h-1}), and g_t^2 the variance of what is new, g_0 = 1,
g_t^2 = w_t^2 g_{t-1}^2 + v_t^2: log2(n) + 1 buffers, one draw a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy import sparse
from scipy.linalg import cholesky

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.strategies.base import InputRecurrence, Strategy
from bandmf.strategies.dense import Dense
from bandmf.streaming import Matrices, StreamingOperator, state_space

_LARGEST_FULL = 8192


def tree_aggregation(steps: int, estimator: str = "online") -> Strategy:
    """The strategy with the noise of tree aggregation: estimator "online" (any length) or "full" (dense).

    >>> tree_aggregation(4, "full").column_norms() ** 2  # each step lies below three nodes
    array([3., 3., 3., 3.])
    >>> round(tree_aggregation(2).largest_column_norm() ** 2, 12)  # running sums alone reveal a little less
    1.8
    """
    if _check.choice("estimator", estimator, ("online", "full")) == "online":
        return OnlineTree(steps)
    steps = _check.whole("steps", steps, 1, _LARGEST_FULL, remedy='use estimator="online" for more steps')
    E = tree_encoder(steps)
    # C'C = E'E with C lower triangular: Cholesky seen from the far corner.
    return Dense(np.tril(cholesky((E.T @ E)[::-1, ::-1], lower=True).T[::-1, ::-1]))


def tree_encoder(steps: int) -> FloatArray:
    """E: the indicator of the steps below each node, leaves first; the root covers all steps.

    >>> tree_encoder(2)
    array([[1., 0.],
           [0., 1.],
           [1., 1.]])
    """
    levels = [2**h for h in range(1 + math.ceil(math.log2(_check.whole("steps", steps))))]
    step = np.arange(steps)
    return np.concatenate([np.equal.outer(np.arange(-(-steps // size)), step // size) for size in levels]).astype(
        np.float64
    )


@dataclass(frozen=True, eq=False, repr=False)
class OnlineTree(Strategy):
    """The online (Honaker) estimator as a square strategy.

    Guarantee: the noise C^-1 z has the covariance of the differences of the tree's running sums. Its exact
    sensitivity is a little below the tree's own sqrt(levels), because the nodes are not released.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _check.whole("steps", self.steps))

    @property
    def heights(self) -> int:
        """Heights that complete blocks can have: 0 ... heights - 1."""
        return self.steps.bit_length()

    @property
    def bands(self) -> int:
        return 1 << (self.heights - 1)  # the longest block: C and C^-1 reach no further back

    @cached_property
    def _node(self) -> tuple[FloatArray, FloatArray]:
        """p_h and g_h of every height."""
        p, g = [1.0], [1.0]
        for before, v in pairwise(self.variances):
            w = v / (2 * before)
            p.append(p[-1] * w)
            g.append(math.hypot(w * g[-1], v))
        return np.array(p), np.array(g)

    @cached_property
    def variances(self) -> FloatArray:
        """v_h: of the estimate of a block of every height."""
        v = [1.0]
        for _ in range(1, self.heights):
            v.append(1 / (1 + 1 / (2 * v[-1])))
        return np.array(v)

    @staticmethod
    def _height(i: int | IntArray) -> IntArray:
        """The height of the block that step i completes."""
        return np.log2(np.bitwise_and(np.add(i, 1), -np.add(i, 1))).astype(int)

    def _step(self, i: int) -> Matrices:
        """The state x_h is the estimate of the current block of height h; y_i is how their sum changes."""
        p, g = self._node
        t, size = self._height(i), self.heights
        merging = np.arange(size) < t
        F, G = np.diag(1.0 - merging), np.zeros(size)
        F[t] += np.where(merging, p[t] / p, 0.0)
        G[t] = g[t]
        F[t, t] = 0.0  # the place is empty: a block there would have merged before
        return Matrices(F, G, np.where(merging, p[t] / p - 1, 0.0), float(g[t]))

    def inverse(self) -> StreamingOperator:
        return state_space(self._step, self.heights, self.steps)

    @property
    def recurrence(self) -> InputRecurrence:
        return InputRecurrence(self._row, self.bands)

    def _row(self, i: int) -> FloatArray:
        """Row i of C^-1, newest first: the new block's estimate less those that it replaces.

        Only the 2^t steps of the block count. The draw of step j entered at height s; in an estimate of
        height h it has weight g_s p_h / p_s.
        """
        (p, g), t = self._node, int(self._height(i))
        back = np.arange(1, 1 << t)
        entered, held = self._height(i - back), np.log2(back).astype(int)
        row = np.zeros(self.bands)
        row[0] = g[t]
        row[1 : 1 << t] = g[entered] * (p[t] - p[held]) / p[entered]
        return row

    def _entries(self, j: IntArray) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
        """The entries of columns j that are not zero, as (place in j, row, value).

        A gradient at j alone keeps the estimate of the block around j at one and all others at zero. So C
        has an entry at j, and wherever the block that holds j merges.
        """
        p, g = self._node
        place, held = np.arange(len(j)), self._height(j)
        yield place, j, 1 / g[held]
        while True:
            rows = (((j >> (held + 1)) + 1) << (held + 1)) - 1
            inside = rows < self.steps
            place, j, held, rows = place[inside], j[inside], held[inside], rows[inside]
            if not len(rows):
                return
            merged = self._height(rows)
            yield place, rows, (1 - p[merged] / p[held]) / g[merged]
            held = merged

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        j = np.array(range(self.steps)[start:stop], dtype=int)
        compact = np.zeros((len(j), self.bands))
        for place, rows, values in self._entries(j):
            compact[place, rows - j[place]] = values
        return compact

    def column_norms(self) -> FloatArray:
        squares = np.zeros(self.steps)
        for place, _, values in self._entries(np.arange(self.steps)):
            squares[place] += values**2
        return np.sqrt(squares)

    def nonnegative(self) -> sparse.csc_array:
        entries = list(self._entries(np.arange(self.steps)))
        place, rows, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return sparse.csc_array((values, (rows, place)), shape=(self.steps, self.steps))

    def separated_bound(self, separation: int, count: int) -> float:
        """That of the nodes themselves: one of size s sees at most ceil(s / separation) participations."""
        sizes = 2 ** np.arange((self.steps - 1).bit_length() + 1)
        return math.sqrt(count * float(np.sum(np.minimum(count, -(-sizes // separation)))))
