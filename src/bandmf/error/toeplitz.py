"""Errors of banded Toeplitz strategies with their gradient, column-normalized or not, at any n.

Without normalization everything follows from the response w (toeplitz_response.py). Normalizing changes only the
last b - 1 columns of C, hence only the last b - 1 steps: up to step n - b the errors are those of the plain
Toeplitz matrix, and from the covariance of the K outputs before that,

    P_0[a, c] = sum_{t <= beta + min(a, c)} w_t w_{t + |a - c|},    beta the first of those K steps,

one block of the covariance recursion (band_covariance.py) gives the rest. The cost does not grow with n.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import toeplitz as toeplitz_matrix

from bandmf import band_columns
from bandmf._types import FloatArray
from bandmf.error.band_covariance import BandCovariance
from bandmf.error.toeplitz_response import Response, chain_to_theta, correlate, response, settled_response
from bandmf.streaming import oaconvolve
from bandmf.workloads import Workload


class ToeplitzError:
    """Squared errors of C(theta) on a Toeplitz workload; `theta` is scaled to norm one when normalized.

    Steps 0 .. head_steps - 1 have error sum_{j <= i} w_j^2; `tail` holds the errors of the steps after.
    With `terms` only so many terms of the response are computed, as the paper's Appendix on n > 10^7 does;
    otherwise as many as make it exact.
    """

    def __init__(self, theta: FloatArray, workload: Workload, normalize: bool, terms: int | None = None) -> None:
        self.workload, self.normalize, self.scaled = workload, normalize and len(theta) > 1, normalize
        self.scale = float(np.linalg.norm(theta)) if normalize else 1.0
        self.theta = theta / self.scale
        if terms is None:
            self.response = settled_response(self.theta, workload)
        else:
            self.response = response(self.theta, workload, terms)
        self.head_steps, self.tail = workload.steps, np.zeros(0)
        self.start: OutputCovariance | None = None
        if self.normalize:
            self.head_steps -= len(theta) - 1
            self._add_normalized_tail()

    def _add_normalized_tail(self) -> None:
        assert self.workload.inverse_columns is not None
        n, bands = self.workload.steps, len(self.theta)
        inverse = self.workload.inverse_columns(n - 1, n)
        size = bands + inverse.shape[1] - 2  # K: sub-diagonals of M = C A^-1
        first = self.head_steps - size
        if first < 0:  # so many bands that there is no plain Toeplitz part to speak of
            self.head_steps, first = 0, 0
        else:
            self.start = OutputCovariance(self.response, first, size)
        self.inverse = self.workload.inverse_columns(first, n)
        self.columns = NormalizedColumns(self.theta, n - first)
        product = band_columns.product(self.columns.compact, self.inverse)
        self.block = BandCovariance(product, None if self.start is None else self.start.matrix)
        self.tail = self.block.errors

    @property
    def growth(self) -> float:
        """The largest term of the response, over its first."""
        head = np.abs(self.response.head)
        return float(head.max() / head[0]) if head[0] else math.inf

    @property
    def condition(self) -> float:
        """How much rounding is amplified at the end, where the columns are normalized."""
        return self.block.condition if self.normalize else 1.0

    def per_step(self) -> FloatArray:
        """The errors of all steps."""
        return np.concatenate([self.head_errors(), self.tail])

    def head_errors(self) -> FloatArray:
        """The errors of all steps before the tail: as many numbers as steps."""
        return np.cumsum(self.response.window(0, self.head_steps) ** 2)

    def last_of_head(self) -> float:
        """The largest error before the tail."""
        used = self.response.head[: self.head_steps]
        return float(np.sum(used**2)) + (self.head_steps - len(used)) * self.response.limit**2

    def last(self) -> float:
        """The squared error of the last step."""
        return float(self.tail[-1]) if len(self.tail) else self.last_of_head()

    def mean(self) -> float:
        """The mean squared error over all steps."""
        weights, beyond = mean_weights(self)
        return self.head_total(weights, beyond) + float(np.sum(self.tail)) / self.workload.steps

    def maximum(self) -> float:
        """The largest squared error of any step."""
        return max([self.last_of_head(), *self.tail])

    def head_total(self, weights: FloatArray, beyond: float) -> float:
        """sum_i weights_i w_i^2 over the head, `beyond` standing for all weights past the computed terms."""
        return Response(self.response.head[: len(weights)], self.response.limit, 0).total(weights, beyond)

    def gradient(self, weights: FloatArray, beyond: float, tail_weights: FloatArray) -> FloatArray:
        """d(head_total(weights, beyond) + tail_weights . tail) / dtheta."""
        head = np.zeros(len(self.response.head))
        head[: len(weights)] = 2 * weights * self.response.head[: len(weights)]
        limit = 2 * beyond * self.response.limit
        direct = np.zeros(len(self.theta))
        if self.normalize:
            d_product, d_start = self.block.gradient(tail_weights)
            d_columns = band_columns.product_adjoint(d_product, self.inverse, len(self.theta))
            direct = self.columns.gradient(d_columns)
            if self.start is not None:
                limit += self.start.add_gradient(d_start, head)
        gradient = direct + chain_to_theta(self.response, self.theta, head, limit)
        if not self.scaled:
            return gradient
        return (gradient - self.theta * (self.theta @ gradient)) / self.scale


def mean_weights(error: ToeplitzError) -> tuple[FloatArray, float]:
    """Weights of w_i^2 in the mean error over all n steps: (head_steps - i) / n, and their sum beyond m."""
    steps, n = error.head_steps, error.workload.steps
    m = min(len(error.response.head), steps)
    return (steps - np.arange(m)) / n, (steps - m) * (steps - m + 1) / 2 / n


class OutputCovariance:
    """P_0: the covariance of outputs first .. first + size - 1 of the Toeplitz matrix with response w."""

    def __init__(self, result: Response, first: int, size: int) -> None:
        self.result, self.size = result, size
        self.used = min(len(result.head), first + 1)
        self.beyond = first + 1 - self.used  # terms of every lag sum that have settled to limit^2
        self.later = result.window(0, self.used + size - 1)
        lag_sums = correlate(self.later, result.head[: self.used]) + self.beyond * result.limit**2
        # Each step further down a diagonal adds one product of later terms.
        self.first = first
        steps_after = result.window(first + 1, first + size)
        self.added = np.tril(toeplitz_matrix(np.concatenate([[0.0], steps_after])), -1)
        self.matrix = toeplitz_matrix(lag_sums) + self.added @ self.added.T

    def add_gradient(self, gradient: FloatArray, head: FloatArray) -> float:
        """Add d(gradient . P_0)/dw to `head` in place; return the part that falls on the limit."""
        earlier, size, limit = self.result.head[: self.used], self.size, self.result.limit
        lags = np.array([np.trace(gradient, c) * (2 if c else 1) for c in range(size)])
        on_limit = 2 * limit * self.beyond * float(np.sum(lags))
        later = oaconvolve(earlier, lags)  # d/d later, then d/d earlier
        later[: self.used] += oaconvolve(self.later, lags[::-1])[size - 1 : size - 1 + self.used]
        on_limit += _spill(head, 0, later)
        slopes = 2 * gradient @ self.added
        on_limit += _spill(head, self.first + 1, np.array([np.trace(slopes, -s) for s in range(1, size)]))
        return on_limit


def _spill(head: FloatArray, start: int, values: FloatArray) -> float:
    """Add values to head[start:]; return the sum of those that lie beyond it."""
    inside = max(0, min(len(head) - start, len(values)))
    head[start : start + inside] += values[:inside]
    return float(np.sum(values[inside:]))


class NormalizedColumns:
    """The last `count` columns of a Toeplitz matrix, each cut off by the end and scaled to norm one."""

    def __init__(self, theta: FloatArray, count: int) -> None:
        left = np.minimum(count - np.arange(count), len(theta))
        self.present = np.arange(len(theta)) < left[:, None]
        self.norms = np.sqrt(np.cumsum(theta**2))[left - 1, None]
        self.compact = np.where(self.present, theta, 0.0) / self.norms

    def gradient(self, gradient: FloatArray) -> FloatArray:
        """d/dtheta from the gradient with respect to the columns."""
        along = np.sum(gradient * self.compact, axis=1, keepdims=True)
        return np.sum((gradient * self.present - along * self.compact) / self.norms, axis=0)
