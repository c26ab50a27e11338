"""The L-BFGS driver that all optimizers share.

Written out because SciPy's spends as long on its bookkeeping as a banded loss of a million numbers takes, and
because it stops, and reports success, where a loss is not finite. Here the history is two matrices, read four times
an iteration, and a point without a finite loss is a step that was too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bandmf._types import FloatArray
from bandmf.error.threads import one_thread

LossAndGradient = Callable[[FloatArray], tuple[float, FloatArray]]
Watcher = Callable[[int, float, FloatArray], bool]

_DECREASE, _CURVATURE = 1e-4, 0.9  # the two constants of Wolfe's conditions
_TRIALS = 30  # of step lengths
_ROUNDING = 4e-16  # of the loss: differences below this mean nothing


class Outcome(StrEnum):
    """How a search ended; the first three reached what was asked for."""

    PROVED = "proved to the gap asked for"
    CONVERGED = "no lower point in reach"
    CLOSED_FORM = "in closed form"
    STOPPED = "stopped by the watcher"
    LIMIT = "iteration limit reached"
    STALLED = "stalled before it was flat"
    UNPROVED = "no lower point in reach, but the gap asked for is not proved"

    @property
    def reached(self) -> bool:
        """Whether what was asked for was reached."""
        return self in (Outcome.PROVED, Outcome.CONVERGED, Outcome.CLOSED_FORM)


@dataclass
class Descent:
    """The best point of a search, and how the search ended."""

    x: FloatArray
    loss: float
    iterations: int
    outcome: Outcome
    detail: str = ""

    @property
    def converged(self) -> bool:
        """Whether what was asked for was reached."""
        return self.outcome.reached


def descend(
    loss_and_gradient: LossAndGradient,
    start: FloatArray,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-14,
    memory: int = 10,
    width: int = 0,
    watch: Watcher | None = None,
    proved: Watcher | None = None,
) -> Descent:
    """Minimize a smooth loss from `start`; never returns anything worse than `start`.

    `watch` and `proved` are called after each iteration with (iteration, loss, x); the first ends the search by
    returning True, the second ends it because what was to be proved is. Without that, the search ends when two
    iterations in a row improve the loss by less than `tolerance`; it has converged when the quadratic model then
    promises next to nothing more. Linear algebra has threads only if the loss has matrices of a large `width`.
    """
    with one_thread(width):
        return _descend(loss_and_gradient, start, max_iterations, tolerance, memory, watch, proved)


def _descend(
    loss_and_gradient: LossAndGradient,
    start: FloatArray,
    max_iterations: int,
    tolerance: float,
    memory: int,
    watch: Watcher | None,
    proved: Watcher | None,
) -> Descent:
    x = np.array(start, dtype=np.float64)
    loss, slope = _evaluate(loss_and_gradient, x)
    if not math.isfinite(loss):
        raise ValueError("start: the loss is not finite there, so there is nothing to improve on")
    model, small, promised = _Model(x.size, memory), 0, math.inf
    for iteration in range(1, max_iterations + 1):
        direction = -model.solve(slope.ravel())
        promised = -0.5 * float(direction @ slope.ravel())
        if promised <= 0.1 * tolerance and not model.empty:
            return Descent(x, loss, iteration - 1, Outcome.CONVERGED)
        found = _line_search(loss_and_gradient, x, loss, slope, direction.reshape(x.shape), model.empty)
        if found is None:
            if model.empty:
                return Descent(x, loss, iteration, _flat(promised, tolerance), "line search")
            model.forget()  # perhaps the model was wrong: once more along the gradient
            continue
        new_x, new_loss, new_slope = found
        model.learn((new_x - x).ravel(), (new_slope - slope).ravel())
        small = small + 1 if loss - new_loss <= tolerance else 0
        x, loss, slope = new_x, new_loss, new_slope
        if watch is not None and watch(iteration, loss, x):
            return Descent(x, loss, iteration, Outcome.STOPPED)
        if proved is not None and proved(iteration, loss, x):
            return Descent(x, loss, iteration, Outcome.PROVED)
        if small >= 2:
            return Descent(x, loss, iteration, _flat(promised, tolerance))
    return Descent(x, loss, max_iterations, Outcome.LIMIT)


def _flat(promised: float, tolerance: float) -> Outcome:
    """Whether what the model still promises, of the logarithm of a squared error, is nothing to speak of."""
    return Outcome.CONVERGED if promised <= max(1e-9, 100 * tolerance) else Outcome.STALLED


def _evaluate(loss_and_gradient: LossAndGradient, x: FloatArray) -> tuple[float, FloatArray]:
    with np.errstate(all="ignore"):
        loss, slope = loss_and_gradient(x)
    return (loss, slope) if math.isfinite(loss) and np.isfinite(slope).all() else (math.inf, slope)


def _line_search(
    loss_and_gradient: LossAndGradient,
    x: FloatArray,
    loss: float,
    slope: FloatArray,
    direction: FloatArray,
    first: bool,
) -> tuple[FloatArray, float, FloatArray] | None:
    """A point that meets Wolfe's conditions along `direction`, or the lowest one tried; None if none is lower.

    Where the loss no longer changes beyond rounding, the slope alone decides (Hager and Zhang).
    """
    descent = float(np.sum(slope * direction))
    if not descent < 0:
        return None
    room = _ROUNDING * max(1.0, abs(loss))
    low, high, step = 0.0, math.inf, 1.0
    if first:  # nothing is known of the scale yet
        step = min(1.0, 1 / float(np.linalg.norm(slope)))
    best = None
    for _ in range(_TRIALS):
        point = x + step * direction
        value, gradient = _evaluate(loss_and_gradient, point)
        if value < (loss if best is None else best[1]):
            best = point, value, gradient
        along = float(np.sum(gradient * direction)) if math.isfinite(value) else math.inf
        lower = value <= loss + _DECREASE * step * descent
        level = value <= loss + room and along <= (2 * _DECREASE - 1) * descent
        if not (lower or level):
            high = step
        elif along < _CURVATURE * descent:
            low = step
        else:
            return point, value, gradient
        step = 2 * step if math.isinf(high) else (low + high) / 2
        if high - low <= 1e-14 * high:
            break
    return best


class _Model:
    """The inverse Hessian from the last `memory` steps s and changes of slope y, through their inner products."""

    def __init__(self, size: int, memory: int) -> None:
        self._memory = max(1, min(memory, size))
        self._size = size
        self._pairs = np.empty((0, 0))
        self._count = 0
        self._products = np.zeros((2 * self._memory, 2 * self._memory))

    @property
    def empty(self) -> bool:
        return self._count == 0

    def forget(self) -> None:
        """Start again from nothing."""
        self._count = 0

    def learn(self, s: FloatArray, y: FloatArray) -> None:
        """Take in one pair, unless it has no positive curvature; the oldest makes room."""
        curvature = float(s @ y)
        if not curvature > 1e-16 * float(np.linalg.norm(s) * np.linalg.norm(y)):
            return
        if not self._pairs.size:
            self._pairs = np.zeros((2 * self._memory, self._size))
        slot = self._count % self._memory
        rows = [slot, self._memory + slot]
        self._pairs[rows[0]], self._pairs[rows[1]] = s, y
        for row in rows:
            self._products[row] = self._products[:, row] = self._pairs @ self._pairs[row]
        self._count += 1

    def solve(self, slope: FloatArray) -> FloatArray:
        """The inverse Hessian times the slope: the two loops of L-BFGS, run on inner products alone."""
        if self.empty:
            return slope
        m, used = self._memory, min(self._count, self._memory)
        order = [(self._count - 1 - k) % m for k in range(used)]  # newest first
        against = self._pairs @ slope
        weights = np.zeros(2 * m)  # of the pairs; `scale` is that of the slope itself
        alpha = {}
        for i in order:
            alpha[i] = (against[i] + self._products[i] @ weights) / self._products[i, m + i]
            weights[m + i] -= alpha[i]
        newest = order[0]
        scale = self._products[newest, m + newest] / self._products[m + newest, m + newest]
        weights *= scale
        for i in reversed(order):
            along = scale * against[m + i] + self._products[m + i] @ weights
            weights[i] += alpha[i] - along / self._products[i, m + i]
        return scale * slope + weights @ self._pairs
