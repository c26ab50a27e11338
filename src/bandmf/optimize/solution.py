"""What an optimizer returns: a strategy, how good it is, and how that is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from bandmf.optimize.descent import Descent, Outcome
from bandmf.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An optimized strategy, with how good it is and how that is known.

    `rmse` is sensitivity times the root mean squared error, for the participation that was optimized for
    (a single one unless said otherwise); `objective` the square root of what was minimized (equal to `rmse`
    for the objective "mean"). `optimality_gap` bounds how far `objective` can be, relatively, above the best
    possible strategy of the family named in `message`; None where there is no proof. `outcome` says how the
    search ended, and `converged` whether it reached what was asked for.
    """

    strategy: Strategy
    rmse: float
    objective: float
    optimality_gap: float | None
    iterations: int
    seconds: float
    outcome: Outcome
    message: str

    @property
    def converged(self) -> bool:
        """Whether what was asked for was reached."""
        return self.outcome.reached

    def __repr__(self) -> str:
        proved = "no proof" if self.optimality_gap is None else f"optimality_gap={self.optimality_gap:.2g}"
        return (
            f"Solution({self.strategy!r}, rmse={self.rmse:.7g}, {proved}, converged={self.converged},\n"
            f"         {self.iterations} iterations in {self.seconds:.2f} s: {self.message})"
        )

    def plot(self) -> Any:
        """A figure of matplotlib: some columns of the strategy."""
        # By name: pictures are drawn far below optimizers, which need no matplotlib.
        return import_module("bandmf.plots.figures").columns(self.strategy)

    def _repr_html_(self) -> str:
        """For notebooks: the numbers, and the picture."""
        return import_module("bandmf.plots.notebook").solution(self)

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
            outcome=found.outcome,
            message="; ".join(filter(None, (found.outcome.value, found.detail))),
        )


@dataclass
class Clock:
    """Seconds since it was made."""

    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self.start
