"""Slow, obvious re-computations that the tests compare with; they share no code with bandmf.

Everything is dense algebra or brute force, written from the definitions: B = A C^-1, X = C'C.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np


def banded_matrix(columns):
    """C from compact columns, entry by entry: C[j + r, j] = columns[j, r]."""
    columns = np.asarray(columns)
    n, bands = columns.shape
    C = np.zeros((n, n))
    for j in range(n):
        for r in range(min(bands, n - j)):
            C[j + r, j] = columns[j, r]
    return C


def toeplitz_matrix(coefficients, steps):
    """C[i, j] = coefficients[i - j], from the definition."""
    coefficients = np.asarray(coefficients, dtype=float)
    return banded_matrix(np.tile(coefficients, (steps, 1)))


def momentum_matrix(rates, beta, decay):
    """Column j is what SGD does with a single gradient at step j: the update rule, run as it is written."""
    n = len(rates)
    A = np.zeros((n, n))
    for j in range(n):
        velocity = position = 0.0
        for i in range(n):
            velocity = beta * velocity + (i == j)
            position = (1 - rates[i] * decay) * position + rates[i] * velocity
            A[i, j] = position
    return A


def square_root_coefficients(count):
    """The power series of (1 - x)^(-1/2): 1, 1/2, 3/8, 5/16, ..."""
    return np.cumprod(np.append(1.0, 1 - 0.5 / np.arange(1, count)))


def normalized(C):
    """C with every column divided by its norm."""
    return C / np.sqrt((C**2).sum(axis=0))


def random_columns(generator, steps, bands):
    """Compact columns of a signed banded matrix: the diagonal in [0.5, 1.5], the rest in [-0.6, 0.6]."""
    columns = generator.uniform(-0.6, 0.6, (steps, bands))
    columns[:, 0] = generator.uniform(0.5, 1.5, steps)
    columns[np.add.outer(np.arange(steps), np.arange(bands)) >= steps] = 0
    return columns


def errors(C, A):
    """Squared row norms of A C^-1."""
    B = np.linalg.solve(C.T, A.T).T
    return (B**2).sum(axis=1)


def rmse(C, A):
    """Largest column norm times root mean squared error."""
    return np.sqrt((C**2).sum(axis=0).max() * errors(C, A).mean())


def nuclear_norm_bound(steps):
    """No strategy whatever is below this on the prefix workload: the nuclear norm of A, over n.

    The singular values of the prefix matrix are 1 / (2 sin((2j - 1) pi / (4n + 2))).
    """
    return np.mean(1 / (2 * np.sin((2 * np.arange(1, steps + 1) - 1) * np.pi / (4 * steps + 2))))


def separated_patterns(steps, max_participations, separation):
    """Every non-empty set of at most so many steps, each two at least `separation` apart."""
    for size in range(1, max_participations + 1):
        for pattern in combinations(range(steps), size):
            if all(b - a >= separation for a, b in combinations(pattern, 2)):
                yield pattern


def epoch_patterns(steps, epochs):
    """The same place in every epoch."""
    return [tuple(i + m * (steps // epochs) for m in range(epochs)) for i in range(steps // epochs)]


def signs_value(X, pattern):
    """The most that +-1 contributions attain on this pattern: below the squared sensitivity, or equal."""
    G = X[np.ix_(pattern, pattern)]
    return max(np.array(s) @ G @ np.array(s) for s in product([1, -1], repeat=len(pattern)))


def vectors_value(X, pattern, starts=4, sweeps=200):
    """What unit *vectors* attain on this pattern, by ascent one vector at a time.

    With as many dimensions as vectors this finds the pattern's true squared sensitivity in all but contrived
    cases, and whatever it finds is attained: never above the truth.
    """
    G = X[np.ix_(pattern, pattern)]
    size, generator, best = len(pattern), np.random.default_rng(0), signs_value(X, pattern)
    for _ in range(starts if size > 2 else 0):  # signs are enough for two
        U = generator.normal(size=(size, size))
        U /= np.linalg.norm(U, axis=1, keepdims=True)
        value = -np.inf
        for _ in range(sweeps):
            for i in range(size):
                pull = G[i] @ U - G[i, i] * U[i]
                U[i] = pull / length if (length := np.linalg.norm(pull)) > 0 else U[i]
            value, before = np.sum(G * (U @ U.T)), value
            if value - before < 1e-13 * value:
                break
        best = max(best, value)
    return best


def absolute_value(X, pattern):
    """sum |X_ij| over the pattern: above the squared sensitivity, or equal."""
    return np.abs(X[np.ix_(pattern, pattern)]).sum()


def sensitivity_bounds(C, patterns):
    """Bounds on the sensitivity: (attained by signs, attained by vectors, never exceeded)."""
    X, patterns = C.T @ C, list(patterns)
    values = [[rule(X, p) for p in patterns] for rule in (signs_value, vectors_value, absolute_value)]
    return tuple(float(np.sqrt(max(row))) for row in values)


def slope(function, x, step=1e-3):
    """The gradient by five-point differences: error of order step^4, rounding of order 1e-16 / step."""
    gradient = np.empty(x.size)
    for k in range(x.size):
        e = np.zeros(x.size)
        e[k] = step
        e = e.reshape(x.shape)
        near, far = function(x + e) - function(x - e), function(x + 2 * e) - function(x - 2 * e)
        gradient[k] = (8 * near - far) / (12 * step)
    return gradient.reshape(x.shape)


def state_vectors(state, shape):
    """How many vectors of that shape the state of a streaming operator really holds."""
    if isinstance(state, np.ndarray):
        return state.size / np.prod(shape)
    return sum(state_vectors(part, shape) for part in state) if isinstance(state, tuple) else 0


def certificate(C, A, weights, free):
    """(total, lower bound on that of any competitor of sensitivity one whose X is zero where `free` is not).

    By convexity in X: total - sum over the free (i, j) of max(S_ij (1 - X_ij), -S_ij (1 + X_ij)), with
    S = X^-1 A' D A X^-1.
    """
    X = C.T @ C
    Y = np.linalg.solve(X, A.T)
    S = Y @ np.diag(weights) @ Y.T
    slack = np.maximum(S * (1 - X), -S * (1 + X))[free].sum()
    total = float(weights @ errors(C, A))
    return total, total - float(slack)


def lags(steps):
    """|i - j| as a matrix."""
    return np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
