"""What an optimizer returns, and the L-BFGS driver that all of them share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import minimize

from bandmf._types import FloatArray
from bandmf.strategies import Strategy

LossAndGradient = Callable[[FloatArray], tuple[float, FloatArray]]
Watcher = Callable[[int, float, FloatArray], bool]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An optimized strategy, with how good it is and how that is known.

    `rmse` is sensitivity times the root mean squared error, for the participation that was optimized for
    (a single one unless said otherwise); `objective` the square root of what was minimized (equal to `rmse`
    for the objective "mean"). `optimality_gap` bounds how far `objective` can be, relatively, above the best
    possible strategy of the family named in `message`; None where there is no proof.
    """

    strategy: Strategy
    rmse: float
    objective: float
    optimality_gap: float | None
    iterations: int
    seconds: float
    converged: bool
    message: str

    @staticmethod
    def of(
        strategy: Strategy,
        rmse: float,
        found: Descent,
        clock: Clock,
        *,
        objective: float | None = None,
        gap: float | None = None,
    ) -> Solution:
        """What a search that `found` this strategy returns; the objective is the rmse unless given."""
        return Solution(
            strategy=strategy,
            rmse=rmse,
            objective=rmse if objective is None else objective,
            optimality_gap=gap,
            iterations=found.iterations,
            seconds=clock.seconds(),
            converged=found.converged,
            message=found.message,
        )


@dataclass
class Descent:
    """The result of one run of L-BFGS."""

    x: FloatArray
    loss: float
    iterations: int
    converged: bool
    message: str


@dataclass
class Clock:
    """Seconds since it was made."""

    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self.start


def descend(
    loss_and_gradient: LossAndGradient,
    start: FloatArray,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-14,
    memory: int = 20,
    watch: Watcher | None = None,
) -> Descent:
    """Minimize a smooth loss with L-BFGS from `start`; never returns anything worse than `start`.

    Points where the loss is not finite (an unstable strategy overflows) are walled off: the line search
    there sees a steep slope back, instead of the inf on which it would stop and report success. `watch` is
    called after each iteration with (iteration, loss, x) and ends the run by returning True.
    """
    best_x = np.array(start, dtype=np.float64)
    best_loss, best_slope = loss_and_gradient(best_x)
    if not math.isfinite(best_loss):
        raise ValueError("start: the loss is not finite there, so there is nothing to improve on")
    shape, iterations, stopped = best_x.shape, 0, False

    def guarded(flat: FloatArray) -> tuple[float, FloatArray]:
        nonlocal best_x, best_loss, best_slope
        x = flat.reshape(shape)
        if iterations == 0 and np.array_equal(x, best_x):  # the start, which is known
            return best_loss, best_slope.ravel()
        with np.errstate(all="ignore"):
            loss, slope = loss_and_gradient(x)
        if not (math.isfinite(loss) and np.isfinite(slope).all()):
            away = x - best_x
            return best_loss + 1 + float(np.linalg.norm(away)), (away / np.linalg.norm(away)).ravel()
        if loss < best_loss:
            best_x, best_loss, best_slope = x.copy(), loss, slope
        return loss, slope.ravel()

    def after(intermediate_result: object) -> None:
        nonlocal iterations, stopped
        iterations += 1
        if watch is not None and watch(iterations, best_loss, best_x):
            stopped = True
            raise StopIteration

    result = minimize(
        guarded,
        best_x.ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=after,
        options={
            "maxiter": max_iterations,
            "maxfun": 20 * max_iterations,
            "maxcor": memory,
            "ftol": tolerance,
            "gtol": 1e-12,
            "maxls": 40,
        },
    )
    # A line search that finds no lower point at rounding level is convergence, not failure; one that ends at
    # the wall is failure, whatever it says.
    flat = float(np.abs(best_slope).max()) < 1e-4 * max(1.0, abs(best_loss))
    converged = stopped or (flat and iterations < max_iterations)
    message = "stopped as asked" if stopped else str(result.message)
    return Descent(best_x, best_loss, iterations, converged, message)
