"""The largest value of h / L^q, where h is what a given L contributes to the remove divergence.

Without a shared part, h = (L - e^epsilon)+, and the maximum is at L = e^epsilon q / (q - 1). With one, of variance c,
h is the price of a call, E_g (e^(g - c/2) L - e^epsilon)+. As a function of y = log L its logarithm is concave (so is
log (e^y - e^epsilon)+, and means over a normal g keep it so: Prekopa). So log h - q y has one maximum, and lies
below each of its tangents.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from bandmf._types import FloatArray, IntArray
from bandmf.accounting.bins.loss import log_removed

_HALVINGS = 60


def evaluation(shared: float) -> float:
    """How far a computed `log_removed` may be off, relatively to its argument: a difference of two like numbers.

    For |d| <= 40 both have logarithms up to 1000, of which 2^-50 is lost, and differ by sqrt(c) / 50 or more. Beyond,
    nothing is left of h.
    """
    return 1e-12 if shared == 0 else 1e-12 + 1e-10 / math.sqrt(shared)


def log_peak(powers: FloatArray | IntArray, epsilon: float, shared: float) -> FloatArray:
    """No less than max over y of log h(e^y) - q y, for each q > 1."""
    q = np.asarray(powers, np.float64)
    if shared == 0:
        return (q - 1) * np.log(q - 1) - q * np.log(q) - (q - 1) * epsilon + 1e-12
    high = epsilon + np.log(q / (q - 1))  # h >= (L - e^epsilon)+, so that the slope is below q from here on
    low = high - q * shared - 1
    while (unsure := _slope(low, epsilon, shared) <= q).any():
        low = np.where(unsure, 2 * low - high - 1, low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rising = _slope(middle, epsilon, shared) > q
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    tangent = (_slope(low, epsilon, shared) - q) * (high - low)
    return log_removed(low, epsilon, shared) - q * low + np.maximum(tangent, 0.0) + 1e-9 + 2 * evaluation(shared)


def _slope(y: FloatArray, epsilon: float, shared: float) -> FloatArray:
    """d log h / dy = L Phi(d + sqrt c) / h."""
    root = math.sqrt(shared)
    d = (y - epsilon) / root - root / 2
    with np.errstate(over="ignore"):
        return np.exp(y + special.log_ndtr(d + root) - log_removed(y, epsilon, shared))
