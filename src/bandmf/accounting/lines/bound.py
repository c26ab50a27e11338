"""An upper confidence bound on the mean of bounded samples, from the product of 1 - rate w.

Let w_1, ..., w_n in [0, B] be independent with mean mu, and 0 < rate < 1 / B fixed before they are drawn. Then
E prod (1 - rate w_i) = (1 - rate mu)^n, and by Markov's inequality, but for a probability `failure`,

    prod (1 - rate w_i) <= (1 - rate mu)^n / failure,
    mu <= (1 - exp(-(mean of -log(1 - rate w_i) + log(1 / failure) / n))) / rate.

With a good rate that is about mean + sqrt(2 variance l / n) + B l / (3 n), l = log(1 / failure): the term of B, which
decides where samples are few, is a seventh of the one of the empirical Bernstein bound. Any rate is valid.
"""

from __future__ import annotations

import math

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting.samples import Draw, Sums, sample_sums

_RATES = np.geomspace(1e-3, 0.95, 60)  # times the bound
_ROUNDING = 1 + 1e-9


def log_sums(
    draw: Draw, bound: float, rate: float, count: int, width: int, seed: int, stream: int, workers: int | None = None
) -> Sums:
    """-log(1 - rate w) of `count` samples in [0, bound]."""

    def logs(generator: np.random.Generator, rows: int) -> FloatArray:
        samples = draw(generator, rows)
        if not samples.max() <= bound * (1 + 1e-3):  # nor NaN
            raise AssertionError(f"a weight of {samples.max()} is above its proved bound {bound}")
        return -np.log1p(-rate * np.minimum(samples, bound))

    return sample_sums(logs, count, width, seed, stream, workers)


def upper_bound(logs: Sums, bound: float, rate: float, failure: float) -> float:
    """Above the mean but for a probability `failure`."""
    return min(bound, _mean(logs.mean, logs.count, rate, math.log(1 / failure)) * _ROUNDING)


def best_rate(samples: FloatArray, bound: float, count: int, failure: float) -> tuple[float, float]:
    """The rate of the least upper bound of `count` samples like these, and that bound."""
    shares, log_term = np.minimum(samples / bound, 1.0), math.log(1 / failure)
    bounds = [_mean(float(-np.log1p(-rate * shares).mean()), count, rate / bound, log_term) for rate in _RATES]
    best = int(np.argmin(bounds))
    return float(_RATES[best]) / bound, bounds[best]


def _mean(log: float, count: int, rate: float, log_term: float) -> float:
    return -math.expm1(-(log + log_term / count)) / rate
