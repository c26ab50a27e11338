"""Sensitivity: the most that one example can move C g, over all ways it may take part.

An example contributes a vector u_i with |u_i| <= 1 at each step i of its pattern. With X = C'C,

    sensitivity^2 = max over patterns, max over u, of  sum_{i,j in pattern} X_ij <u_i, u_j>.

Choosing u_i = +-u bounds it from below, sum |X_ij| from above; where the two meet the value is exact.
They meet whenever the signs can be chosen so that every product is positive, for instance when X >= 0 on
the pattern, or when only neighboring participations interact (a chain can always be signed).

Guarantees: the value returned is never below the true sensitivity, and `exact` is only said where the two
bounds meet. Where the entries of C are sums that cancel (BLTs with terms of both signs), what rounding may have
taken from them is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from bandmf._types import FloatArray, IntArray
from bandmf.participation import FixedEpochs, MinSeparation, Participation, Single, checked_participation
from bandmf.strategies import Strategy
from bandmf.strategies.base import spaced_toeplitz_norm
from bandmf.strategies.scaled import Scaled, unscaled

# Entries of X, and operations to compute them, beyond which the tighter bounds are too expensive.
_MOST_ENTRIES, _MOST_OPERATIONS = 2**28, 2**37
_NEGLIGIBLE = 1e-9  # of the sensitivity


@dataclass(frozen=True)
class Sensitivity:
    """A certified upper bound on the sensitivity, whether it is exact, and how it was found."""

    value: float
    exact: bool
    method: str


def sensitivity(strategy: Strategy, participation: Participation | None = None) -> float:
    """The tightest certified value; `certified_sensitivity` also says whether it is exact.

    >>> from bandmf.participation import MinSeparation
    >>> from bandmf.strategies import BandedToeplitz
    >>> C = BandedToeplitz([1.0, 0.5], steps=8, normalize_columns=False)
    >>> round(sensitivity(C) ** 2, 12), round(sensitivity(C, MinSeparation(3, 2)) ** 2, 12)
    (1.25, 3.75)
    """
    return certified_sensitivity(strategy, participation).value


def certified_sensitivity(strategy: Strategy, participation: Participation | None = None) -> Sensitivity:
    """The tightest certified value of the sensitivity, with its standing.

    >>> from bandmf.participation import MinSeparation
    >>> from bandmf.strategies import BandedToeplitz
    >>> found = certified_sensitivity(BandedToeplitz([1.0, 0.5], steps=8), MinSeparation(3, 2))
    >>> round(found.value**2, 12), found.exact, found.method
    (3.0, True, 'disjoint columns of equal norm')
    """
    participation = checked_participation(participation)
    found, spacing = _computed(strategy, participation), participation.spacing(strategy.steps)
    error = strategy.sensitivity_error(spacing.separation, spacing.participations)
    if error == 0:
        return found
    # |C u| <= |computed C u| + |E u|, where E is what rounding took from C.
    exact = found.exact and error <= _NEGLIGIBLE * found.value
    return Sensitivity(found.value + error, exact, found.method)


def _computed(strategy: Strategy, participation: Participation) -> Sensitivity:
    """For the entries of C as they are computed."""
    if isinstance(participation, Single):
        return Sensitivity(strategy.largest_column_norm(), True, "largest column norm")
    if isinstance(participation, FixedEpochs):
        return _fixed_epochs(strategy, participation)
    return _min_separation(strategy, participation)


# --- fixed epochs -------------------------------------------------------------------------------------


def _fixed_epochs(strategy: Strategy, participation: FixedEpochs) -> Sensitivity:
    n, epochs = strategy.steps, participation.epochs
    length = participation.separation(n)
    if epochs == 1:
        return Sensitivity(strategy.largest_column_norm(), True, "one participation")
    if length >= strategy.bands:  # no two participations interact: the largest sum of squared norms
        return _separated(strategy, MinSeparation(epochs, length), aligned=True)
    # A later start only cuts rows off a plain Toeplitz matrix: the pattern that starts at 0 is the worst.
    if (value := strategy.spaced_norm(length, epochs)) is not None:
        return Sensitivity(value, True, "non-increasing Toeplitz")
    if (C := strategy.nonnegative()) is not None:  # then all contributions with one sign are the worst
        starts = np.arange(n) % length
        patterns = sparse.csc_array((np.ones(n), (np.arange(n), starts)), shape=(n, length))
        return Sensitivity(math.sqrt((C @ patterns).power(2).sum(axis=0).max()), True, "all patterns")
    starts = np.arange(1 if strategy.toeplitz() is not None else length)
    gram = _pattern_grams(strategy, starts, length, epochs)
    totals = np.abs(gram).sum(axis=(1, 2))
    worst = int(np.argmax(totals))
    exact = _signable(gram[worst])
    return Sensitivity(math.sqrt(totals[worst]), exact, "all patterns")


def _pattern_grams(strategy: Strategy, starts: IntArray, length: int, epochs: int) -> FloatArray:
    """X restricted to the pattern of each start: shape (starts, epochs, epochs)."""
    grams = np.zeros((len(starts), epochs, epochs))
    diagonal = _gram_diagonals(strategy)
    for between in range(min(epochs, -(-strategy.bands // length))):
        entries = diagonal(between * length)
        for a in range(epochs - between):
            c = a + between
            grams[:, a, c] = grams[:, c, a] = entries[a * length + starts]
    return grams


def _gram_diagonals(strategy: Strategy) -> Callable[[int], FloatArray]:
    """X[j + lag, j] for every j, by the lag."""
    n, bands = strategy.steps, strategy.bands
    if isinstance(strategy, Scaled):
        of_unscaled, scales = _gram_diagonals(strategy.strategy), strategy.scales
        return lambda lag: of_unscaled(lag) * scales[: n - lag] * scales[lag:]
    if (theta := strategy.toeplitz()) is not None:  # a running sum of theta_t theta_{t+l}, as long as rows are left

        def of_toeplitz(lag: int) -> FloatArray:
            sums = np.append(0.0, np.cumsum(theta[: max(0, len(theta) - lag)] * theta[lag:]))
            return sums[np.minimum(n - lag - np.arange(n - lag), len(sums) - 1)]

        return of_toeplitz
    columns = strategy.columns()
    return lambda lag: np.sum(columns[: n - lag, lag:] * columns[lag:, : bands - lag], axis=1)


def _signable(gram: FloatArray) -> bool:
    """Whether signs s exist with s_i s_j X_ij >= 0 throughout, so that sum |X_ij| is attained."""
    signs = np.zeros(len(gram))
    for root in range(len(gram)):
        if signs[root]:
            continue
        signs[root], waiting = 1, [root]
        while waiting:
            i = waiting.pop()
            fresh = np.flatnonzero((gram[i] != 0) & (signs == 0))
            signs[fresh] = signs[i] * np.sign(gram[i, fresh])
            waiting.extend(fresh)
    return bool(np.all(np.outer(signs, signs) * gram >= 0))


# --- minimum separation -------------------------------------------------------------------------------


def _min_separation(strategy: Strategy, participation: MinSeparation) -> Sensitivity:
    n, bands, separation = strategy.steps, strategy.bands, participation.separation
    count = participation.count(n)
    if count == 1:
        return Sensitivity(strategy.largest_column_norm(), True, "one participation")
    if separation >= bands:
        return _separated(strategy, participation)
    if (value := strategy.spaced_norm(separation, count)) is not None:
        return Sensitivity(value, True, "non-increasing Toeplitz")
    bounds = [(count * strategy.largest_column_norm(), "triangle inequality")]
    if (own := strategy.separated_bound(separation, count)) is not None:
        bounds.append((own, "bound of the family"))
    if (theta := strategy.toeplitz()) is not None:
        majorant = np.maximum.accumulate(np.abs(theta)[::-1])[::-1]
        bounds.append((spaced_toeplitz_norm(majorant, n, separation, count), "non-increasing majorant"))
    terms = bands if unscaled(strategy).toeplitz() is None else 1  # of an entry of X, beside those of its neighbor
    if n * bands <= _MOST_ENTRIES and n * bands * terms <= _MOST_OPERATIONS:
        if count == 2 or 2 * separation >= bands:
            return Sensitivity(_chain(_lagged_gram(strategy), separation, count), True, "neighbors interact (chain)")
        bounds.append((_column_scores(strategy, separation, count), "sum of column bounds"))
        if n * bands * count <= _MOST_OPERATIONS >> 8:
            bounds.append((_row_scores(_lagged_gram(strategy), separation, count), "sum of row bounds"))
    value, method = min(bounds)
    return Sensitivity(value, False, method)


def _separated(strategy: Strategy, participation: MinSeparation, aligned: bool = False) -> Sensitivity:
    """No two participations interact: the largest sum of squared column norms over the patterns."""
    n, separation = strategy.steps, participation.separation
    count = participation.count(n)
    if strategy.equal_column_norms():
        value = math.sqrt(count) * strategy.largest_column_norm()
        return Sensitivity(value, True, "disjoint columns of equal norm")
    if strategy.toeplitz() is not None:  # norms fall towards the end: start at 0, as dense as may be
        norms = np.array([np.linalg.norm(strategy.columns(j, j + 1)) for j in range(0, n, separation)][:count])
        return Sensitivity(float(np.linalg.norm(norms)), True, "disjoint columns")
    squares = strategy.column_norms() ** 2
    if aligned:
        best = squares.reshape(count, separation).sum(axis=0).max()
    else:
        best = _best_separated_sum(squares, separation, count)
    return Sensitivity(math.sqrt(best), True, "disjoint columns")


def _best_separated_sum(scores: FloatArray, separation: int, count: int) -> float:
    """The largest sum of at most `count` non-negative scores at places at least `separation` apart."""
    n = len(scores)
    best = np.zeros(n + separation)  # best[i]: from places >= i with the participations used so far
    for _ in range(count):
        take = np.zeros(n + separation)
        take[:n] = scores + best[separation : n + separation]
        best = np.maximum.accumulate(take[::-1])[::-1]
    return float(best[0])


def _lagged_gram(strategy: Strategy) -> FloatArray:
    """|X[j, j - l]| as an (n, bands) array: entry [j, l], zero where j - l is negative."""
    n, bands = strategy.steps, strategy.bands
    lags, diagonal = np.zeros((n, bands)), _gram_diagonals(strategy)
    for lag in range(bands):
        lags[lag:, lag] = np.abs(diagonal(lag))
    return lags


def _chain(lags: FloatArray, separation: int, count: int) -> float:
    """max over patterns of sum |X_ij| when only neighbors in the pattern interact. Exact, O(n k b)."""
    n, bands = lags.shape
    best = lags[:, 0].copy()  # best[j]: over patterns whose last participation is j
    for _ in range(count - 1):
        reach = np.maximum.accumulate(best)
        candidate = best.copy()
        far = max(bands, separation)
        candidate[far:] = np.maximum(candidate[far:], lags[far:, 0] + reach[: n - far])
        for lag in range(separation, bands):
            extended = lags[lag:, 0] + best[: n - lag] + 2 * lags[lag:, lag]
            np.maximum(candidate[lag:], extended, out=candidate[lag:])
        best = candidate
    return math.sqrt(best.max())


def _column_scores(strategy: Strategy, separation: int, count: int) -> float:
    """An upper bound: the r-th participation before j lies at least r separations back.

    Column j is charged |X_jj| + 2 sum_r max_{l >= r separation} |X[j, j-l]|, and the best separated sum of
    these charges bounds every pattern.
    """
    n, diagonal = strategy.steps, _gram_diagonals(strategy)
    scores, largest = np.zeros(n), np.zeros(n)  # of the lags so far, from the longest one down
    for lag in range(strategy.bands - 1, 0, -1):
        np.maximum(largest[lag:], np.abs(diagonal(lag)), out=largest[lag:])
        if lag % separation == 0 and lag < count * separation:
            scores += 2 * largest
    return math.sqrt(_best_separated_sum(scores + diagonal(0), separation, count))


def _row_scores(lags: FloatArray, separation: int, count: int) -> float:
    """Another upper bound: column j is charged sum_i |X_ij| over the worst pattern that holds j.

    That pattern is the best choice of participations before j together with the best one after it.
    """
    n, bands = lags.shape
    after = np.zeros_like(lags)  # |X[j, j + l]|: the same numbers seen from the earlier step
    for lag in range(bands):
        after[: n - lag, lag] = lags[lag:, lag]
    before, later = (_best_lags(side, separation, count - 1) for side in (lags, after))
    splits = [before[used] + later[count - 1 - used] for used in range(count)]
    scores = lags[:, 0] + np.max(splits, axis=0)
    return math.sqrt(_best_separated_sum(scores, separation, count))


def _best_lags(lags: FloatArray, separation: int, count: int) -> list[FloatArray]:
    """For each row, the largest sum of at most 0, 1, ... count entries, at lags that far apart and from zero."""
    n, bands = lags.shape
    best = np.zeros((n, bands + separation))  # best[:, l]: from lags >= l, with the participations used so far
    sums = [best[:, separation]]
    for used in range(1, count + 1):
        if used <= (bands - 1) // separation:
            take = np.zeros_like(best)
            take[:, :bands] = lags + best[:, separation:]
            best = np.maximum.accumulate(take[:, ::-1], axis=1)[:, ::-1]
        sums.append(best[:, separation].copy())
    return sums
