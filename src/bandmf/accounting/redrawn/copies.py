"""The proposal for the remove direction: q copies of an example that attract each other, with bounded weights.

Under Q, E L^q is a mean over q independent copies S_1, ..., S_q of the participations:

    M = E_Q L^q = E exp(pairs),    pairs = sum over r < s of <m_S_r, m_S_s>,

and Q L^q / M is the law of x = m_S_1 + ... + m_S_q + N(0, I), the copies drawn with exp(pairs) as weight. This is done
by rejection, from a law in which one copy, the hub, attracts the others, with the strength q / 2:

1. the hub S is a Markov chain over the epochs with a weight F(S) >= Z(S)^(q-1), Z(S) = E_S' exp(q/2 <m_S, m_S'>), and
   is kept with probability Z(S)^(q-1) / F(S);
2. each other copy is drawn with weight exp(q/2 <m_S, m_S'>), which given the hub is a product over the epochs;
3. all are kept with probability exp(pairs) / mean_r exp(q/2 star_r), star_r = sum over s != r of <m_S_r, m_S_s>,
   which is at most 1: pairs is the mean over r of q/2 star_r, and exp is convex.

So q copies are kept with the density exp(pairs) / E F relative to independent ones (averaged over which one is the
hub). With w = E F (L - e^epsilon)+ / L^q for those that are kept, and w = 0 otherwise,

    E w = delta    and    w <= B = E F e^(-(q-1) epsilon) (q-1)^(q-1) / q^q,

the largest value of (L - e^epsilon) / L^q. B alone is a bound without sampling; at delta's own sigma it is about ten
times delta.

The weight F. Z is a product over the epochs of mean_j w_j a_j c_j: w from the hub's position in that epoch, a and c
from those in the epochs before and after. Let a' >= a be the least sequence that does not rise with j, and c' >= c the
least that does not fall. By Chebyshev's inequality, mean w a c <= mean w a' mean w c' / mean w: terms with two
neighboring positions each, mean w aside.

Each draw that is kept is used with a noise vector and with its negative; the mean of the two weights is one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.loss import log_removed
from bandmf.accounting.min_separation.copies import MAX_COPIES, TooLittleNoiseError, log_peak
from bandmf.accounting.redrawn.loss import Loss

_LARGEST = 300.0  # exponent in the tables: far from overflow


@dataclass(frozen=True, eq=False)
class Epoch:
    """What the hub's position in an epoch adds for others in the same epoch: position x position, and the mean."""

    own: FloatArray
    total: FloatArray


@dataclass(frozen=True, eq=False)
class Border:
    """What it adds for others across the border to the next epoch, where columns overlap, and the weights F."""

    after: FloatArray  # position here x the first ones of the next epoch
    before: FloatArray  # position in the next epoch x the last ones here
    log_weights: FloatArray  # log of F's part, 1 / (q - 1) of it: position here x position in the next epoch


class Copies:
    """q copies for one law of L.

    Guarantees: no weight is above `bound(epsilon)`, and their expectation is the remove divergence. The law of what is
    kept is the one meant to a relative error, and a total variation, of `misdrawn`.
    """

    def __init__(self, loss: Loss, copies: int) -> None:
        self.loss = loss
        self.copies = _check.whole("copies", copies, 2, MAX_COPIES)
        self._epochs = self._own()
        self._borders = self._between()
        with np.errstate(over="ignore", invalid="ignore"):  # seen at the end, in the total
            self._running = self._chain()
        total = float(self._running[0][-1])
        if not 0 < total < 1e300:  # in this form, NaN is refused
            raise _too_little(copies)
        self.log_scale = math.log(total / loss.cycle)  # of E F

    def bound(self, epsilon: float) -> float:
        """B, the most that a weight can be."""
        slack = 2 * self.copies * self._slack + 1e-12
        return math.exp(min(self.log_scale + log_peak(self.copies, epsilon) + slack, 700.0))

    @property
    def misdrawn(self) -> float:
        """How far rounding takes the law of the copies from the one meant, relatively and in total variation."""
        loss, q = self.loss, self.copies
        return q * (loss.epochs * (loss.cycle + _LARGEST) * 2.0**-50 + q * loss.rounding(q * loss.farthest))

    @property
    def _slack(self) -> float:
        return self.loss.rounding(self.copies * self.loss.farthest) + self.misdrawn

    def sample(self, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with expectation delta; zero for copies that were not kept."""
        result, slack = np.zeros(rows), self._slack
        kept, _, means = self.draw(generator, rows)
        noise = self.noise(generator, len(kept))
        for products in (means - noise, means + noise):
            logs = self.loss.log_likelihoods(products)
            scaled = log_removed(logs + slack, epsilon) + self.log_scale - self.copies * (logs - slack)
            result[kept] += np.exp(scaled) / 2
        return result

    def noise(self, generator: np.random.Generator, rows: int) -> FloatArray:
        """Products of so many noise vectors."""
        return self.loss.products(generator.standard_normal((self.loss.steps, rows)))

    def draw(self, generator: np.random.Generator, rows: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Which of so many draws were kept; of these the positions, copies x kept x epochs, and the products of
        m_S_1 + ... + m_S_q."""
        drawn, hubs, running = self._hubs(generator, rows)
        sets = np.concatenate([hubs[None], self._others(generator, running)])
        products = self.loss.products(self.loss.means(self._counts(sets)))
        stars = self._at(products, sets) - self._squares(sets)
        scaled = self.copies / 2 * stars
        top = scaled.max(axis=0)
        log_chance = stars.sum(axis=0) / 2 - top - np.log(np.exp(scaled - top).mean(axis=0))
        kept = np.flatnonzero(generator.random(len(drawn)) < np.exp(log_chance))
        return drawn[kept], sets[:, kept], products[:, kept]

    # --- drawing -------------------------------------------------------------------------------------

    def _hubs(self, generator: np.random.Generator, rows: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Which of the draws keep their hub; its positions; and running sums over the positions of the others."""
        loss = self.loss
        draws = generator.random((loss.epochs, rows))
        hubs = np.empty((rows, loss.epochs), np.int64)
        hubs[:, 0] = np.searchsorted(self._running[0], draws[0] * self._running[0][-1])
        log_weight = np.log(self._epochs[0].total[hubs[:, 0]])
        for e, border in enumerate(self._borders):
            running = self._running[e + 1][hubs[:, e]]
            hubs[:, e + 1] = (running >= (draws[e + 1] * running[:, -1])[:, None]).argmax(axis=1)
            log_weight += border.log_weights[hubs[:, e], hubs[:, e + 1]]
        attraction = np.empty((rows, loss.epochs, loss.cycle))
        for e, epoch in enumerate(self._epochs):
            here = np.take(epoch.own, hubs[:, e], axis=0, out=attraction[:, e])
            if e:
                here[:, : loss.reach] *= self._borders[e - 1].after[hubs[:, e - 1]]
            if e + 1 < loss.epochs:
                here[:, loss.cycle - loss.reach :] *= self._borders[e].before[hubs[:, e + 1]]
        running = np.cumsum(attraction, axis=2, out=attraction)
        log_Z = np.log(running[:, :, -1] / loss.cycle).sum(axis=1)
        kept = np.flatnonzero(generator.random(rows) < np.exp((self.copies - 1) * (log_Z - log_weight)))
        return kept, hubs[kept], running[kept]

    def _others(self, generator: np.random.Generator, running: FloatArray) -> IntArray:
        """The positions of the copies that are no hub: copies x rows x epochs."""
        rows, epochs, _ = running.shape
        draws = generator.random((self.copies - 1, rows, epochs, 1)) * running[:, :, -1:]
        return np.array([(running >= draw).argmax(axis=2) for draw in draws])

    def _counts(self, sets: IntArray) -> FloatArray:
        """How many copies have each position, and how many there are: positions x rows."""
        rows, size = sets.shape[1], self.loss.epochs * self.loss.cycle + 1
        places = (sets + np.arange(self.loss.epochs) * self.loss.cycle) * rows + np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=size * rows).reshape(size, rows).astype(np.float64)
        counts[-1] = self.copies
        return counts

    def _at(self, products: FloatArray, sets: IntArray) -> FloatArray:
        """<m_S, x> from the products of x: copies x rows."""
        places = sets + np.arange(self.loss.epochs) * self.loss.cycle
        return products[places, np.arange(sets.shape[1])[:, None]].sum(axis=2) + products[-1]

    def _squares(self, sets: IntArray) -> FloatArray:
        """|m_S|^2: copies x rows."""
        loss = self.loss
        places = sets + np.arange(loss.epochs) * loss.cycle
        result = (loss.squares + 2 * loss.pulls)[places].sum(axis=2) + loss.tail @ loss.tail
        for e in range(loss.epochs - 1):
            result += 2 * loss.overlap(e, sets[:, :, e], sets[:, :, e + 1])
        return result

    # --- tables --------------------------------------------------------------------------------------

    def _own(self) -> list[Epoch]:
        tables = list[Epoch]()
        for e, gram in enumerate(self.loss.grams):
            if not (e and gram is self.loss.grams[e - 1]):
                own = self._exponential(gram)
                tables.append(Epoch(own, own.mean(axis=1)))
            else:
                tables.append(tables[-1])
        return tables

    def _between(self) -> list[Border]:
        borders, overlaps = list[Border](), self.loss.overlaps
        for e in range(self.loss.epochs - 1):
            here, there = self._epochs[e], self._epochs[e + 1]
            if e and self._epochs[e - 1] is here is there and np.array_equal(overlaps[e], overlaps[e - 1]):
                borders.append(borders[-1])
                continue
            borders.append(self._border(here, there, self._exponential(overlaps[e])))
        return borders

    def _border(self, here: Epoch, there: Epoch, corner: FloatArray) -> Border:
        """From the attraction between the last positions here and the first ones there; the others have none."""
        b, reach = self.loss.cycle, self.loss.reach
        after, before = np.ones((b, reach)), np.ones((b, reach))
        after[b - reach :], before[:reach] = corner, corner.T
        rising = np.maximum.accumulate(corner, axis=0)
        falling = np.maximum.accumulate(corner[:, ::-1], axis=1)[:, ::-1]
        following = 1 + here.own[:, b - reach :] @ (rising - 1) / b / here.total[:, None]  # mean w c' / mean w here
        previous = 1 + (falling - 1) @ there.own[:, :reach].T / b / there.total  # mean w a' / mean w there
        log_weights = np.tile(np.log(there.total), (b, 1))
        log_weights[:, :reach] += np.log(following)
        log_weights[b - reach :] += np.log(previous)
        return Border(after, before, log_weights)

    def _exponential(self, exponents: FloatArray) -> FloatArray:
        """exp(q/2 ...), where that is far from overflow, also of the product of three."""
        scaled = self.copies / 2 * exponents
        if not scaled.max(initial=0.0) < _LARGEST / 3:
            raise _too_little(self.copies)
        return np.exp(scaled)

    def _chain(self) -> list[FloatArray]:
        """Running sums of the hub's weights: of its first position, then of each next one, given the last."""
        ahead = np.ones(self.loss.cycle)  # mean of F over the epochs to come
        result = list[FloatArray]()
        for border in reversed(self._borders):
            running = np.cumsum(np.exp((self.copies - 1) * border.log_weights) * ahead, axis=1)
            ahead = running[:, -1] / self.loss.cycle
            result.append(running)
        result.append(np.cumsum(self._epochs[0].total ** (self.copies - 1) * ahead))
        return result[::-1]


def _too_little(copies: int) -> TooLittleNoiseError:
    return TooLittleNoiseError(f"copies={copies}: the moment of this order overflows; raise sigma, or use fewer copies")
