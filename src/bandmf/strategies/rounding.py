"""How far rounding takes the noise of an engine from the exact C^-1 z, in units of z's deviation.

Engines add up float32 numbers. What a step rounds is about 2^-24 of its partial sums, and those can be far larger
than what is left of them. Seen from z (by C y = z), where all numbers have the deviation one, a step is off by 2^-24
times

    1 + sum_r |C[i, i-r]| dev(y_{i-r})            banded C: what is added up, each term by its deviation,
    1 + sum_k |scale_k| dev(x_k) sqrt(m_k)        BLT: buffers also keep what they rounded, for m_k steps,
    |r| |C|                                       banded C^-1: the release is rounded, and C adds up what was rounded.

None of it depends on how C is scaled, nor on the noise's deviation or the clip norm. It is a property of the strategy:
noise that is off by more than a small part of itself has so few values that a sum can be read off.

For Toeplitz C and BLTs the deviations of y and x are norms of their coefficients. For others y is simulated, with a
fixed seed: only the order of magnitude matters. Strategies in use have errors of 1e-7 to 2e-5, up to
1e-4 for plain differences of a million steps; attacks find more than chance from a few 1e-4 on.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_banded, solve_triangular
from scipy.signal import lfilter

from bandmf._types import FloatArray
from bandmf.strategies.banded_inverse import BandedInverse
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.dense import Dense
from bandmf.strategies.stamping import Stamped
from bandmf.strategies.toeplitz import BandedToeplitz
from bandmf.streaming import Matrices, squared_norm

ROUNDING = 2.0**-24
_POINTS = 32  # of the circle, for each coefficient
_OVER = 4  # terms do not all have one sign: for banded C the sum of their sizes was 9 to 44 times what is measured
_COORDINATES = 16  # that are simulated


def rounding_error(strategy: Strategy) -> float:
    """The root mean square error of z that an engine has in effect; infinite where C^-1 overflows.

    >>> rounding_error(BandedToeplitz([1.0, 0.5], steps=100)) < 1e-6
    True
    >>> rounding_error(BandedInverse([1.0, -4.0, 6.0, -4.0, 1.0], steps=100)) > 1e-3
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = ROUNDING * _sums(strategy)
    return found if math.isfinite(found) else math.inf


def _sums(strategy: Strategy) -> float:
    """What is rounded, in units of z's deviation."""
    match strategy:
        case Stamped(epoch=BufferedToeplitz() as epoch):  # runs by its outputs, see Stamped.recurrence
            return _toeplitz(epoch.toeplitz(), epoch.steps)
        case Stamped(epoch=epoch):
            return _sums(epoch)
        case BandedToeplitz(coefficients=theta, steps=steps):  # dividing columns changes y, not what is added
            return _toeplitz(theta, steps)
        case BandedInverse(inverse_coefficients=r):
            return float(np.linalg.norm(r) * np.linalg.norm(strategy.toeplitz()))
        case BufferedToeplitz():
            return _buffered(strategy)
    if isinstance(strategy.recurrence, OutputRecurrence) and strategy.bands > 1:
        return _simulated(strategy)
    return 1.0  # Identity, and the tree: nothing in them can be chosen


def _toeplitz(theta: FloatArray, steps: int) -> float:
    """By the norm of 1 / theta(x)."""
    return 1 + float(np.abs(theta[1:]).sum()) * math.sqrt(_energy_of_inverse(theta, steps)) / _OVER


def _energy_of_inverse(theta: FloatArray, steps: int) -> float:
    """The sum of the squares of the first coefficients of 1 / theta(x), or somewhat more.

    If theta has no zero in the unit disk, that of all coefficients is the mean of 1 / |theta|^2 over the circle; that
    it has none is told by how often theta winds around zero there, where the points are close enough to see it.
    With a zero in the disk coefficients grow, perhaps late, so all of them are computed.
    """
    values = np.fft.fft(theta, 1 << math.ceil(math.log2(_POINTS * len(theta))))
    turns = np.angle(np.roll(values, -1) / values) if np.all(values) else np.array([math.pi])
    if np.abs(turns).max() < 1 and abs(turns.sum()) < 1:
        return float(np.mean(1 / np.abs(values) ** 2))
    return float((lfilter([1.0], theta, np.eye(1, steps)[0]) ** 2).sum())


def _buffered(strategy: BufferedToeplitz) -> float:
    scales, decays, steps = strategy.scales, strategy.decays, strategy.steps
    ones = np.ones(len(decays))
    closed = np.diag(decays) - np.outer(ones, scales)  # y = z - scales x, then x <- decays x + y
    units = np.eye(len(decays))
    variances = [squared_norm(Matrices(closed, ones, unit, 0.0), steps) for unit in units]
    if not np.all(np.isfinite(variances)):
        return math.inf
    kept = np.minimum(steps, 1 / np.maximum(1 - decays**2, 1 / steps))
    return 1 + float(np.abs(scales) @ np.sqrt(np.maximum(variances, 0) * kept))


def _simulated(strategy: Strategy) -> float:
    """y of a few coordinates, by substitution."""
    z = np.random.Generator(np.random.Philox(0)).standard_normal((strategy.steps, _COORDINATES))
    if isinstance(strategy, Dense):
        deviations = _deviations(solve_triangular(strategy.matrix, z, lower=True))
        sums = np.abs(strategy.matrix) @ deviations
    else:
        columns = strategy.columns()
        bands = columns.shape[1]
        deviations = _deviations(solve_banded((bands - 1, 0), columns.T, z))
        sums = np.zeros(strategy.steps)
        for r in range(bands):
            sums[r:] += np.abs(columns[: strategy.steps - r, r]) * deviations[: strategy.steps - r]
    return 1 + float(sums.max()) / _OVER


def _deviations(y: FloatArray) -> FloatArray:
    return np.sqrt(np.mean(y**2, axis=1))
