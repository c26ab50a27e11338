"""The best BLT (buffered linear Toeplitz strategy) for running sums, at a cost that does not grow with n.

Written by the poles of C and of C^-1 (McMahan et al. 2024),

    C(x) = prod_k (1 - mu_k x) / (1 - lambda_k x),      1 > lambda_1 > mu_1 > lambda_2 > mu_2 > ... > 0,

all partial fractions have positive weights, so every sum below is one of positive terms:

    c_t = sum_k omega_k lambda_k^(t-1),                 omega_j = prod_k (lambda_j - mu_k) / prod_{k != j} ...
    w_i = W_0 + sum_k W_k mu_k^i                        the coefficients of A C^-1

and sums of c_t^2, w_i^2 or (n - i) w_i^2 are geometric. The coefficients c_t never increase, so that the
sensitivity under a minimum separation is exactly that of evenly spaced participations. The unknowns are the
logarithms of the 2 d gaps between the sorted values of log(1 - lambda), log(1 - mu); the gradient is taken by
the complex step, which is exact to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import max_error, rmse
from bandmf.optimize.descent import Descent, Watcher, descend
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import Participation, checked_participation
from bandmf.strategies import BufferedToeplitz
from bandmf.workloads import Workload, workload_for

Numbers = npt.NDArray[np.complex128] | FloatArray
MOST_BUFFERS = 10
COMPLEX_STEP = 1e-40
_ROUGH = 1e-11
_WORTH_A_BUFFER = 1e-7  # of the logarithm of the squared error
_NARROWEST = 1e-6  # a pole and a zero this close cancel; closer, differences lose their digits


def buffered_toeplitz(
    steps: int,
    buffers: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str = "mean",
    watch: Watcher | None = None,
) -> Solution:
    """The BLT of least error on running sums; `rmse` includes the sensitivity under `participation`.

    `objective` is "mean" or "max". Any number of steps costs the same: 10^8 is as quick as 10^3.

    >>> solution = buffered_toeplitz(100_000, 2, objective="max")
    >>> solution.strategy.scales.round(4), solution.strategy.decays.round(4)
    (array([0.0123, 0.1878]), array([1.    , 0.9857]))
    """
    clock = Clock()
    steps = _check.whole("steps", steps)
    buffers = _check.whole("buffers", buffers, 1, MOST_BUFFERS)
    goal = _check.choice("objective", objective, ("mean", "max"))
    if not workload_for(steps, workload).is_prefix:
        raise ValueError(
            "workload: a BLT is optimized for prefix sums only; leave it out, or use optimize.banded_inverse"
        )
    count, separation = checked_participation(participation).spacing(steps)
    loss = _Loss(steps, separation, count, goal == "max")
    descent = _best_descent(loss, buffers, watch)
    lam, _, omega, _ = partial_fractions(to_logs(descent.x))
    strategy = BufferedToeplitz(np.real(omega), 1 - np.real(lam), steps)
    largest = max_error(strategy, participation=participation) if goal == "max" else None
    mean = rmse(strategy, participation=participation)
    return Solution.of(strategy, mean, descent, clock, objective=largest)


def _best_descent(loss: _Loss, buffers: int, watch: Watcher | None) -> Descent:
    """The better of two: poles spread evenly at once, and grown from one buffer up, pair by pair.

    Growing ends where a further buffer gains nothing: under many participations, three or four are enough.
    """
    grown = descend(loss, _spread(loss.steps, 1), tolerance=_ROUGH)
    for _ in range(1, buffers):
        larger = descend(loss, _with_one_more(grown.x, loss), tolerance=_ROUGH)
        if larger.loss > grown.loss - _WORTH_A_BUFFER:
            break
        grown = larger
    spreads = [
        descend(loss, _spread(loss.steps, buffers, largest), tolerance=_ROUGH, max_iterations=200)
        for largest in (0.8, 0.3, 0.99)
    ]
    spread = min(spreads, key=lambda found: found.loss)
    best = spread if spread.loss < grown.loss - _WORTH_A_BUFFER else grown
    best = descend(loss, best.x, memory=2 * best.x.size, watch=watch)
    if (used := best.x.size // 2) < buffers:
        best.detail = f"{used} buffers are enough: a further one gains nothing"
    return best


def _spread(steps: int, buffers: int, largest: float = 0.8) -> FloatArray:
    """1 - pole spread evenly, in its logarithm, from 1/2n to `largest`."""
    return from_logs(np.linspace(math.log(0.5 / (steps + 1)), math.log(largest), 2 * buffers))


def _with_one_more(x: FloatArray, loss: _Loss) -> FloatArray:
    """The lowest of many starts, each with a narrow pair of poles at another place."""
    low, logs = math.log(0.1 / loss.steps), to_logs(x)
    starts = [
        from_logs(np.sort(np.append(logs, [center - width, center + width])))
        for width in (0.3, 0.03, 0.003)
        for center in np.linspace(low, -2 * width, 100)
    ]
    values = np.real(loss.value(np.array(starts)))
    return starts[int(np.argmin(np.where(np.isfinite(values), values, math.inf)))]


def from_logs(logs: FloatArray) -> FloatArray:
    """The unknowns at given, sorted log(1 - pole)."""
    gaps = np.append(np.diff(logs), -logs[-1])
    return np.log(np.maximum(gaps - _NARROWEST, _NARROWEST))


def to_logs(x: Numbers) -> Numbers:
    """log(1 - pole) of all poles, lambda_1, mu_1, lambda_2, ...: sorted, and never quite the same."""
    gaps = _NARROWEST + np.exp(x)
    return -np.cumsum(gaps[..., ::-1], axis=-1)[..., ::-1]


def partial_fractions(logs: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """1 - lambda, 1 - mu (preceded by 0, the workload's pole), and the weights omega and W."""
    complements = np.exp(logs)
    a, b = complements[..., ::2], complements[..., 1::2]
    omega = residues(a, b)
    # All factors of W_0 = prod(a) / prod(b) and W_j together: the poles of A C^-1 are 1 and mu.
    poles = np.concatenate([np.zeros_like(b[..., :1]), b], axis=-1)
    return a, poles, omega, residues(poles, a)


def residues(poles: Numbers, zeros: Numbers) -> Numbers:
    """prod_k (zero_k - pole_j) / prod_{k != j} (pole_k - pole_j), in complements."""
    above = zeros[..., None, :] - poles[..., :, None]
    below = poles[..., None, :] - poles[..., :, None]
    own = np.eye(below.shape[-1], dtype=bool)
    return np.prod(above, axis=-1) / np.prod(np.where(own, 1.0, below), axis=-1)


@dataclass(frozen=True)
class _Loss:
    """log of squared sensitivity times squared error, and its gradient."""

    steps: int
    separation: int
    count: int
    largest: bool

    def __call__(self, x: FloatArray) -> tuple[float, FloatArray]:
        perturbed = x + 1j * COMPLEX_STEP * np.eye(len(x))
        values = self.value(perturbed)
        return float(values[0].real), values.imag / COMPLEX_STEP

    def value(self, x: Numbers) -> Numbers:
        a, poles, omega, weights = partial_fractions(to_logs(x))
        error = squared_error(weights, log1m(poles), self.steps, self.largest)
        return np.log(self._squared_sensitivity(omega, log1m(a))) + np.log(error)

    def _squared_sensitivity(self, omega: Numbers, logs: Numbers) -> Numbers:
        """|column 0 + column s + ...|^2. Between two participations only the buffers' decay is seen."""
        s, last = self.separation, self.steps - (self.count - 1) * self.separation
        pairs = logs[..., :, None] + logs[..., None, :]
        between, after = geometric(pairs, s - 1), geometric(pairs, last - 1)
        total: Numbers = np.zeros(omega.shape[:-1])
        full: Numbers = np.zeros_like(omega)  # buffers just after a participation
        for m in range(self.count):
            before = full * np.exp((s - 1) * logs)
            full = before * np.exp(logs) + 1
            part = omega * full
            sums = after if m == self.count - 1 else between
            total = total + (1 + np.sum(omega * before, axis=-1)) ** 2
            total = total + np.sum(part[..., :, None] * part[..., None, :] * sums, axis=(-1, -2))
        return total


def squared_error(W: Numbers, logs: Numbers, steps: int, largest: bool) -> Numbers:
    """The mean, or largest, squared error over all steps: sums of w_i = sum_k W_k exp(i logs_k), squared."""
    pairs = logs[..., :, None] + logs[..., None, :]
    sums = geometric(pairs, steps) if largest else weighted_geometric(pairs, steps)
    return np.sum(W[..., :, None] * W[..., None, :] * sums, axis=(-1, -2))


def log1m(complement: Numbers) -> Numbers:
    """log(1 - complement); NumPy's complex log1p is not accurate near zero."""
    real = np.log1p(-np.real(complement))
    return real - 1j * np.imag(complement) / (1 - np.real(complement))


def geometric(log_ratio: Numbers, count: int) -> Numbers:
    """sum_{i < count} exp(i log_ratio)."""
    safe = np.where(np.real(log_ratio) == 0, -1.0, log_ratio)
    small = count * (1 + (count - 1) / 2 * log_ratio)
    return np.where(np.real(log_ratio) * count > -1e-9, small, np.expm1(count * safe) / np.expm1(safe))


def weighted_geometric(log_ratio: Numbers, count: int) -> Numbers:
    """sum_{i < count} (1 - i / count) exp(i log_ratio)."""
    n = float(count)
    safe = np.where(np.real(log_ratio) == 0, -1.0, log_ratio)
    exact = (n - np.exp(safe) * geometric(safe, count)) / (-np.expm1(safe)) / n
    series = (n + 1) / 2 + log_ratio * (n * n - 1) / 6 + log_ratio**2 * n * (n * n - 1) / 24
    return np.where(np.real(log_ratio) * n > -1e-4, series, exact)
