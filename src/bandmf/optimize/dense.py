"""Dense algebra: the best strategy whose Gram matrix X = C'C has given zeros. Convex in X, n <= 2048 or so.

    minimize tr(D A X^-1 A')   subject to   X_ii = 1,  X_ij = 0 off the mask,  X positive definite.

With no mask this is the dense matrix mechanism (single participation). With the pattern's pairs masked out,
X_ij = 0 for i = j + n/k, j + 2n/k, ..., an example that takes part once in each of k epochs has sensitivity
exactly sqrt(k). With the band as mask it is the prior, explicit banded optimizer: the reference for
optimize.banded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.linalg import LinAlgError, cho_solve, cholesky, eigh

from bandmf import _check, band_columns, workloads
from bandmf._deprecated import once_positional
from bandmf._types import FloatArray
from bandmf.optimize.banded import DEFAULT_GAP
from bandmf.optimize.horizon import horizon_columns
from bandmf.optimize.objectives import Objective, Weighted, minimax, parse
from bandmf.optimize.solution import Clock, Descent, Solution, Watcher, descend
from bandmf.participation import FixedEpochs, Participation, Single, checked_participation
from bandmf.strategies import Dense
from bandmf.workloads import Workload, workload_for

_LARGEST = 8192  # three n x n matrices and the optimizer's memory of them


@once_positional("epochs", "workload", "objective")
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
    length = FixedEpochs(epochs).separation(steps)
    bands = steps if bands is None else _check.whole("bands", bands, 1, steps, f"steps={steps}")
    workload = workload_for(steps, workload)
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    free = (lag % length > 0) & (lag < bands)
    goal = parse(objective, steps)
    full = bands == steps
    default = 1e-6 if full and goal.name in ("mean", "weighted") else DEFAULT_GAP[goal.name]
    gap = _check.real("gap", default if gap is None else gap, 0)
    max_iterations = _check.whole("max_iterations", max_iterations)
    problem = Problem(workload.materialize(), free)
    x = problem.gram_values(horizon_columns(steps, min(bands, length), workloads.prefix(steps)))

    def smooth(goal: Objective, gap: float, max_iterations: int) -> Descent:
        nonlocal x
        if full and goal.name != "last" and x.size:
            descent = fixed_point(problem, length, goal, gap, max_iterations, watch)
        else:
            descent = problem.minimize(goal, x, gap, max_iterations, watch)
        x = descent.x
        return descent

    if goal.name != "max":
        descent = smooth(goal, gap, max_iterations)
    else:
        descent = _minimax(problem, smooth, gap, max_iterations)
    return problem.solution(descent, goal, epochs, clock)


def _epochs(epochs: int | None, participation: Participation | None, steps: int) -> int:
    """How often an example takes part: k of FixedEpochs(k), however it was given."""
    if epochs is None:
        if not isinstance(participation, (FixedEpochs, Single, type(None))):
            raise _check.fail("participation", participation, "must be Single() or FixedEpochs(k)")
        epochs = checked_participation(participation).spacing(steps).participations
    elif participation is not None:
        raise _check.fail(
            "epochs", epochs, "is short for participation=FixedEpochs(...)", "give one of the two"
        )
    return _check.whole("epochs", epochs, 1, steps, f"steps={steps}")


def _minimax(
    problem: Problem, smooth: Callable[[Objective, float, int], Descent], gap: float, max_iterations: int
) -> Descent:
    """The least maximum, by reweighting."""

    def solve(weights: FloatArray) -> Weighted[FloatArray]:
        descent = smooth(Objective("weighted", weights), gap / 4, 40)
        errors, _ = problem.errors(descent.x)
        lower = float(weights @ errors) / (1 + problem.gap) ** 2
        return Weighted(descent.x, errors, lower, descent.iterations)

    best = minimax(solve, len(problem.A), gap, max(1, max_iterations // 10))
    problem.gap = best.gap
    return Descent(best.candidate, 0.0, best.iterations, best.gap <= gap, f"gap asked for: {gap:g}")


class Problem:
    """Loss over X: `free` marks the off-diagonal pairs that may differ from zero."""

    def __init__(self, A: FloatArray, free: npt.NDArray[np.bool_]) -> None:
        self.A, self.free = A, free
        self.rows, self.columns = np.nonzero(np.tril(free, -1))
        self.gap = math.inf

    def gram(self, values: FloatArray) -> FloatArray:
        X = np.eye(len(self.A))
        X[self.rows, self.columns] = X[self.columns, self.rows] = values
        return X

    def errors(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Squared errors (A X^-1 A')_ii of all steps, and A X^-1."""
        B = cho_solve((cholesky(self.gram(values), lower=True), True), self.A.T).T
        return np.sum(B * self.A, axis=1), B

    def loss(self, values: FloatArray, goal: Objective) -> tuple[float, FloatArray]:
        """log of the objective; infinite where X is not positive definite."""
        try:
            errors, B = self.errors(values)
        except LinAlgError:
            return math.inf, np.zeros_like(values)
        total, weights = goal.smooth(errors)
        slopes = (B.T @ (weights[:, None] * B))[self.rows, self.columns]
        # The certificate of certificate.py costs nothing here: S and X are at hand.
        slack = 2 * float(np.sum(np.maximum(slopes * (1 - values), -slopes * (1 + values))))
        lower = (float(weights @ errors) - slack) / weights.sum()
        self.gap = max(0.0, math.sqrt(goal.value(errors) / lower) - 1) if lower > 0 else math.inf
        return math.log(total), -2 * slopes / total

    def gram_values(self, columns: FloatArray) -> FloatArray:
        """The free entries of C'C for compact columns of C whose band has the zeros asked for."""
        return band_columns.materialize(band_columns.gram(columns))[self.rows, self.columns]

    def minimize(
        self, goal: Objective, start: FloatArray, gap: float, max_iterations: int, watch: Watcher | None
    ) -> Descent:
        """L-BFGS over the free entries until the proved gap is at most `gap`."""
        if start.size == 0:
            self.gap = 0.0
            return Descent(start, 0.0, 0, True, "one band: nothing to choose")

        def proved(iteration: int, loss: float, x: FloatArray) -> bool:
            return (watch is not None and watch(iteration, loss, x)) or self.gap <= gap

        descent = descend(lambda x: self.loss(x, goal), start, max_iterations=max_iterations, watch=proved)
        self.loss(descent.x, goal)  # the gap of the best point, not of the last one tried
        return descent

    def solution(self, descent: Descent, goal: Objective, epochs: int, clock: Clock) -> Solution:
        X = self.gram(descent.x)
        # C'C = X with C lower triangular: Cholesky of X seen from the far corner.
        C = cholesky(X[::-1, ::-1], lower=True).T[::-1, ::-1]
        errors, _ = self.errors(descent.x)
        descent.message = f"proved within {self.gap:.2g} of the best with these zeros; {descent.message}"
        mean, objective = (math.sqrt(epochs * value) for value in (np.mean(errors), goal.value(errors)))
        return Solution.of(Dense(np.tril(C)), mean, descent, clock, objective=objective, gap=self.gap)


def fixed_point(
    problem: Problem, length: int, goal: Objective, gap: float, max_iterations: int, watch: Watcher | None
) -> Descent:
    """No band: iterate on the dual variables V of the constraints X_ij = 1 (i = j) or 0 (i = j mod length).

    With G = A' D A, the best X for given V is V^-1/2 R V^-1/2, R = (V^1/2 G V^1/2)^1/2, and 2 tr(R) - tr(V) is
    a lower bound on the error of every strategy with these zeros. V has a block for each place in the epoch, of the
    steps at which it comes: diagonal for a single participation. V <- blocks of R is a contraction whose fixed point
    meets all constraints; each iteration is one eigendecomposition.
    """
    weights = goal.smooth(np.ones(len(problem.A)))[1]
    G = problem.A.T @ (weights[:, None] * problem.A)
    blocks = Blocks(len(G), length)
    v = np.sqrt(np.diag(G) * np.mean(np.diag(G)))
    V = blocks.of(np.diag(v))
    for iteration in range(1, max_iterations + 1):
        spectrum, basis = eigh(blocks.sandwich(blocks.power(V, 0.5), G))
        spectrum = np.maximum(spectrum, 0)
        lower = 2 * float(np.sum(np.sqrt(spectrum))) - float(np.trace(V, axis1=1, axis2=2).sum())
        roots = np.sqrt(
            spectrum + 1e-14 * spectrum[-1]
        )  # a singular workload (a last rate of zero) is no harm
        R = (basis * roots) @ basis.T
        V = blocks.of(R)
        inverse = (basis / roots) @ basis.T
        total = float(
            np.sum(blocks.sandwich(blocks.power(V, 0.5), G) * inverse)
        )  # of X, whose blocks are one
        problem.gap = math.sqrt(total / lower) - 1 if lower > 0 else math.inf
        X = blocks.sandwich(blocks.power(V, -0.5), R)
        values = X[problem.rows, problem.columns]
        stop = watch is not None and watch(iteration, math.log(total), values)
        if problem.gap <= gap or stop:
            message = "fixed point reached" if problem.gap <= gap else "stopped as asked"
            return Descent(values, math.log(total), iteration, True, message)
    return Descent(values, math.log(total), max_iterations, False, f"gap={gap} not reached")


class Blocks:
    """Symmetric matrices whose only entries are at (i, j), i = j mod `length`: a stack of small matrices."""

    def __init__(self, steps: int, length: int) -> None:
        self.places = np.arange(steps).reshape(-1, length).T  # by place in the epoch, then by epoch

    def of(self, matrix: FloatArray) -> FloatArray:
        """The blocks of a full matrix."""
        return matrix[self.places[:, :, None], self.places[:, None, :]]

    def power(self, blocks: FloatArray, exponent: float) -> FloatArray:
        """Of positive definite blocks."""
        values, vectors = np.linalg.eigh(blocks)
        return (vectors * values[:, None, :] ** exponent) @ vectors.swapaxes(1, 2)

    def sandwich(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        """B M B for the block matrix B and a symmetric M."""
        return self._times(blocks, self._times(blocks, matrix).T)

    def _times(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        result = np.empty_like(matrix)
        result[self.places] = blocks @ matrix[self.places]
        return result
