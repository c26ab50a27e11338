"""The Gram matrix of balls-in-bins: all that its privacy depends on.

An example draws one of `cycle` positions and takes part in the steps j, j + cycle, ... < n. With unit clipping
it moves C x by at most m_j = sum of the columns j, j + cycle, ... of |C|, entry by entry, and both divergences
grow with every entry of

    G[i, j] = <m_i, m_j>,    i, j < cycle.

|C|, not C: gradients are chosen adaptively, and signs that cancel for one choice add up for another.

Toeplitz C: m_j is m_0 moved down by j and cut off at n (columns past the end have no rows left), so

    G[i - 1, j - 1] = G[i, j] + m_0[n - i] m_0[n - j],

and only the last column of G needs sums over all the steps: cycle dot products. Toeplitz C times step scales:
<c_j, c_{j+l}> is the one of Toeplitz C, a running sum along each diagonal, times both scales; G adds up those of all
epochs.

Guarantees: no entry is below that of the exact C of the strategy's float64 parameters. (Engines multiply by float32
numbers: plans are made with parameters that float32 holds exactly, see strategies.single_precision.)
  - Every entry is a sum of at most n products of numbers >= 0, so whatever the order it has a relative error of
    at most (n + epochs + 4) 2^-53, plus what |C|'s entries have; each entry is raised by more than that.
  - Coefficients that are given (banded Toeplitz) are exact; divided by their norm, they err by at most
    (bands + 8) 2^-53. Step scales are exact, and their products err by 2^-52. Those of a BLT are powers and sums:
    raised by their rounding, term by term. Those of a banded inverse, 1 / r(x): with t the computed ones and
    e = r t - 1 their residual, the exact ones differ by at most |e|_inf |t|_1 / (1 - |e|_1), which is added to
    each. This covers where t was cut off, too. Columns of a stamped strategy are those of its epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz
from bandmf.strategies.base import Strategy
from bandmf.strategies.scaled import Scaled, factors
from bandmf.strategies.stamping import Stamped

MAX_CYCLE = 2**14
_ROUNDING = 2.0**-53
_MOST_ENTRIES = 2**27  # of m, where it has to be written out


def gram_matrix(strategy: Strategy, cycle: int) -> FloatArray:
    """G, cycle x cycle, for an example that takes part in every cycle-th step from a random one on.

    `cycle` is the number of positions, steps / epochs; it need not divide the steps.

    >>> from bandmf.strategies import BandedToeplitz
    >>> C = BandedToeplitz([1.0, -0.5], steps=4, normalize_columns=False)
    >>> gram_matrix(C, cycle=2).round(6)
    array([[2.5 , 1.5 ],
           [1.5 , 2.25]])
    """
    n = strategy.steps
    most = min(n, MAX_CYCLE)
    cycle = _check.whole("cycle", cycle, 1, most, f"{'steps' if most == n else 'the largest'}={most}")
    if isinstance(strategy, BandedToeplitz) and strategy.normalize_columns:
        gram = _normalized(strategy, cycle)
    elif (theta := raised_coefficients(strategy)) is not None:
        gram = _toeplitz(theta, n, cycle)
    elif isinstance(strategy, Scaled) and (found := factors(strategy)) is not None:
        theta = raised_coefficients(strategy.strategy)
        gram = _factored(np.abs(found[0]) if theta is None else theta, found[1], cycle)
    else:
        gram = _of_rows(strategy, cycle, 0)
    epochs = -(-n // cycle)
    gram *= 1 + 2 * (n + epochs + 2 * strategy.bands + 24) * _ROUNDING
    gram.setflags(write=False)
    return gram


def checked_gram(gram: FloatArray) -> FloatArray:
    """`gram`, if it can be one: square, symmetric, no entry negative, positive diagonal."""
    gram = _check.array("gram", gram, 2)
    if gram.shape[0] != gram.shape[1] or not np.array_equal(gram, gram.T):
        raise ValueError(f"gram: must be a symmetric matrix, not of shape {gram.shape}; use gram_matrix")
    _check.whole("cycle", len(gram), 1, MAX_CYCLE)
    if gram.min() < 0:
        raise _check.fail("gram", float(gram.min()), "no entry may be negative", "use |C|, as gram_matrix does")
    _check.moderate("gram's diagonal", np.diag(gram))
    if np.diag(gram).min() <= 0:
        raise _check.fail("gram", 0.0, "its diagonal must be positive", "every position must take part")
    return gram


def marks(gram: FloatArray) -> tuple[float, float, float]:
    """Three numbers by which a Gram matrix is recognized: trace, sum, and a sum with pseudo-random weights.

    Not a hash: another machine rounds differently. To be compared with a relative tolerance.
    """
    weights = np.random.Generator(np.random.Philox(len(gram))).random(gram.shape)
    return float(np.trace(gram)), float(gram.sum()), float((weights * gram).sum())


def raised_coefficients(strategy: Strategy) -> FloatArray | None:
    """|c_t| of a plain Toeplitz C, each no less than the exact one up to the rounding that is added at the end."""
    theta = strategy.toeplitz()
    if theta is None:
        return None
    raised = np.abs(theta)
    if isinstance(strategy, BandedInverse):
        error = _error_of_inverse(strategy.inverse_coefficients, theta, strategy.steps)
        return _padded(raised, strategy.steps) + error
    if isinstance(strategy, BufferedToeplitz):
        raised[1:] += strategy.coefficient_errors()
    return raised


def raised_columns(strategy: Strategy) -> Callable[[int, int], FloatArray]:
    """Columns start ... stop of |C|, none less than the exact one up to the rounding that is added at the end."""
    if isinstance(strategy, Scaled):
        raised, scales = raised_columns(strategy.strategy), strategy.scales
        return lambda start, stop: raised(start, stop) * scales[start:stop, None]
    if isinstance(strategy, Stamped):
        length = strategy.epoch.steps
        epoch = raised_columns(strategy.epoch)(0, length)
        return lambda start, stop: epoch[np.arange(start, stop) % length]
    theta = raised_coefficients(strategy)
    if theta is None:
        return lambda start, stop: np.abs(strategy.columns(start, stop))
    theta = _padded(theta, strategy.bands)
    return lambda start, stop: band_columns.toeplitz_columns(theta, strategy.steps, start, stop)


def _error_of_inverse(r: FloatArray, theta: FloatArray, steps: int) -> float:
    """A bound on how far theta is from the exact 1 / r(x), any coefficient, also those that were cut off."""
    residual = np.convolve(r, theta)[:steps]
    residual[0] -= 1
    sizes = np.convolve(np.abs(r), np.abs(theta))[:steps]
    error = np.abs(residual) + 2 * (len(r) + 2) * _ROUNDING * sizes
    if error.sum() > 0.5:
        raise _check.fail("steps", steps, "1 / r(x) is too ill-conditioned there to be bounded", "change C^-1")
    return float(error.max() * np.abs(theta).sum() / (1 - error.sum())) * (1 + 1e-9)


def _padded(theta: FloatArray, length: int) -> FloatArray:
    return np.pad(theta[:length], (0, max(0, length - len(theta))))


def _toeplitz(theta: FloatArray, n: int, cycle: int) -> FloatArray:
    """G of the Toeplitz matrix with these coefficients (>= 0) and n >= cycle rows."""
    first = _padded(theta, n)
    for start in range(cycle, n, cycle):  # m_0: the columns 0, cycle, 2 cycle, ... added up
        length = min(cycle, n - start)
        first[start : start + length] += first[start - cycle : start - cycle + length]
    reach = n - cycle + 1  # rows of the last position
    backwards = first[::-1][: cycle - 1]  # entry i - 1 is m_0[n - i]
    gram = np.zeros((cycle, cycle))
    last = np.array([first[:reach] @ first[lag : lag + reach] for lag in range(cycle)])
    gram[-1] = gram[:, -1] = last[::-1]
    for i in range(cycle - 1, 0, -1):
        gram[i - 1, :-1] = gram[i, 1:] + backwards[i - 1] * backwards
    return gram


def _normalized(strategy: BandedToeplitz, cycle: int) -> FloatArray:
    """Columns of norm one: only the last bands - 1 columns, and rows, are not those of a Toeplitz matrix."""
    theta = np.abs(strategy.coefficients)
    settled = strategy.steps - strategy.bands + 1
    if settled < cycle:
        return _of_rows(strategy, cycle, 0)
    upper = _toeplitz(theta / np.linalg.norm(theta), settled, cycle)
    return upper + _of_rows(strategy, cycle, settled) if strategy.bands > 1 else upper


def _factored(theta: FloatArray, d: FloatArray, cycle: int) -> FloatArray:
    """G of C[i, j] = theta[i - j] d[j] >= 0, by the diagonals of C'C: O(n bands)."""
    n = len(d)
    epochs = -(-n // cycle)
    theta, d = _padded(theta, n), _padded(d, epochs * cycle)
    half = np.zeros((cycle, cycle))  # [r, i] is <m_{i+r}, m_i>, half of it for r = 0, i + r taken modulo the cycle
    for lag in range(int(np.flatnonzero(theta)[-1]) + 1):
        # <c_j, c_{j+lag}>: a sum that ends where the rows do.
        entries = np.zeros(epochs * cycle)
        entries[: n - lag] = np.cumsum(theta[: n - lag] * theta[lag:])[::-1]
        entries[: n - lag] *= d[: n - lag] * d[lag:n]
        half[lag % cycle] += entries.reshape(epochs, cycle).sum(axis=0) / (1 if lag else 2)
    i = np.arange(cycle)
    gram = np.empty_like(half)
    gram[(i[:, None] + i) % cycle, i] = half
    return gram + gram.T


def _of_rows(strategy: Strategy, cycle: int, start: int) -> FloatArray:
    """What the rows start ... n - 1 of |C| contribute to G, written out."""
    n, bands = strategy.steps, strategy.bands
    width = n + bands
    if cycle * (width - start) > _MOST_ENTRIES:
        remedy = "use a Toeplitz strategy, a banded inverse or a BLT"
        raise _check.fail("cycle", cycle, f"too large for steps={n} and a general strategy", remedy)
    m = np.zeros((cycle, width - start + cycle))  # room to the left for rows before `start`
    columns = raised_columns(strategy)
    for epoch in range(max(0, (start - bands) // cycle), -(-n // cycle)):
        for j, column in enumerate(columns(epoch * cycle, min(n, (epoch + 1) * cycle))):
            row = epoch * cycle + j - start  # of the column's first entry
            skipped = max(0, -row)
            if skipped < bands:
                m[j, row + skipped : row + bands] += column[skipped:]
    m = m[:, : n - start]
    return m @ m.T
