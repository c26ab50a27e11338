"""The epsilon of the first t steps of a certified run: a certificate of its own, for a t that is fixed beforehand.

The first t steps of a matrix mechanism are the mechanism with the leading t x t block of C, and the sets of steps cut
off at t: whoever takes part only later adds an atom at zero. So the same theorem and the same samples bound them, with
the rows of |C| before t alone: for balls-in-bins a Gram matrix whose rows for positions from t on are zero. (They are
given a little, which only raises the bound.)

The noise is that of the plan, so epsilon is searched for: by few samples, and then certified with fresh ones. The
result is some percent above the least epsilon, more where that is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting import bins, min_separation
from bandmf.accounting.bins import divergences, tuning
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.gram import raised_columns
from bandmf.accounting.bins.half_space import half_space
from bandmf.accounting.bins.loss import law as law_of_bins
from bandmf.accounting.certified import FAILURE, LUCK, NotCertifiedError
from bandmf.accounting.events import MIN_EPSILON
from bandmf.accounting.min_separation import divergences as separated_divergences
from bandmf.accounting.min_separation.half_space import closed_bound
from bandmf.accounting.min_separation.loss import privacy_loss
from bandmf.accounting.samples import Sums
from bandmf.strategies import Banded, Strategy

_PILOT = 2**9  # samples of a look
_RATIOS = (1.5, 1.2, 1.1)  # of the brackets of epsilon
_CLOSE = 1.02  # between an epsilon that is too small and one that suffices
_ATTEMPTS = 5
_LITTLE = 1e-9  # of the largest entry: for positions that do not take part
_MOST_ENTRIES = 2**26  # of the rows of |C|, by position
_ROUNDING = 2.0**-53


class Law(Protocol):
    """The likelihood ratio of the first steps, at the noise of the plan."""

    def tune(self, epsilon: float) -> None:
        """Choose the proposal that suits this epsilon."""
        ...

    def remove(self, epsilon: float, samples: int) -> tuple[Sums, float]:
        """Samples of the divergence, for a look alone, and the bound that they have."""
        ...

    def add(self, epsilon: float, samples: int) -> tuple[Sums, float] | None:
        """The same; None where nothing can be sampled."""
        ...

    def closed(self, epsilon: float) -> float:
        """A bound of the add divergence that takes no samples."""
        ...

    def certify(self, epsilon: float, delta: float, samples: int, add_samples: int, failure: float, tried: int) -> None:
        """NotCertifiedError where fresh samples do not show that epsilon suffices."""
        ...


def certified_epsilon(law: Law, delta: float, failure: float, most: float, samples: int) -> float:
    """An epsilon at most `most`, which is known to suffice, that a certificate with `failure` speaks for."""
    allowed, log_term = delta - failure, math.log(8 / failure)

    def predicted(found: tuple[Sums, float]) -> float:
        """The upper bound that `samples` will have, with some bad luck."""
        sums, bound = found
        spread = (math.sqrt(2 * log_term) + LUCK) * math.sqrt(sums.variance / samples)
        return sums.mean + spread + 7 / 3 * log_term * bound / samples

    def suffices(epsilon: float, count: int = _PILOT) -> bool:
        if law.closed(epsilon) > allowed:
            added = law.add(epsilon, count)
            if added is None or predicted(added) > allowed:
                return False
        return predicted(law.remove(epsilon, count)) <= allowed

    high = most
    for ratio in _RATIOS:  # a proposal suits the epsilon that it was chosen for, and serves those near it
        law.tune(high)
        low = max(high / ratio, MIN_EPSILON)
        while low > MIN_EPSILON and suffices(low):
            low, high = max(low / ratio, MIN_EPSILON), low
        while high > _CLOSE * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if suffices(middle) else (middle, high)
    law.tune(high)
    for attempt in range(1, _ATTEMPTS + 1):
        while high < most and not suffices(high, samples // 4):
            high *= _CLOSE
        if high >= most:
            break
        try:
            add_samples = 0 if law.closed(high) <= allowed else samples
            law.certify(high, delta, samples, add_samples, failure, attempt)
        except NotCertifiedError:
            high *= _CLOSE
        else:
            return high
    return most


def certified_curve(
    laws: Sequence[tuple[int, Callable[[], Law]]],
    delta: float,
    epsilon: float,
    samples: int,
    progress: Callable[[int, float], None],
) -> list[tuple[int, float]]:
    """(t, epsilon) for these numbers of steps; epsilon is that of the whole run, and no later one is below an earlier.

    All certificates together are wrong with probability FAILURE * delta at most, for which delta holds room, beside
    what each takes from it: the least of several may be chosen.
    """
    curve, share = [], FAILURE * delta / max(len(laws), 1)
    for steps, law in sorted(laws, key=lambda each: -each[0]):
        epsilon = certified_epsilon(law(), delta * (1 - FAILURE), share, epsilon, samples)
        curve.append((steps, epsilon))
        progress(steps, epsilon)
    return curve[::-1]


def _numbers(samples: int, add_samples: int, failure: float, attempt: int) -> dict[str, Any]:
    return {"samples": samples, "add_samples": add_samples, "failure": failure, "attempt": attempt}


# --- balls-in-bins --------------------------------------------------------------------------------------


@dataclass(eq=False)
class InBins:
    """Balls-in-bins with this Gram matrix."""

    gram: FloatArray
    sigma: float

    def __post_init__(self) -> None:
        self._loss = law_of_bins(self.gram).at(self.sigma)

    def tune(self, epsilon: float) -> None:
        self._copies = Copies(self._loss, tuning.tune(self._loss, epsilon, _PILOT, 0).copies)

    def remove(self, epsilon: float, samples: int) -> tuple[Sums, float]:
        sums = divergences.remove_sums(self._copies, epsilon, samples, 0, stream=divergences.ESTIMATE)
        return sums, self._copies.bound(epsilon)

    def add(self, epsilon: float, samples: int) -> tuple[Sums, float] | None:
        return divergences.add_sums(self._loss, epsilon, samples, 0, stream=divergences.ESTIMATE)

    def closed(self, epsilon: float) -> float:
        side = half_space(self._loss, epsilon)
        return 1.0 if side is None else side.deterministic_bound()

    def certify(self, epsilon: float, delta: float, samples: int, add_samples: int, failure: float, tried: int) -> None:
        numbers = _numbers(samples, add_samples, failure, tried)
        bins.certify(self.gram, self.sigma, epsilon, delta, copies=self._copies.copies, **numbers)


def in_bins(strategy: Strategy, cycle: int, sigma: float, counts: Sequence[int]) -> list[tuple[int, Callable[[], Law]]]:
    """The laws of the first steps, for these numbers of them; none where |C| is too large to be written out."""
    if cycle * strategy.steps > _MOST_ENTRIES:
        return []
    return [(count, partial(InBins, gram, sigma)) for count, gram in leading_grams(strategy, cycle, counts)]


def leading_grams(strategy: Strategy, cycle: int, counts: Sequence[int]) -> Iterator[tuple[int, FloatArray]]:
    """The Gram matrices of the first rows, as many as each of `counts` says, no entry below that of the exact C."""
    n, columns = strategy.steps, raised_columns(strategy)
    m = np.zeros((cycle, n))
    for start in range(0, n, cycle):
        for j, column in enumerate(columns(start, min(n, start + cycle))):
            length = min(len(column), n - start - j)
            m[j, start + j : start + j + length] += column[:length]
    raised = 1 + 2 * (n - (-n // cycle) + 2 * strategy.bands + 24) * _ROUNDING
    gram, known = np.zeros((cycle, cycle)), 0
    for count in sorted(counts):
        gram = gram + m[:, known:count] @ m[:, known:count].T
        known, found = count, gram * raised
        np.fill_diagonal(found, np.maximum(np.diag(found), _LITTLE * found.max()))
        yield count, (found + found.T) / 2


# --- b-min-sep ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Separated:
    """b-min-sep with a banded strategy."""

    strategy: Strategy
    separation: int
    probability: float
    sigma: float

    def __post_init__(self) -> None:
        self._loss = privacy_loss(self.strategy, self.sigma, self.separation, self.probability)

    def tune(self, epsilon: float) -> None:
        self._proposal = separated_divergences.best_copies(self._loss, epsilon)

    def remove(self, epsilon: float, samples: int) -> tuple[Sums, float]:
        sums = separated_divergences.remove_sums(
            self._proposal, epsilon, samples, 0, stream=separated_divergences.ESTIMATE
        )
        return sums, self._proposal.bound(epsilon)

    def add(self, epsilon: float, samples: int) -> tuple[Sums, float] | None:
        return separated_divergences.add_sums(self._loss, epsilon, samples, 0, stream=separated_divergences.ESTIMATE)

    def closed(self, epsilon: float) -> float:
        return closed_bound(self._loss, epsilon)

    def certify(self, epsilon: float, delta: float, samples: int, add_samples: int, failure: float, tried: int) -> None:
        law, numbers = (self.separation, self.probability), _numbers(samples, add_samples, failure, tried)
        min_separation.certify(self.strategy, *law, self.sigma, epsilon, delta, copies=self._proposal.copies, **numbers)


def separated(
    strategy: Strategy, separation: int, probability: float, sigma: float, counts: Sequence[int]
) -> list[tuple[int, Callable[[], Law]]]:
    """The laws of the first steps, for these numbers of them."""
    return [
        (count, partial(Separated, leading_block(strategy, count), separation, probability, sigma)) for count in counts
    ]


def leading_block(strategy: Strategy, count: int) -> Banded:
    """The strategy of the first rows and columns of C."""
    columns = strategy.columns(0, count)[:, : min(strategy.bands, count)]
    inside = np.arange(columns.shape[1]) < count - np.arange(count)[:, None]
    return Banded(np.where(inside, columns, 0.0))
