"""Dense algebra: the best strategy of all for k participations, n <= 2048 or so, in the Gram matrix X = C'C.

An example that takes part once in each of k epochs, always at the same place, meets the steps of one *class*
(i = j mod n/k). Its squared sensitivity is the least sum of a diagonal D with X <= D on the class, by the duality
of semidefinite programs; enlarging X to D there lowers every error. So without loss of generality

    minimize tr(W A X^-1 A')   subject to   X diagonal on every class, with trace k there,  X positive definite,

W the weights of the steps. This is convex. For one participation it says X_ii = 1. With as many zeros more as a
band asks for, it is the prior, explicit banded optimizer: the reference for optimize.banded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky, eigh

from bandmf import _check, band_columns, workloads
from bandmf._types import FloatArray
from bandmf.error.threads import one_thread
from bandmf.optimize.banded import DEFAULT_GAP
from bandmf.optimize.certificate import relative_gap
from bandmf.optimize.descent import Descent, Outcome, Watcher, descend
from bandmf.optimize.horizon import horizon_columns
from bandmf.optimize.objectives import Objective, Weighted, minimax, parse
from bandmf.optimize.solution import Clock, Solution
from bandmf.participation import FixedEpochs, Participation, Single, checked_participation
from bandmf.strategies import Dense
from bandmf.workloads import Workload, workload_for

_LARGEST = 8192  # a few n x n matrices, and an eigendecomposition an iteration
_SINGULAR = 1e-13  # of the largest eigenvalue: a workload with a learning rate of zero is no harm


class Found(NamedTuple):
    """A feasible X, a bound that no feasible X goes below, and how the search ended."""

    X: FloatArray
    lower: float
    iterations: int
    outcome: Outcome


Solver = Callable[[Objective, float, int], Found]


def dense(
    steps: int,
    *,
    workload: Workload | None = None,
    participation: Participation | None = None,
    objective: str | FloatArray = "mean",
    epochs: int | None = None,
    bands: int | None = None,
    gap: float | None = None,
    max_iterations: int = 1000,
    watch: Watcher | None = None,
) -> Solution:
    """The best strategy for a participation in each of k epochs, always at the same place in the epoch.

    `epochs=k` is short for `participation=FixedEpochs(k)`. `bands` restricts C to a band as well. Iterates
    until proved to be within `gap` of the best. `solution.rmse` includes the sensitivity sqrt(k).

    >>> solution = dense(64)
    >>> 2.0401 < solution.rmse < 2.2297, solution.optimality_gap < 1e-4  # nuclear-norm bound, FHU
    (True, True)
    """
    clock = Clock()
    steps = _check.whole("steps", steps, 1, _LARGEST, remedy="use optimize.banded for more steps")
    epochs = _epochs(epochs, participation, steps)
    bands = steps if bands is None else _check.whole("bands", bands, 1, steps, f"steps={steps}")
    A, goal = workload_for(steps, workload).materialize(), parse(objective, steps)
    full = bands == steps
    default = 1e-6 if full and goal.name in ("mean", "weighted") else DEFAULT_GAP[goal.name]
    gap = _check.real("gap", default if gap is None else gap, 0)
    max_iterations = _check.whole("max_iterations", max_iterations)
    classes = Classes(steps, epochs)
    solve: Solver = DualIteration(A, classes, watch) if full else BandSearch(A, classes, bands, watch)
    with one_thread(steps):
        if full and goal.name == "last":
            found = last_step(A[-1], classes, gap)
        elif goal.name == "max":
            found = _minimax(A, solve, gap, max_iterations)
        else:
            found = solve(goal, gap, max_iterations)
    return _solution(A, found, goal, epochs, gap, clock)


def _epochs(epochs: int | None, participation: Participation | None, steps: int) -> int:
    """How often an example takes part: k of FixedEpochs(k), however it was given."""
    if epochs is None:
        participation = checked_participation(participation)
        if not isinstance(participation, (FixedEpochs, Single)):
            raise _check.fail("participation", participation, "must be Single() or FixedEpochs(k)")
        epochs = participation.spacing(steps).participations
    elif participation is not None:
        required = "is short for participation=FixedEpochs(...)"
        raise _check.fail("epochs", epochs, required, "give one of the two")
    epochs = _check.whole("epochs", epochs, 1, steps, f"steps={steps}")
    FixedEpochs(epochs).separation(steps)  # must divide the steps
    return epochs


def _minimax(A: FloatArray, solve: Solver, gap: float, max_iterations: int) -> Found:
    """The least maximum, by reweighting."""
    each = min(40, max_iterations)

    def weighted(weights: FloatArray) -> Weighted[FloatArray]:
        found = solve(Objective("weighted", weights), gap / 4, each)
        errors = squared_errors(A, found.X)
        return Weighted(found.X, errors, found.lower, found.iterations, found.outcome is Outcome.STOPPED)

    best = minimax(weighted, len(A), gap, max(1, max_iterations // 10))
    lower = float(squared_errors(A, best.candidate).max()) / (1 + best.gap) ** 2
    outcome = Outcome.STOPPED if best.stopped else Outcome.LIMIT
    return Found(best.candidate, lower, best.iterations, outcome)


def _solution(A: FloatArray, found: Found, goal: Objective, epochs: int, asked: float, clock: Clock) -> Solution:
    # C'C = X with C lower triangular: Cholesky of X seen from the far corner.
    C = np.tril(cholesky(found.X[::-1, ::-1], lower=True).T[::-1, ::-1])
    errors = squared_errors(A, found.X)
    gap = relative_gap(goal.value(errors), found.lower)
    outcome = found.outcome
    if gap <= asked:
        outcome = Outcome.PROVED
    elif outcome.reached:
        outcome = Outcome.UNPROVED
    detail = f"proved within {gap:.2g} of the best" if math.isfinite(gap) else ""
    mean, objective = (math.sqrt(epochs * value) for value in (float(np.mean(errors)), goal.value(errors)))
    descent = Descent(C, 0.0, found.iterations, outcome, detail)
    proved = gap if math.isfinite(gap) else None
    return Solution.of(Dense(C), mean, descent, clock, objective=objective, gap=proved)


def squared_errors(A: FloatArray, X: FloatArray) -> FloatArray:
    """(A X^-1 A')_ii, the squared error of every step."""
    return np.sum(cho_solve((cholesky(X, lower=True), True), A.T).T * A, axis=1)


class Classes:
    """The steps that one example can meet, by place in the epoch; block matrices on them as stacks of k x k."""

    def __init__(self, steps: int, epochs: int) -> None:
        self.epochs = epochs
        self.steps = np.arange(steps).reshape(epochs, -1).T  # by place in the epoch, then by epoch

    def of(self, matrix: FloatArray) -> FloatArray:
        """The blocks of a full matrix."""
        return matrix[self.steps[:, :, None], self.steps[:, None, :]]

    def times(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        """The block matrix times a full one."""
        result = np.empty_like(matrix)
        result[self.steps] = blocks @ matrix[self.steps]
        return result

    def sandwich(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        """B M B' for the block matrix B and a symmetric M."""
        return self.times(blocks, self.times(blocks, matrix).T)

    @staticmethod
    def power(blocks: FloatArray, exponent: float) -> FloatArray:
        """Of positive definite blocks."""
        values, vectors = np.linalg.eigh(blocks)
        values = np.maximum(values, _SINGULAR * values[:, -1:])
        return (vectors * values[:, None, :] ** exponent) @ vectors.swapaxes(1, 2)

    def shares(self, diagonal: FloatArray) -> FloatArray:
        """A diagonal, by class, scaled to trace k on each."""
        return self.epochs * diagonal / diagonal.sum(axis=1, keepdims=True)


class DualIteration:
    """No band: a fixed-point iteration on the dual variables V, a block for each class with a constant diagonal v.

    With G = A' W A, the Lagrangian is least at X = V^-1/2 R V^-1/2, R = (V^1/2 G V^1/2)^1/2, where it is
    2 tr(R) - k sum of all v: a lower bound on the error of every strategy, whatever V. Blocks of X that are not yet
    diagonal are made so by a congruence, which gives a feasible X and the next V. One eigendecomposition an
    iteration; the gap falls geometrically.
    """

    def __init__(self, A: FloatArray, classes: Classes, watch: Watcher | None) -> None:
        self.A, self.classes, self.watch = A, classes, watch

    def __call__(self, goal: Objective, gap: float, max_iterations: int) -> Found:
        best = Found(np.eye(len(self.A)), -math.inf, 0, Outcome.LIMIT)
        weights = goal.smooth(np.ones(len(self.A)))[1]
        G = self.A.T @ (weights[:, None] * self.A)
        V, least = self._start(G), math.inf
        for iteration in range(1, max_iterations + 1):
            X, total, lower, V = self._step(G, V)
            if total < least:
                least, best = total, best._replace(X=X)
            best = best._replace(lower=max(best.lower, lower), iterations=iteration)
            if relative_gap(least, best.lower) <= gap:
                return best._replace(outcome=Outcome.PROVED)
            if self.watch is not None and self.watch(iteration, math.log(least), best.X):
                return best._replace(outcome=Outcome.STOPPED)
        return best

    def _start(self, G: FloatArray) -> FloatArray:
        """A diagonal, the same throughout each class."""
        guess = np.sqrt(np.maximum(np.diag(G), 1e-6 * np.diag(G).max()) * np.mean(np.diag(G)))
        return np.mean(guess[self.classes.steps], axis=1)[:, None, None] * np.eye(self.classes.epochs)

    def _step(self, G: FloatArray, V: FloatArray) -> tuple[FloatArray, float, float, FloatArray]:
        """A feasible X with its total error, the bound that V proves, and the next V."""
        classes = self.classes
        root, inverse_root = classes.power(V, 0.5), classes.power(V, -0.5)
        spectrum, basis = eigh(classes.sandwich(root, G))
        spectrum = np.maximum(spectrum, 0)
        lower = 2 * float(np.sum(np.sqrt(spectrum))) - classes.epochs * float(np.sum(V[:, 0, 0]))
        roots = np.sqrt(spectrum + _SINGULAR * spectrum[-1])
        X = classes.sandwich(inverse_root, (basis * roots) @ basis.T)
        blocks = classes.of(X)
        shares = classes.shares(np.einsum("lii->li", blocks))
        scale = np.sqrt(shares)
        mend = scale[:, :, None] * classes.power(blocks, -0.5)
        feasible = classes.sandwich(mend, X)
        feasible = (feasible + feasible.T) / 2
        for columns, share in zip(classes.steps, shares, strict=True):  # exactly, not up to rounding
            feasible[np.ix_(columns, columns)] = np.diag(share)
        total = float(np.sum(cho_solve((cholesky(feasible, lower=True), True), G).diagonal()))
        return feasible, total, lower, self._next(V, blocks, scale)

    def _next(self, V: FloatArray, blocks: FloatArray, scale: FloatArray) -> FloatArray:
        """V moved towards the one for which X has just these diagonal blocks, its diagonals made constant again."""
        outer = scale[:, :, None] * scale[:, None, :]
        half = self.classes.power(V * outer, 0.5)
        V = half @ (blocks / outer) @ half / outer
        diagonal = np.einsum("lii->li", V)
        constant = np.sum(scale**2 * diagonal, axis=1, keepdims=True) / self.classes.epochs
        level = np.sqrt(constant / diagonal)
        V = V * level[:, :, None] * level[:, None, :]
        np.einsum("lii->li", V)[...] = constant
        return V


def last_step(row: FloatArray, classes: Classes, gap: float) -> Found:
    """The last step alone, a' X^-1 a for the last row a of A: in closed form.

    For any u, a' X^-1 a >= (a'u)^2 / u'Xu, and u'Xu <= k (sum over classes of max |u_i|)^2. The best u is the sign
    of a on the class where |a|_1 is largest: no X goes below m^2 = max |a|_1^2 / k. X = a a' / m^2 between classes
    and d_i = k |a_i| / |a|_1 on them attains it, but is singular; the share `mixed` keeps it from being so.
    """
    k, size = classes.epochs, np.abs(row[classes.steps])
    least = float(size.sum(axis=1).max()) ** 2 / k
    mixed = min(max(gap, 1e-10), 0.5)
    even = np.full_like(size, 1.0)
    shares = classes.shares(np.where(size.sum(axis=1, keepdims=True) > 0, size, even))
    shares = (1 - mixed / 2) * shares + mixed / 2 * classes.shares(even)
    X = (1 - mixed / 2) ** 2 * np.outer(row, row) / least
    for steps, share in zip(classes.steps, shares, strict=True):
        X[np.ix_(steps, steps)] = np.diag(share)
    return Found(X, least, 0, Outcome.CLOSED_FORM)


class BandSearch:
    """With a band: L-BFGS over the correlations Z_ij and the shares d_i of X_ij = sqrt(d_i d_j) Z_ij.

    Convexity gives the bound: total(X*) >= 2 total(X) - max <S, X*>, S = X^-1 A' W A X^-1. Since
    |X*_ij| <= sqrt(d*_i d*_j) <= (d*_i sqrt(d_j / d_i) + d*_j sqrt(d_i / d_j)) / 2, the maximum is at most
    k sum over classes of max c_i, with c_i = sum_j |S_ij| sqrt(d_j / d_i) over the entries that may differ from zero.
    """

    def __init__(self, A: FloatArray, classes: Classes, bands: int, watch: Watcher | None) -> None:
        self.A, self.classes, self.watch = A, classes, watch
        lag = np.abs(np.subtract.outer(np.arange(len(A)), np.arange(len(A))))
        self.free = (lag % classes.steps.shape[0] > 0) & (lag < bands)
        self.rows, self.columns = np.nonzero(np.tril(self.free, -1))
        start = horizon_columns(len(A), min(bands, len(classes.steps)), workloads.prefix(len(A)))
        gram = band_columns.materialize(band_columns.gram(start))
        self.x = np.append(gram[self.rows, self.columns], np.zeros(len(A) if classes.epochs > 1 else 0))

    def __call__(self, goal: Objective, gap: float, max_iterations: int) -> Found:
        if self.x.size == 0:
            return Found(np.eye(len(self.A)), self._lower(self.x, goal), 0, Outcome.CLOSED_FORM)

        def proved(iteration: int, loss: float, x: FloatArray) -> bool:
            return relative_gap(goal.value(squared_errors(self.A, self.gram(x))), self._lower(x, goal)) <= gap

        descent = descend(
            lambda x: self.loss(x, goal),
            self.x,
            max_iterations=max_iterations,
            memory=20,
            width=len(self.A),
            watch=self.watch,
            proved=proved,
        )
        self.x = descent.x
        lower = self._lower(descent.x, goal)
        return Found(self.gram(descent.x), lower, descent.iterations, descent.outcome)

    def shares(self, x: FloatArray) -> FloatArray:
        """d, by class."""
        logs = x[len(self.rows) :]
        if not logs.size:
            return np.ones((len(self.A), 1))
        logs = logs[self.classes.steps]
        return self.classes.shares(np.exp(logs - logs.max(axis=1, keepdims=True)))

    def gram(self, x: FloatArray) -> FloatArray:
        """X."""
        Z, root = np.eye(len(self.A)), np.empty(len(self.A))
        Z[self.rows, self.columns] = Z[self.columns, self.rows] = x[: len(self.rows)]
        root[self.classes.steps] = np.sqrt(self.shares(x))
        return root[:, None] * Z * root

    def loss(self, x: FloatArray, goal: Objective) -> tuple[float, FloatArray]:
        """log of the objective; infinite where X is not positive definite."""
        X = self.gram(x)
        try:
            B = cho_solve((cholesky(X, lower=True), True), self.A.T).T
        except LinAlgError:
            return math.inf, np.zeros_like(x)
        total, weights = goal.smooth(np.sum(B * self.A, axis=1))
        S, d = B.T @ (weights[:, None] * B), np.diag(X)
        slope = -2 * (S * np.sqrt(np.outer(d, d)))[self.rows, self.columns]
        if self.classes.epochs > 1:
            price = np.sum(S * X, axis=1)  # d times the derivative with respect to d, but for its sign
            mean = np.empty_like(price)
            mean[self.classes.steps] = price[self.classes.steps].sum(axis=1, keepdims=True) / self.classes.epochs
            slope = np.append(slope, d * mean - price)
        return math.log(total), slope / total

    def _lower(self, x: FloatArray, goal: Objective) -> float:
        X = self.gram(x)
        B = cho_solve((cholesky(X, lower=True), True), self.A.T).T
        errors, root = np.sum(B * self.A, axis=1), np.sqrt(np.diag(X))
        weights = goal.proof_weights(errors)
        S = np.where(self.free, np.abs(B.T @ (weights[:, None] * B)), 0.0)
        prices = (S @ root) / root + np.sum(weights[:, None] * B * B, axis=0)
        worst = float(np.sum(prices[self.classes.steps].max(axis=1)))
        return 2 * float(weights @ errors) - self.classes.epochs * worst
