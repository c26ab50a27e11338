"""Closed forms: which strategies have errors that need no recursion over all steps, on which workloads.

    banded Toeplitz, square roots    the response of a Toeplitz workload                 (toeplitz.py)
      on running sums, n large       sums over all of the response                       (toeplitz_settled.py)
    BLT                              sums over a time-invariant A C^-1                    (bandmf.streaming)
    banded inverse                   w = r * lambda, as long as r
    tree aggregation, online         the binary digits of the length of a running sum
    stamping                         the errors of one epoch, again and again
    step scales                      blocks of the covariance recursion, all at once     (scaled.py)

`closed_form` is the one place that decides; everything else asks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bandmf._types import FloatArray
from bandmf.error.band_covariance import WORST_CONDITION
from bandmf.error.scaled import scaled_error
from bandmf.error.toeplitz import ToeplitzError
from bandmf.error.toeplitz_response import MOST_PEAK, Response, correlate, inverse_peak
from bandmf.error.toeplitz_settled import SMALLEST, SettledError, inverse_energy
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, OnlineTree, Scaled, Stamped, Strategy
from bandmf.streaming import (
    Matrices,
    compose,
    fftconvolve,
    impulse_response,
    mean_running_norm,
    squared_norm,
    state_space,
)
from bandmf.workloads import Workload, prefix

_SETTLED_BANDS = 4096  # beyond, matrices of bands x bands cost more than following the response
_MOST_GROWTH = 1e8  # of the response, over its first term
_LARGEST_STATE = 64  # a Toeplitz workload with more coefficients than this is better treated by its response


class ClosedForm(Protocol):
    """Squared errors of a strategy on a workload, each figure at its own price."""

    def per_step(self) -> FloatArray: ...
    def mean(self) -> float: ...
    def maximum(self) -> float: ...
    def last(self) -> float: ...


def closed_form(strategy: Strategy, workload: Workload) -> ClosedForm | None:
    """The errors of this strategy on this workload without a recursion over all steps, where there are any."""
    if workload.is_prefix and isinstance(strategy, OnlineTree):
        return TreeError(strategy.variances, strategy.steps)
    if workload.is_prefix and isinstance(strategy, Stamped):
        epoch = closed_form(strategy.epoch, prefix(strategy.epoch.steps))
        return None if epoch is None else StampedError(epoch, strategy.epochs)
    if isinstance(strategy, Scaled):
        return scaled_error(strategy, workload)
    if workload.coefficients is None:
        return None
    if isinstance(strategy, BandedInverse):
        return BandedInverseError(strategy.inverse_coefficients, workload)
    if isinstance(strategy, BufferedToeplitz) and (A := _time_invariant(workload)) is not None:
        both = compose(state_space(lambda i: A, len(A.input)), strategy.inverse()).matrices
        assert both is not None
        return TimeInvariantError(both(0), strategy.steps)
    if isinstance(strategy, BandedToeplitz) and strategy.normalize_columns:
        if workload.inverse_columns is None:
            return None
        return _if_conditioned(toeplitz_error(strategy.coefficients, workload, normalize=True), strategy)
    theta = strategy.toeplitz()
    if theta is None:
        return None
    return _if_conditioned(toeplitz_error(theta, workload, normalize=False), strategy)


def _if_conditioned(error: ToeplitzError | SettledError, strategy: Strategy) -> ClosedForm | None:
    """The closed form, unless its last steps lose digits: the state is then more accurate.

    Where the inverse itself has huge entries that cancel, no path has any digits to give.
    """
    theta = strategy.columns(0, 1)[0] if strategy.bands <= _SETTLED_BANDS else np.ones(1)
    stable = math.isfinite(inverse_energy(theta))
    if error.growth > _MOST_GROWTH or (stable and inverse_peak(theta, strategy.steps) > MOST_PEAK):
        raise ValueError(
            "strategy: its inverse is not stable, or has entries so large that its error is lost to rounding; use "
            "coefficients that fall from the diagonal on, or fewer steps"
        )
    cheap_elsewhere = strategy.bands <= _LARGEST_STATE
    return error if error.condition <= WORST_CONDITION * (1 if cheap_elsewhere else 3) else None


def toeplitz_error(theta: FloatArray, workload: Workload, normalize: bool) -> ToeplitzError | SettledError:
    """The errors of a banded Toeplitz strategy: at very many steps those of a response that has settled."""
    if workload.is_prefix and workload.steps >= SMALLEST and len(theta) <= _SETTLED_BANDS:
        settled = SettledError(theta, workload, normalize)
        if settled.applies:
            return settled
    return ToeplitzError(theta, workload, normalize)


def _time_invariant(workload: Workload) -> Matrices | None:
    """(F, G, H, D) of a Toeplitz workload with a small state; None for others."""
    operator = workload.operator
    if operator.matrices is None or operator.buffers > _LARGEST_STATE:
        return None
    return operator.matrices(workload.steps - 1)  # a first row may be cut off; the last one never is


@dataclass(frozen=True)
class TimeInvariantError:
    """A C^-1 is time-invariant with impulse response h: step i has error sum_{j <= i} h_j^2."""

    matrices: Matrices
    steps: int

    def per_step(self) -> FloatArray:
        return np.cumsum(impulse_response(self.matrices, self.steps) ** 2)

    def mean(self) -> float:
        return mean_running_norm(self.matrices, self.steps)

    def maximum(self) -> float:
        return squared_norm(self.matrices, self.steps)

    last = maximum  # errors only grow


class BandedInverseError:
    """A C^-1 is Toeplitz with w = r * lambda, which settles as soon as lambda has."""

    def __init__(self, r: FloatArray, workload: Workload) -> None:
        assert workload.coefficients is not None
        n, limit = workload.steps, workload.limit
        terms = n if limit is None else min(n, 256 + len(r) + workload.operator.buffers)
        while True:
            coefficients = workload.coefficients(terms)
            if limit is None or terms == n or np.abs(coefficients[-len(r) :] - limit).max() <= 1e-15:
                break
            terms = min(n, 4 * terms)
        convolve = fftconvolve if len(r) > 256 else np.convolve
        self._bands, self._lambdas, self._limit = len(r), coefficients, limit or 0.0
        self.response = Response(convolve(coefficients, r)[:terms], (limit or 0.0) * float(np.sum(r)), n)

    def per_step(self) -> FloatArray:
        return np.cumsum(self.response.window(0, self.response.steps) ** 2)

    def mean(self) -> float:
        return self.response.total(*self._weights(largest=False))

    def maximum(self) -> float:
        return self.response.total(*self._weights(largest=True))

    last = maximum  # errors only grow

    def gradient(self, largest: bool) -> FloatArray:
        """d mean / dr, or d maximum / dr."""
        weights, beyond = self._weights(largest)
        slope = np.pad(2 * weights * self.response.head, (0, self._bands - 1))
        return correlate(slope, self._lambdas) + 2 * beyond * self.response.limit * self._limit

    def _weights(self, largest: bool) -> tuple[FloatArray, float]:
        """Of w_i^2 in the head, and their sum beyond it."""
        n, m = self.response.steps, len(self.response.head)
        if largest:
            return np.ones(m), n - m
        return (n - np.arange(m)) / n, (n - m) * (n - m + 1) / 2 / n


@dataclass(frozen=True)
class TreeError:
    """Running sums of lengths 1 ... steps: independent estimates, one for each binary digit of the length."""

    variances: FloatArray
    steps: int

    def per_step(self) -> FloatArray:
        lengths = np.arange(1, self.steps + 1)
        return sum((v * (lengths >> h & 1) for h, v in enumerate(self.variances)), np.zeros(self.steps))

    def mean(self) -> float:
        return sum(v * self._lengths_with(h) for h, v in enumerate(self.variances)) / self.steps

    def _lengths_with(self, h: int) -> int:
        """How many of the lengths 0 ... steps have the digit h: half of every full turn of 2^(h+1)."""
        turns, rest = divmod(self.steps + 1, 2 << h)
        return (turns << h) + max(0, rest - (1 << h))

    def maximum(self) -> float:
        """At the last step, or at a length that has one digit less there and all digits below."""
        heights = [h for h in range(len(self.variances)) if self.steps >> h & 1]
        lengths = [self.steps] + [(self.steps >> h << h) - 1 for h in heights]
        return max(self._of(length) for length in lengths)

    def last(self) -> float:
        return self._of(self.steps)

    def _of(self, length: int) -> float:
        return sum(float(v) for h, v in enumerate(self.variances) if length >> h & 1)


@dataclass(frozen=True)
class StampedError:
    """Running sums: every epoch that is over adds its last error to all that follow."""

    epoch: ClosedForm
    epochs: int

    def per_step(self) -> FloatArray:
        errors = self.epoch.per_step()
        return np.add.outer(np.arange(self.epochs) * errors[-1], errors).ravel()

    def mean(self) -> float:
        return float(np.mean(self.per_step()))

    def maximum(self) -> float:
        return float(np.max(self.per_step()))

    def last(self) -> float:
        return self.epochs * self.epoch.last()
