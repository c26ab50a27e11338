"""How far rounding takes the noise of an engine from the exact C^-1 z, in units of z's deviation.

Engines add up float32 numbers. Each rounding is off by at most 2^-24 of what it rounds, 0.4 of that in root mean
square, and partial sums can be far larger than what is left of them. Roundings are independent, or nearly so. Seen from
z (by C y = z), where all numbers have the deviation one, the mean square of a step's error is below 2^-48 times the sum
of the mean squares of all that is rounded on its way:

    banded C          the partial sums z_i - C[i, i-1] y_{i-1} - ... of a step, and each of its products thrice: as a
                      product, by its weight and by the y that is released. Engines add in several orders, so every
                      partial sum counts as the largest, from either end.
    banded C^-1       as many partial sums as it has bands, each at most |r|; C adds up the errors of all steps: |C|.
    BLT               the partial sums of a step, at most sum_k |scale_k| dev(x_k), and the buffers x_k, which keep
                      what they rounded for m_k steps.

None of it depends on how C is scaled, nor on the noise's deviation or the clip norm. It is a property of the strategy:
noise that is off by more than a small part of itself has so few values that a sum can be read off.

For Toeplitz C the deviations of partial sums follow from the covariances of y; for others y is simulated, with a fixed
seed. In 900 runs of engines with random and extreme strategies the error was 0.05 to 0.8 of what is returned here
(tests/test_rounding_error.py). Strategies in use have 1e-7 to 2e-5.

What this refuses can be read off one coordinate. What it accepts is not proved to hide anything in its last bits: an
attack on them tells more than delta where all other gradients are known, from one small coordinate or from many, as it
may for any float32 noise (tests/attacks/test_coarse_noise.py; docs/guarantees.md, "Finite precision").
"""

from __future__ import annotations

import math

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.linalg import solve_banded

from bandmf._types import FloatArray
from bandmf.strategies.banded_inverse import BandedInverse
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.scaled import Scaled
from bandmf.strategies.stamping import Stamped
from bandmf.strategies.toeplitz import BandedToeplitz
from bandmf.streaming import Matrices, squared_norm

ROUNDING = 2.0**-24  # the most by which a number is rounded, relatively
_INPUT = 4.0  # z itself: a product with it, and its own digits, which differ between engines
_POINTS = 32  # of the circle, for each coefficient
_HOPELESS = 1e9  # deviation of y, in units of z's, beyond which nothing needs to be computed
_COORDINATES = 32  # that are simulated


def rounding_error(strategy: Strategy) -> float:
    """The root mean square error of z that an engine has in effect; infinite where C^-1 overflows.

    >>> rounding_error(BandedToeplitz([1.0, 0.5], steps=100)) < 1e-6
    True
    >>> rounding_error(BandedInverse([1.0, -4.0, 6.0, -4.0, 1.0], steps=100)) > 1e-3
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = ROUNDING * math.sqrt(_squares(strategy))
    return found if math.isfinite(found) else math.inf


def _squares(strategy: Strategy) -> float:
    """The mean squares of what is rounded, added up, in units of z's variance."""
    match strategy:
        case Scaled(strategy=unscaled):  # its steps are multiplied after all that is added up
            return _squares(unscaled)
        case Stamped(epoch=BufferedToeplitz() as epoch):  # runs by its outputs, see Stamped.recurrence
            return _toeplitz(epoch.toeplitz(), epoch.steps)
        case Stamped(epoch=epoch):
            return _squares(epoch)
        case BandedToeplitz(coefficients=theta, steps=steps):  # dividing columns changes y, not what is added
            return _toeplitz(theta, steps)
        case BandedInverse(inverse_coefficients=r):
            size = float(np.linalg.norm(r) * np.linalg.norm(strategy.toeplitz()))
            return _INPUT + (np.count_nonzero(r) + 2) * size**2
        case BufferedToeplitz():
            return _buffered(strategy)
    if isinstance(strategy.recurrence, OutputRecurrence) and strategy.bands > 1:
        return _simulated(strategy)
    return _INPUT  # Identity, and the tree: nothing in them can be chosen


def _toeplitz(theta: FloatArray, steps: int) -> float:
    """By the covariances of y, of which all partial sums are made."""
    covariances = _covariances(theta, steps)
    bands, variance = len(theta), float(covariances[0])
    if not variance * theta[0] ** 2 < _HOPELESS**2:
        return variance * theta[0] ** 2

    def largest(weights: FloatArray) -> float:
        """Variance of weights[0] y_0 + ... + weights[k] y_k, for the k where it is largest."""
        size = next_fast_len(2 * bands)
        earlier = irfft(rfft(weights, size) * rfft(np.append(0.0, covariances[1:]), size), size)[: len(weights)]
        return float(np.cumsum(weights**2 * variance + 2 * weights * earlier).max(initial=0.0))

    others = theta[1:]
    partial = 1 + max(largest(others), largest(others[::-1]))
    return _INPUT + np.count_nonzero(theta) * partial + 3 * float(others @ others) * variance


def _covariances(theta: FloatArray, steps: int) -> FloatArray:
    """E[y_i y_{i-t}] late in the run, for as many t as theta has coefficients.

    If theta has no zero in the unit disk, they are the Fourier coefficients of 1 / |theta|^2 on the circle; that
    it has none is told by how often theta winds around zero there, where the points are close enough to see it.
    With a zero in the disk or on the circle, y grows: its coefficients are computed, for all steps.
    """
    values = rfft(theta, size := 1 << math.ceil(math.log2(_POINTS * len(theta))))  # on the upper half
    turns = np.angle(values[1:] / values[:-1]) if np.all(values) else np.array([math.pi])
    if np.abs(turns).max() < 1 and abs(turns.sum()) < 1:
        return irfft(1 / np.abs(values) ** 2, size)[: len(theta)]
    inverse = _inverse_series(theta, steps)
    spectrum = rfft(inverse, size := next_fast_len(len(inverse) + len(theta)))
    return irfft(np.abs(spectrum) ** 2, size)[: len(theta)]


def _inverse_series(theta: FloatArray, steps: int) -> FloatArray:
    """The first coefficients of 1 / theta(x): Newton's iteration, which doubles their number; fewer if hopeless."""
    g = np.array([1 / theta[0]])
    while len(g) < steps and np.linalg.norm(theta[0] * g) < _HOPELESS:
        terms = min(2 * len(g), steps)
        size = next_fast_len(2 * terms)
        spectrum = rfft(g, size)
        residual = irfft(spectrum * rfft(theta[:terms], size), size)[:terms]
        residual[0] -= 2
        g = -irfft(spectrum * rfft(residual, size), size)[:terms]
    return g


def _buffered(strategy: BufferedToeplitz) -> float:
    scales, decays, steps = strategy.scales, strategy.decays, strategy.steps
    ones = np.ones(len(decays))
    closed = np.diag(decays) - np.outer(ones, scales)  # y = z - scales x, then x <- decays x + y
    units = np.eye(len(decays))
    variances = np.array([squared_norm(Matrices(closed, ones, unit, 0.0), steps) for unit in units])
    if not np.all(np.isfinite(variances)):
        return math.inf
    terms = scales**2 * np.maximum(variances, 0)
    kept = np.minimum(steps, 1 / np.maximum(1 - decays**2, 1 / steps))
    largest = (1 + np.sqrt(terms).sum()) ** 2
    return _INPUT + (len(decays) + 1) * float(largest) + 2 * float(terms @ (1 + kept))


def _simulated(strategy: Strategy) -> float:
    """y of a few coordinates, by substitution; all partial sums of all steps."""
    z = np.random.Generator(np.random.Philox(0)).standard_normal((strategy.steps, _COORDINATES))
    columns = strategy.columns()
    steps, bands = columns.shape
    y = solve_banded((bands - 1, 0), columns.T, z)
    rows = np.zeros((steps, bands))  # rows[i, r] = C[i, i - r]
    for r in range(bands):
        rows[r:, r] = columns[: steps - r, r]
    partial = np.maximum(*(_partial_sums(rows, y, order) for order in (range(1, bands), range(bands - 1, 0, -1))))
    products = np.zeros(steps)
    for r in range(1, bands):
        products[r:] += rows[r:, r] ** 2 * np.mean(y[: steps - r] ** 2, axis=1)
    return float((_INPUT + np.count_nonzero(rows, axis=1) * (1 + partial) + 3 * products).max())


def _partial_sums(rows: FloatArray, y: FloatArray, order: range) -> FloatArray:
    """For each step, the largest mean square of its partial sums when added in this order."""
    sums, largest = np.zeros_like(y), np.zeros(len(y))
    for r in order:
        sums[r:] += rows[r:, r, None] * y[: len(y) - r]
        np.maximum(largest, np.mean(sums**2, axis=1), out=largest)
    return largest
