"""The strategies that a search chooses from: C = T D, T of a family and D of a curve, on one workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.error import per_step_error
from bandmf.optimize.bins.costs import Costs, costs_of
from bandmf.optimize.bins.families import Family, family_named
from bandmf.optimize.bins.scales import Curve
from bandmf.strategies import Scaled, Strategy
from bandmf.strategies.scaled import unscaled
from bandmf.workloads import Workload

OBJECTIVES = ("mean", "max", "last")
_EVERY = 2  # of the starts of T: those between end where these do
_PUSH = 2.0  # power of its error that a step's weight is multiplied by, for the largest error


@dataclass(frozen=True, eq=False)
class Members:
    """Strategies by free unknowns x: those of T, then those of D."""

    family: Family
    curve: Curve | None  # None: D = 1
    workload: Workload
    objective: str
    weights: FloatArray  # of the steps' squared errors
    costs: Costs

    def starts(self) -> list[FloatArray]:
        """Members to begin with when no better are known."""
        curve = np.zeros(0) if self.curve is None else self.curve.start()
        return [np.append(x, curve) for x in self.family.starts()]

    def afresh(self, x: FloatArray) -> list[FloatArray]:
        """x, and its scales with other T: a descent may have lost poles or coefficients for good."""
        _, z = self._split(x)
        return [x, *(np.append(T, z) for T in self.family.starts()[::_EVERY])]

    def unknowns(self, strategy: Strategy) -> FloatArray:
        """The x of a strategy, or of the member nearest to it in kind."""
        x = self.family.unknowns(unscaled(strategy))
        scales = strategy.scales if isinstance(strategy, Scaled) else None
        return x if self.curve is None else np.append(x, self.curve.nearest(scales))

    def strategy(self, x: FloatArray) -> Strategy:
        """The member with these unknowns."""
        T = self.family.strategy(self._split(x)[0])
        return T if self.curve is None else Scaled(T, self.parts(x)[1])

    def parts(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The first column of T, and the diagonal of D."""
        x, z = self._split(x)
        return self.family.coefficients(x), np.exp(self._log_scales(z))

    def pull_back(self, x: FloatArray, by_c: FloatArray, by_log_d: FloatArray) -> FloatArray:
        """d/dx from the derivatives by both parts."""
        x, z = self._split(x)
        by_x = self.family.pull_back(x, by_c)
        return by_x if self.curve is None else np.append(by_x, self.curve.pull_back(z, by_log_d))

    def squared_error(self, x: FloatArray) -> tuple[float, FloatArray]:
        """The weighted squared error of one unit of noise, and its gradient."""
        x, z = self._split(x)
        found = self.family.squared_error(x, self.costs, np.exp(-self._log_scales(z)))
        if self.curve is None:
            return found.value, found.by_x
        return found.value, np.append(found.by_x, self.curve.pull_back(z, -found.by_log_gains))

    def objective_error(self, x: FloatArray) -> float:
        """The squared error that the objective asks for."""
        return float(self._errors(x).max()) if self.objective == "max" else self.squared_error(x)[0]

    def reweighted(self, x: FloatArray) -> Members:
        """For the largest error: with more weight on the steps that have more of it at x."""
        errors = self._errors(x)
        weights = self.weights * (errors / errors.max()) ** _PUSH
        return replace(self, weights=weights / weights.sum(), costs=costs_of(self.workload, weights / weights.sum()))

    def _errors(self, x: FloatArray) -> FloatArray:
        return per_step_error(self.strategy(x), workload=self.workload)

    def _split(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        count = len(x) - (0 if self.curve is None else self.curve.unknowns)
        return x[:count], x[count:]

    def _log_scales(self, z: FloatArray) -> FloatArray:
        return np.zeros(self.workload.steps) if self.curve is None else self.curve.log_scales(z)


def members(family: str, size: int, workload: Workload, objective: str, scaled: bool) -> Members:
    """The strategies of a family, with scales or without."""
    n, objective = workload.steps, _check.choice("objective", objective, OBJECTIVES)
    named = family_named(family, size, n)
    last = np.eye(1, n, n - 1)[0]
    weights = {"mean": np.full(n, 1 / n), "last": last, "max": (last + 1 / n) / 2}[objective]
    costs = costs_of(workload, weights)
    curve = Curve(np.sqrt(costs.diagonal)) if scaled else None
    return Members(named, curve, workload, objective, weights, costs)


def usable(*squares: float) -> bool:
    """Whether these are squares of something: far out, differences of poles cancel and series overflow."""
    return all(0 < square < math.inf for square in squares)
