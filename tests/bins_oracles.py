"""Slow, obviously right versions of balls-in-bins accounting: one and two positions by quadrature, and all chains."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
from scipy import integrate, stats

from bandmf.strategies import BandedInverse, banded_inverse_square_root

REFERENCE = json.loads((Path(__file__).parent / "reference" / "bins.json").read_text())
TWO = np.array(REFERENCE["two_positions"]["K"])


def reference_strategy(row):
    """The strategy of a row of the reference table."""
    if row["strategy"] == "bisr":
        return banded_inverse_square_root(REFERENCE["steps"], 16)
    return BandedInverse(row["inverse_coefficients"], REFERENCE["steps"])


def gram_by_columns(strategy, cycle):
    """G as it is defined: columns of |C| added up, then all inner products."""
    C = np.abs(strategy.materialize())
    m = np.array([C[:, j::cycle].sum(axis=1) for j in range(cycle)])
    return m @ m.T


def gaussian_delta(K, epsilon):
    """One position: the Gaussian mechanism with sensitivity^2 / sigma^2 = K; the same in both directions."""
    s = math.sqrt(K)
    first, second = stats.norm.cdf(s / 2 - epsilon / s), stats.norm.cdf(-s / 2 - epsilon / s)
    return first - math.exp(epsilon) * second


def gaussian_sigma(epsilon, delta):
    """The deviation at which one position with G = 1 has delta, by bisection."""
    low, high = 1e-2, 1e4
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_delta(middle**-2, epsilon) > delta else (low, middle)
    return high


def call(strike, mean, deviation):
    """E (e^X - strike)+ for X ~ N(mean, deviation^2)."""
    forward = math.exp(mean + deviation**2 / 2)
    if strike <= 0:
        return forward - strike
    d = (mean - math.log(strike)) / deviation
    return forward * stats.norm.cdf(d + deviation) - strike * stats.norm.cdf(d)


def two_position_deltas(K, epsilon):
    """(remove, add) for two positions: the first by quadrature, the second, given it, in closed form."""
    E, slope = math.exp(epsilon), K[0, 1] / K[0, 0]
    rest = math.sqrt(K[1, 1] - slope * K[0, 1])

    def given(y, direction):
        u = math.sqrt(K[0, 0]) * y
        first = math.exp(u - K[0, 0] / 2) / 2
        mean = slope * u - K[1, 1] / 2 - math.log(2)  # of log(v_2 / 2)
        if direction == "remove":
            value = call(E - first, mean, rest)
        else:  # (k - w)+ = (w - k)+ - (w - k)
            strike = 1 / E - first
            value = E * (call(strike, mean, rest) - math.exp(mean + rest**2 / 2) + strike) if strike > 0 else 0.0
        return value * stats.norm.pdf(y)

    options = {"limit": 500, "epsabs": 1e-12, "epsrel": 1e-10}
    kink = (math.log(2 * E) + K[0, 0] / 2, -epsilon + math.log(2) + K[0, 0] / 2)
    points = sorted(value / math.sqrt(K[0, 0]) for value in kink)
    return tuple(
        integrate.quad(given, -12, 14, args=(direction,), points=points, **options)[0]
        for direction in ("remove", "add")
    )


def three_position_delta(K, epsilon):
    """The remove divergence of three positions: two by quadrature, the third, given them, in closed form."""
    F = np.linalg.cholesky(K)
    x = np.linspace(-9, 9, 1201)
    masses = stats.norm.pdf(x) * (x[1] - x[0])
    total = 0.0
    for first, mass in zip(x, masses, strict=True):
        u0 = F[0, 0] * first
        u1 = F[1, 0] * first + F[1, 1] * x
        known = (math.exp(u0 - K[0, 0] / 2) + np.exp(u1 - K[1, 1] / 2)) / 3
        means = F[2, 0] * first + F[2, 1] * x - K[2, 2] / 2 - math.log(3)
        strike = np.maximum(math.exp(epsilon) - known, 1e-300)
        d = (means - np.log(strike)) / F[2, 2]
        forward = np.exp(means + F[2, 2] ** 2 / 2)
        above = known >= math.exp(epsilon)
        given = np.where(
            above,
            known + forward - math.exp(epsilon),
            forward * stats.norm.cdf(d + F[2, 2]) - strike * stats.norm.cdf(d),
        )
        total += mass * float(given @ masses)
    return total


def independent_delta(variance, b, epsilon):
    """The remove divergence of b independent positions, K = variance I: the law of sum_j v_j by b-fold convolution."""
    step, size = 0.01, 2**16
    places = np.arange(size) * step
    root = math.sqrt(variance)
    edges = np.log(np.maximum(places + step / 2, 1e-300)) / root + root / 2
    masses = np.diff(stats.norm.cdf(edges), prepend=0.0)
    total = np.fft.irfft(np.fft.rfft(masses) ** b, size)
    return float(np.maximum(places / b - math.exp(epsilon), 0.0) @ total)


def moment(K, power, length):
    """E_Q [L^length mean_j v_j^power], all choices of positions one by one."""
    b, total = len(K), 0.0
    for i, *others in itertools.product(range(b), repeat=length + 1):
        exponent = (power**2 - power) / 2 * K[i, i] + power * sum(K[i, j] for j in others)
        exponent += sum(K[j, k] for j, k in itertools.combinations(others, 2))
        total += math.exp(exponent)
    return total / b ** (length + 1)
