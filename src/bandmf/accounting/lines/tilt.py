"""The proposal across the lines: r is tilted to where the mean of the v_j is large, with a proved bound on its weights.

Draw positions i_1, ..., i_c, each given those before it,

    i_t = j  with weight  exp(S_t[j]),    S_t = R_{i_1} + ... + R_{i_{t-1}}  (rows of R),

and then r = R_{i_1} + ... + R_{i_c} + N(0, R). With Y = mean_j v_j, p uniform and h = E_z (L - e^epsilon)+ on the
line through r,

    w = h Z_1 ... Z_c / Y^c,    Z_t = mean_j exp(S_t[j]),    E w = E_r h = delta:

relative to counting times N(0, R), (i_1, ..., i_c, r) has the density v_{i_1} ... v_{i_c} / (b^c Z_1 ... Z_c), and the
posteriors v_i / (b Y), by which h is spread over the chains, add up to one.

Bound. Let m(z) be the largest of a z - a^2 / 2 over a between the least and the largest slope. Then L(z) <= Y e^m(z),
and h <= B(Y) = E_z (Y e^m(z) - e^epsilon)+, which has a closed form and rises with Y. Hoelder: Z_t is at most
max_i mean_j exp((t - 1) R_ij). Gibbs: log Y >= mean_j (r_j - R_jj / 2) = -mean_j R_jj / 2, as p.r = 0. So

    w <= max over these Y of B(Y) / Y^c * the product of the bounds of Z_t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.bins.loss import log_mean_exp
from bandmf.accounting.lines.line import Lines

MAX_LENGTH = 256
_FINE = 0.01  # of log Y^c: so much may the maximum be too large
_FARTHEST = 8.0  # of log Y, above epsilon, where B(Y) is replaced by a multiple of Y


@dataclass(frozen=True)
class Tilt:
    """The proposal's parameter: the length c of its chain of positions.

    Guarantees: no weight is above `bound`, and their expectation is the remove divergence. The lines' p is uniform.
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", _check.whole("length", self.length, 1, MAX_LENGTH))

    def bound(self, lines: Lines, epsilon: float) -> float:
        """The most that a weight can be."""
        log_bound = log_peak(lines, epsilon, self.length) + float(log_scales(lines, self.length)[-1])
        return math.exp(min(log_bound + 4 * lines.rounding(self.length) + 1e-6, 700.0))

    def misdrawn(self, lines: Lines) -> float:
        """How far rounding takes the law of the chain from the one meant, in total variation: at most this."""
        return self.length * lines.loss.cycle * 2.0**-50

    def sample(self, lines: Lines, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
        """Independent samples with the remove divergence as expectation."""
        log_v, log_weight = self._draw(lines, generator, rows)
        slack = lines.rounding(self.length)
        return lines.removed(log_v, epsilon, slack) * np.exp(np.minimum(log_weight + slack, 700.0))

    def crossings(
        self, lines: Lines, epsilon: float, generator: np.random.Generator, rows: int
    ) -> tuple[FloatArray, FloatArray]:
        """Posteriors of the position where L = e^epsilon, and the density of log L there: that of z over its slope."""
        log_v, log_weight = self._draw(lines, generator, rows)
        z, _ = lines.crossing(log_v, epsilon)
        logs = log_v + lines.slopes * z[:, None] - lines.slopes**2 / 2
        posterior = np.exp(logs - epsilon) / lines.loss.cycle
        return posterior, np.exp(log_weight - z**2 / 2) / (posterior @ lines.slopes)

    def _draw(self, lines: Lines, generator: np.random.Generator, rows: int) -> tuple[FloatArray, FloatArray]:
        """log v_j, and log(Z_1 ... Z_c / Y^c)."""
        K, b, draws = lines.loss.K, lines.loss.cycle, generator.random((self.length, rows))
        log_v, log_scale = np.zeros((rows, b)), np.zeros(rows)
        running = np.empty_like(log_v)
        for draw in draws:
            top = log_v.max(axis=1)
            np.subtract(log_v, top[:, None], out=running)
            np.cumsum(np.exp(running, out=running), axis=1, out=running)
            total = running[:, -1]
            log_scale += np.log(total / b) + top
            drawn = (running >= (draw * total)[:, None]).argmax(axis=1)
            log_v += K[drawn]
            log_v -= lines.slopes[drawn, None] * lines.slopes
        log_v += lines.across(generator, rows)
        log_v -= lines.spread / 2
        return log_v, log_scale - self.length * log_mean_exp(log_v)[0]


def log_scales(lines: Lines, length: int, rows: slice = slice(None)) -> FloatArray:
    """log of the bounds of Z_1, Z_1 Z_2, ...; by some rows of R alone, a guess of them."""
    R = lines.loss.K[rows] - np.outer(lines.slopes[rows], lines.slopes)
    return np.cumsum([float(log_mean_exp(t * R)[0].max()) for t in range(length)])


def best_tilt(lines: Lines, epsilon: float) -> Tilt:
    """The one of the least bound, as the row of R with the largest entry tells."""
    row = int(np.argmax(lines.spread))
    lengths = np.unique(np.rint(np.geomspace(1, MAX_LENGTH, 40)).astype(int))
    scales = log_scales(lines, MAX_LENGTH, slice(row, row + 1))
    return Tilt(min(map(int, lengths), key=lambda length: log_peak(lines, epsilon, length) + scales[length - 1]))


def log_peak(lines: Lines, epsilon: float, length: int) -> float:
    """log of max B(Y) / Y^c: on a grid, B taken at the upper end of an interval, Y^c at the lower."""
    low, high = float(lines.slopes.min()), float(lines.slopes.max())
    least = -float(lines.spread.mean()) / 2 - 1e-6
    farthest = epsilon + _FARTHEST
    grid = np.linspace(least, farthest, 2 + int((farthest - least) / _FINE * length))
    with np.errstate(divide="ignore"):
        log_B = np.log(_dominated(grid[1:], epsilon, low, high))
    beyond = math.log(1 + (high - low) / math.sqrt(2 * math.pi))  # E e^m(z): B(Y) <= Y times that
    return max(float((log_B - length * grid[:-1]).max()), beyond - (length - 1) * farthest)


def _dominated(log_Y: FloatArray, epsilon: float, low: float, high: float) -> FloatArray:
    """B(Y): m(z) is low z - low^2 / 2, then z^2 / 2 from z = low on, and high z - high^2 / 2 from z = high on."""
    needed = epsilon - log_Y  # m at the crossing
    z = np.where(needed <= low**2 / 2, (needed + low**2 / 2) / low, (needed + high**2 / 2) / high)
    between = (needed > low**2 / 2) & (needed < high**2 / 2)
    z = np.where(between, np.sqrt(2 * np.maximum(needed, 0.0)), z)
    # E e^m over z > the crossing, part by part.
    mass = special.ndtr(high - np.maximum(z, high)) + special.ndtr(low - np.minimum(z, low)) - 0.5
    mass += (high - np.clip(z, low, high)) / math.sqrt(2 * math.pi)
    first, second = np.exp(log_Y) * mass, math.exp(epsilon) * special.ndtr(-z)
    return np.maximum(first - second, 0.0) + 1e-14 * (first + second)
