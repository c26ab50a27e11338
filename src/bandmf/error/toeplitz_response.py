"""The response w = C(theta)^-1 lambda of a banded Toeplitz strategy on a Toeplitz workload, at any n.

A C^-1 is Toeplitz with first column w, so step i has squared error sum_{j <= i} w_j^2 (the paper's
Propositions 3.1 and D.1). When the workload settles (prefix: lambda = 1), w tends geometrically to
x = lambda_infinity / sum(theta). Beyond some m every term equals x to double precision and sums over it
have closed forms: errors are exact for n = 10^12 at the cost of m terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from bandmf._types import FloatArray
from bandmf.streaming import fftconvolve, lfilter, oaconvolve
from bandmf.workloads import Workload

# w has settled when a full window of b terms is this close to x. The rest
# then adds less than 1e-10 relatively, since more terms follow than it took to settle.
_SETTLED = 1e-10
_MOST_TERMS = 2**27
MOST_PEAK = 100.0  # of the inverse of theta; beyond, sums over its response cancel
_PIECE = 8192  # below the length from which BLAS starts threads for a dot product
_FFT_PAYS = 256  # bands from which power-series division by FFT beats the direct recursion


@dataclass(frozen=True)
class Response:
    """w_0 .. w_{m-1} in `head`; w_i = `limit` for m <= i < steps.

    `inverse` are the first terms of 1 / theta(x), where they were computed: the gradient needs them again.
    """

    head: FloatArray
    limit: float
    steps: int
    inverse: FloatArray | None = None

    @property
    def tail_steps(self) -> int:
        """How many terms the closed form stands for."""
        return self.steps - len(self.head)

    def total(self, weights: FloatArray, tail_weight: float) -> float:
        """sum_i weights_i w_i^2, where `tail_weight` is the sum of the weights beyond the head."""
        return float(np.sum(weights * self.head**2) + tail_weight * self.limit**2)

    def terms_to_settle(self, bands: int) -> int:
        """Terms after which the closed form is exact: at most len(head) when it is so already.

        A window of `bands` terms is the whole state of the recursion, and it approaches the limit
        geometrically; the rate is read off the last two windows half a head apart.
        """
        m = len(self.head)
        if self.tail_steps == 0:
            return m
        if not math.isfinite(self.limit):  # the coefficients add up to zero: it grows to the end
            return self.steps
        if m < 2 * bands:
            return 4 * m
        target = _SETTLED * max(abs(self.limit), float(np.abs(self.head).max()) * 1e-3)
        now = float(np.abs(self.head[-bands:] - self.limit).max())
        if now <= target:
            return m
        before = float(np.abs(self.head[m // 2 - bands : m // 2] - self.limit).max())
        if not now < before:
            return 4 * m
        more = m / 2 * np.log(target / now) / np.log(now / before)
        return m + max(m // 4, min(int(1.1 * more), 7 * m))

    def window(self, start: int, stop: int) -> FloatArray:
        """w_start .. w_{stop-1}."""
        known = self.head[start:stop]
        return np.concatenate([known, np.full(stop - start - len(known), self.limit)])


def response(theta: FloatArray, workload: Workload, terms: int) -> Response:
    """The response with exactly `terms` terms computed and the rest taken as the limit."""
    assert workload.coefficients is not None
    terms = min(terms, workload.steps)
    with np.errstate(over="ignore", invalid="ignore"):  # unstable coefficients: the caller sees inf
        inverse = inverse_series(theta, terms) if _fft_pays(theta, terms) else None
        head = divide_series(workload.coefficients(terms), theta, inverse)
        limit = (workload.limit or 0.0) / theta.sum() if terms < workload.steps else 0.0
    return Response(head, float(limit), workload.steps, inverse)


def settled_response(theta: FloatArray, workload: Workload, terms: int | None = None) -> Response:
    """The response with as many terms as it takes to settle."""
    terms = terms or first_terms(len(theta), workload)
    while True:
        result = response(theta, workload, terms)
        needed = result.terms_to_settle(len(theta))
        if needed <= terms:
            return result
        if needed > _MOST_TERMS:
            raise ValueError(
                f"steps={workload.steps}: the response of these coefficients has not settled after {terms} "
                "terms (they are at the edge of stability), so its error at so many steps is out of reach"
            )
        terms = needed


def first_terms(bands: int, workload: Workload) -> int:
    """How many terms to begin with."""
    if workload.limit is None:
        return workload.steps
    memory = workload.operator.buffers + 1  # a Toeplitz workload may come back after a long gap
    terms = max(32 * bands, 256, memory + bands)
    return workload.steps if 2 * terms > workload.steps else terms


def divide_series(numerator: FloatArray, theta: FloatArray, inverse: FloatArray | None = None) -> FloatArray:
    """The power series numerator(x) / theta(x), cut to the same length: solves C(theta) w = numerator.

    `inverse` is 1 / theta(x) to as many terms, where it is known; otherwise the direct recursion is used.
    """
    if inverse is None:
        return lfilter([1.0], theta, numerator)
    if np.all(numerator == numerator[0]):  # the prefix workload
        return numerator[0] * np.cumsum(inverse)
    return fftconvolve(inverse, numerator)[: len(numerator)]


def _fft_pays(theta: FloatArray, terms: int) -> bool:
    return len(theta) >= _FFT_PAYS and terms >= 4 * _FFT_PAYS


def inverse_series(theta: FloatArray, count: int) -> FloatArray:
    """The first terms of 1 / theta(x): Newton's iteration doubles the number of right terms each time."""
    size, inverse = 1, np.array([1 / theta[0]])
    while size < count:
        size = min(2 * size, count)
        correction = -fftconvolve(oaconvolve(theta[:size], inverse)[:size], inverse)[:size]
        correction[: len(inverse)] += 2 * inverse
        inverse = correction
    return inverse


def inverse_peak(theta: FloatArray, steps: int) -> float:
    """The largest coefficient of 1 / theta(x), over its first: where it is large, sums over the response cancel."""
    impulse = np.eye(1, min(steps, 64 * len(theta) + 256))[0]
    with np.errstate(over="ignore", invalid="ignore"):
        series = np.abs(lfilter([1.0], theta, impulse))
    return float(np.nan_to_num(series, nan=np.inf).max() / series[0])


def chain_to_theta(result: Response, theta: FloatArray, head_gradient: FloatArray, limit_gradient: float) -> FloatArray:
    """dE/dtheta from dE/dw and dE/dx, by one adjoint filter and b dot products: O(m) memory.

    u solves C(theta)' u = dE/dw, and dE/dtheta_j = -sum_i u_{i+j} w_i.
    """
    adjoint = divide_series(head_gradient[::-1], theta, result.inverse)[::-1]
    correlation = correlate(np.pad(adjoint, (0, len(theta) - 1)), result.head)
    return -correlation - limit_gradient * result.limit / theta.sum()


def correlate(later: FloatArray, earlier: FloatArray) -> FloatArray:
    """sum_i later_{i+j} earlier_i for every j that fits; in pieces that stay in the cache."""
    extra = len(later) - len(earlier)
    if extra >= _FFT_PAYS:
        return _correlate_by_fft(later, earlier, extra)
    pieces = range(0, len(earlier), _PIECE)
    return np.sum(
        [np.correlate(later[i : i + _PIECE + extra], earlier[i : i + _PIECE], "valid") for i in pieces], axis=0
    )


def _correlate_by_fft(later: FloatArray, earlier: FloatArray, extra: int) -> FloatArray:
    """The same in O(m log b): pieces a few times as long as the lags, added up in the frequency domain."""
    size = next_fast_len(max(_PIECE, 4 * extra), real=True)
    piece, total = size - extra, np.zeros(size // 2 + 1, complex)
    for i in range(0, len(earlier), piece):
        total += rfft(later[i : i + size], size) * rfft(earlier[i : i + piece], size).conj()
    return irfft(total, size)[: extra + 1]
