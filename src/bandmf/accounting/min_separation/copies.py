"""The proposal for the remove direction: q copies of an example that attract each other, with bounded weights.

Under Q, E L^q is a sum over q independent copies S_1, ..., S_q of the participations:

    M_q = E_Q L^q = E exp(sum over pairs <m_{S_s}, m_{S_t}>),

and Q L^q / M_q is the law of x = m_{S_1} + ... + m_{S_q} + N(0, I), the copies drawn with that exponential as weight.
Only columns less than b steps apart overlap, and a copy that joined less than b steps ago is waiting. So the copies
are a Markov chain: their state is how long each one waits. When j of them join at step t, the weight is

    exp(j sum over waiting copies <c_t, c_{t'}> + j (j - 1) / 2 |c_t|^2),    t' the step that the copy waits since.

Summed backwards in time this gives M_q exactly; forwards it draws the copies exactly. Copies are alike, so a state is
a multiset of waits, and only states with a free copy need an entry: where all wait, nothing happens until one is free.
These are (b + q - 2 choose q - 1) numbers for every step.

Weights. w = (L - e^epsilon)+ M_q / L^q has expectation delta, and as L varies it is never above

    B = M_q e^(-(q-1) epsilon) (q-1)^(q-1) / q^q.

B alone is the conversion of the Renyi divergence of order q: a bound without sampling, but 6 to 30 percent of sigma
above the truth where the table has room for the best q, and useless where it has not. At delta's own sigma it is 5 to
50 times delta, which is what makes sampling with these weights cheap. A single S can be far larger than usual, and
bounds by the largest S are hopeless; M_q is an average.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from bandmf import _check, band_columns
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.loss import log_removed
from bandmf.accounting.min_separation.loss import Loss

MAX_COPIES = 256
MOST_NUMBERS = 2**24  # of a table: 128 MB
_MOST_STARTS = 2**20


class TooLittleNoiseError(ValueError):
    """There is so little noise that moments overflow."""


@dataclass(frozen=True, eq=False)
class States:
    """Multisets of q waits with at least one of them 0, those with the most zeros first.

    When j free copies join in one of the first counts[j] states, the next is `moves[j]`, as an index into the table
    of the next step and those after it: sleep * number of states + state.
    """

    waits: IntArray  # states x copies, each increasing
    free: IntArray
    counts: tuple[int, ...]
    moves: tuple[IntArray, ...]

    def __len__(self) -> int:
        return len(self.waits)


@lru_cache(maxsize=4)
def all_states(separation: int, copies: int) -> States:
    """The states of so many copies, with what follows each."""
    rest = itertools.combinations_with_replacement(range(separation), copies - 1)
    waits = np.array([(0, *others) for others in rest], np.int64).reshape(-1, copies)
    free = (waits == 0).sum(axis=1)
    order = np.argsort(-free, kind="stable")
    waits, free = waits[order], free[order]
    counts = tuple(int((free >= joining).sum()) for joining in range(copies + 1))
    moves = []
    for joining, count in enumerate(counts):
        following = np.maximum(waits[:count] - 1, 0)
        following[:, :joining] = separation - 1  # those that wait 0 come first
        moves.append(locate(waits, following, separation))
    return States(waits, free, counts, tuple(moves))


def locate(waits: IntArray, wanted: IntArray, separation: int) -> IntArray:
    """sleep * states + state of these multisets of waits: asleep until the first copy is free."""
    ordered = np.sort(wanted, axis=1)
    sleep = ordered[:, 0].copy()
    base = separation ** np.arange(waits.shape[1] - 1, -1, -1, dtype=np.int64)
    codes = waits @ base
    order = np.argsort(codes)
    found = np.searchsorted(codes, (ordered - sleep[:, None]) @ base, sorter=order)
    return sleep * len(waits) + order[found]


class Copies:
    """q copies for one law of L.

    Guarantees: no weight is above `bound(epsilon)`, and their expectation is the remove divergence. The copies' law is
    that of the table to a relative error `misdrawn`.
    """

    def __init__(self, loss: Loss, copies: int) -> None:
        self.loss = loss
        self.copies = checked_copies(loss, copies)
        self._states = all_states(loss.separation, self.copies)
        self._chances = [self._chance(joining) for joining in range(self.copies + 1)]
        self._overlaps = overlaps(loss)
        with np.errstate(over="ignore", invalid="ignore"):  # seen at the end, in the total
            self._table = self._sums()
            self._starts, self._start_sums = self._first()
        total = float(self._start_sums[-1])
        if not 0 < total < 1e300:  # in this form, NaN is refused
            raise TooLittleNoiseError(
                f"copies={self.copies}: the moment of this order overflows; raise sigma, or use fewer copies"
            )
        self.log_moment = math.log(total)

    def bound(self, epsilon: float) -> float:
        """B, the most that a weight can be."""
        slack = 2 * self.copies * self._slack + 1e-12
        return math.exp(min(self.log_moment + log_peak(self.copies, epsilon) + slack, 700.0))

    @property
    def misdrawn(self) -> float:
        """How far rounding takes the law of the copies from the one meant, relatively and in total variation."""
        return (self.loss.steps + self.loss.separation) * (self.copies + 8) * 2.0**-50

    @property
    def _slack(self) -> float:
        return self.loss.rounding(self.copies * self.loss.farthest) + self.misdrawn

    def sample(self, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with expectation delta: each with a noise vector and its negative, averaged."""
        loss, q, slack = self.loss, self.copies, self._slack
        means = loss.products(loss.means(self.joined(generator, rows)))
        noise = loss.products(generator.standard_normal((loss.steps, rows)))
        result = np.zeros(rows)
        for products in (means - noise, means + noise):
            logs = loss.log_likelihoods(products)
            result += np.exp(log_removed(logs + slack, epsilon) + self.log_moment - q * (logs - slack))
        return result / 2

    def joined(self, generator: np.random.Generator, rows: int) -> FloatArray:
        """How many copies join at each step, drawn with the weights above: steps x rows."""
        size, table = len(self._states), self._table.ravel()
        joined = np.zeros((self.loss.steps, rows))
        drawn = generator.random(rows) * self._start_sums[-1]
        place = self._starts[np.minimum(np.searchsorted(self._start_sums, drawn), len(self._starts) - 1)]
        draws = generator.random((self.loss.steps, rows))
        for t in range(self.loss.steps):  # place: step * size + state, and a copy is free at that step
            awake = np.flatnonzero(place < (t + 1) * size)
            here = place[awake]
            state = here - t * size
            following = self._states.moves[0][state] + (t + 1) * size
            left = draws[t, awake] * table[here] - self._chances[0][state] * table[following]
            place[awake] = following
            some = np.flatnonzero(left > 0)
            if len(some):
                rows_joining = awake[some]
                place[rows_joining], joined[t, rows_joining] = self._joining(t, state[some], left[some])
        return joined

    def _joining(self, t: int, state: IntArray, left: FloatArray) -> tuple[IntArray, IntArray]:
        """What follows and how many join, one at least; `left` is what the draw leaves after "none"."""
        states, table = self._states, self._table.ravel()
        following, joining = np.empty_like(state), np.zeros_like(state)
        pull = self._pull(t, states.waits[state])
        undecided = np.arange(len(state))
        for j in range(1, self.copies + 1):
            undecided = undecided[states.free[state[undecided]] >= j]  # rounding may leave a little: take the last
            if len(undecided) == 0:
                break
            here = state[undecided]
            following[undecided] = states.moves[j][here] + (t + 1) * len(states)
            joining[undecided] = j
            weight = self._chances[j][here] * self._together(t, j) * pull[undecided] ** j
            left[undecided] -= weight * table[following[undecided]]
            undecided = undecided[left[undecided] > 0]
        return following, joining

    def _chance(self, joining: int) -> FloatArray:
        """That so many of the free copies join, in the states that have so many."""
        p, free = self.loss.probability, self._states.free[: self._states.counts[joining]]
        return special.comb(free, joining) * p**joining * (1 - p) ** (free - joining)

    def _pull(self, t: int, waits: IntArray) -> FloatArray:
        """exp(sum over waiting copies <c_t, c_t'>)."""
        return np.exp(self._overlaps[t][waits].sum(axis=1))

    def _together(self, t: int, joining: int) -> float:
        """exp(j (j - 1) / 2 |c_t|^2)."""
        return float(np.exp(joining * (joining - 1) / 2 * self.loss.norms[t]))

    def _sums(self) -> FloatArray:
        """The table: by step and state, the sum of the weights of all that may follow."""
        n, states = self.loss.steps, self._states
        table = np.ones((n + self.loss.separation, len(states)))
        flat = table.ravel()
        for t in range(n - 1, -1, -1):
            pull = self._pull(t, states.waits)
            here, ahead, power = table[t], flat[(t + 1) * len(states) :], np.ones(len(states))
            here[:] = self._chances[0] * ahead[states.moves[0]]
            for j in range(1, self.copies + 1):
                count = states.counts[j]
                power = power[:count] * pull[:count]
                here[:count] += self._chances[j] * self._together(t, j) * power * ahead[states.moves[j]]
        return table

    def _first(self) -> tuple[IntArray, FloatArray]:
        """Places at the start, and the running sums of their weights."""
        q, start = self.copies, self.loss.start
        possible = np.flatnonzero(start).tolist()
        waits = np.array(list(itertools.combinations_with_replacement(possible, q)), np.int64)
        places = locate(self._states.waits, waits, self.loss.separation)
        orders = np.full(len(waits), special.gammaln(q + 1))  # of copies with these waits
        for wait in possible:
            orders -= special.gammaln((waits == wait).sum(axis=1) + 1)
        chances = np.exp(orders + np.log(start[waits]).sum(axis=1))
        return places, np.cumsum(chances * self._table.ravel()[places])


def overlaps(loss: Loss) -> FloatArray:
    """<c_t, c_t'> by step t and the wait of a copy that joined at t': b - (t - t'); zero where it joined before 0."""
    n, b = loss.steps, loss.separation
    gram = band_columns.gram(loss.columns[:, : min(n, b)])  # [j, r] is <c_{j+r}, c_j>
    result = np.zeros((n, b))
    for apart in range(1, gram.shape[1]):
        result[apart:, b - apart] = gram[: n - apart, apart]
    return result


def checked_copies(loss: Loss, copies: int) -> int:
    """`copies`, if their table is not too large."""
    most = most_copies(loss.separation, loss.steps)
    remedy = f"more would need too large a table with separation={loss.separation}"
    return _check.whole("copies", copies, 2, max(most, 2), remedy=remedy)


def most_copies(separation: int, steps: int) -> int:
    """The most whose table fits."""
    copies = 1
    while (
        copies < MAX_COPIES
        and math.comb(separation + copies - 1, copies) * (steps + separation) <= MOST_NUMBERS
        and math.comb(separation + copies, copies + 1) <= _MOST_STARTS
        and separation ** (copies + 1) < 2**62
    ):
        copies += 1
    return copies


def log_peak(copies: float, epsilon: float) -> float:
    """log of the largest (L - e^epsilon) / L^q."""
    q = copies
    return (q - 1) * math.log(q - 1) - q * math.log(q) - (q - 1) * epsilon
