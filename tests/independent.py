"""An optimizer that shares nothing with the package: dense matrices, differences for derivatives, many starts.

It searches each family by a parameterization of its own and measures by formulas of its own, for small n.
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import minimize


def sensitivity(C, patterns):
    """The root of the largest sum |X_ij| over the patterns: exact where the signs can be satisfied together."""
    X = np.abs(C.T @ C)
    return np.sqrt(max(X[np.ix_(pattern, pattern)].sum() for pattern in patterns))


def errors(C, A):
    """Squared errors of all steps."""
    return np.sum(np.linalg.solve(C.T, A.T) ** 2, axis=0)


def aggregate(squares, objective):
    return {"mean": np.mean, "max": np.max, "last": lambda e: e[-1]}[objective](squares)


def toeplitz(theta, n):
    C = np.zeros((n, n))
    for lag, value in enumerate(theta[:n]):
        C += value * np.eye(n, k=-lag)
    return C


def normalized(C):
    return C / np.linalg.norm(C, axis=0)


def banded(x, n, bands):
    C, k = np.zeros((n, n)), 0
    for j in range(n):
        for i in range(j, min(n, j + bands)):
            C[i, j] = x[k] if i > j else np.exp(x[k])
            k += 1
    return normalized(C)


def blt(x, n):
    """Interlaced poles from their gaps, as a series."""
    logs = -np.cumsum(np.exp(x[::-1]))[::-1]
    poles = 1 - np.exp(logs)
    numerator, denominator = np.poly(poles[1::2]), np.poly(poles[::2])
    theta = np.zeros(n)
    padded = np.pad(numerator, (0, max(0, n - len(numerator))))
    for t in range(n):
        past = sum(denominator[s] * theta[t - s] for s in range(1, min(t, len(denominator) - 1) + 1))
        theta[t] = padded[t] - past
    return toeplitz(theta, n)


def family(name, n, size):
    """(function from parameters to C, starts)."""
    root = np.cumprod(np.append(1.0, (2 * np.arange(1, n) - 1) / (2 * np.arange(1, n))))
    if name in ("toeplitz", "toeplitz plain"):
        wrap = normalized if name == "toeplitz" else (lambda C: C)
        return lambda x: wrap(toeplitz(np.append(1.0, x), n)), [
            root[1:size],
            np.zeros(size - 1),
            0.9 ** np.arange(1, size),
        ]
    if name == "banded":
        starts = []
        for theta in (root, 0.5 ** np.arange(n)):
            C = toeplitz(theta[:size], n)
            starts.append(np.concatenate([np.append(0.0, C[j + 1 : j + size, j]) for j in range(n)]))
        return lambda x: banded(x, n, size), starts
    if name == "banded inverse":
        inverse = np.convolve(root, [1.0, -1.0])[1:size]
        return lambda x: np.linalg.inv(toeplitz(np.append(1.0, x), n)), [inverse, 0.5 * inverse, np.zeros(size - 1)]
    if name == "lti":
        return lambda x: toeplitz(root * (1 - np.exp(-np.exp(x[0]))) ** np.arange(n), n), [[0.0], [2.0], [4.0]]
    if name == "inverse plus constant":
        return lambda x: normalized(toeplitz(1 / np.arange(1, size + 1) + np.exp(x[0]), n)), [[-3.0], [0.0], [3.0]]
    assert name == "blt"
    return lambda x: blt(x, n), [np.log(np.full(2 * size, gap)) for gap in (0.3, 1.0, 2.0)]


def best(name, n, size, A, objective="mean", patterns=None, tries=4, seed=0):
    """The least objective (sensitivity included) that was found for a family, and its C."""
    make, starts = family(name, n, size)
    patterns = patterns or [(i,) for i in range(n)]

    def value(x):
        with np.errstate(all="ignore"):
            try:
                C = make(np.asarray(x))
                found = sensitivity(C, patterns) * np.sqrt(aggregate(errors(C, A), objective))
            except np.linalg.LinAlgError:
                return 1e6
        return np.log(found) if np.isfinite(found) and found > 0 else 1e6

    generator, results = np.random.default_rng(seed), []
    for number, start in itertools.islice(enumerate(itertools.cycle(starts)), max(tries, len(starts))):
        x = np.asarray(start, float)
        if number >= len(starts):
            x = x + 0.3 * generator.normal(size=len(x))
        if len(x):
            for _ in range(2):
                x = minimize(value, x, method="BFGS", options={"gtol": 1e-9, "maxiter": 400}).x
                if len(x) <= 8:
                    options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 3000, "maxfev": 3000, "adaptive": True}
                    x = minimize(value, x, method="Nelder-Mead", options=options).x
        results.append((value(x), tuple(x)))
    lowest, x = min(results)
    return float(np.exp(lowest)), make(np.array(x))
