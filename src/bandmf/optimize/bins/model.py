"""What is known of sigma from the tables where it was estimated, and the strategy that looks best from there.

The likelihood ratio of a law depends on a table G of products of columns (laws.py), over sigma^2, and the derivative
of delta with respect to G is proportional to the posterior T of pairs of participations. So sigma^2, as a function of G
at fixed (epsilon, delta), has the gradient sigma_k^2 T_k / <T_k, G_k> at G_k, and since it scales with G the tangent
there is

    cut_k(G) = sigma_k^2 <T_k, G> / <T_k, G_k>.

The model is the largest cut. Were sigma^2 convex in G, it would never be above sigma^2; that is a heuristic, which
decides how good a strategy is found and never how private it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray
from bandmf.optimize.bins.laws import Law, Table
from bandmf.optimize.bins.members import Members, usable
from bandmf.optimize.descent import Descent, descend
from bandmf.optimize.objectives import p_norm

_SHARPNESS = (64.0, 4096.0)  # p-norms stand for the largest cut: the last is within 3e-4 of its root
_TOLERANCE = 1e-7  # of the logarithm of the error
_MOST_ITERATIONS = 200
_PULL = 0.3  # of the loss, for a step of log d by one
_SAME = 1e-6  # two descents that end this close have ended at the same point


@dataclass(frozen=True, eq=False)
class Cut:
    """Table -> `scale` sum T table: the tangent of sigma^2 at one of them."""

    T: FloatArray
    scale: float

    @staticmethod
    def at(products: Table, sigma: float, T: FloatArray) -> Cut:
        """The tangent where the products of the columns are these."""
        return Cut(T, sigma**2 / float(np.vdot(T, products.table)))


@dataclass(frozen=True, eq=False)
class Model:
    """log(error * sigma) of the members as the cuts see it."""

    members: Members
    law: Law
    cuts: list[Cut]
    near: FloatArray | None = None  # log d that descents stay near: few cuts know little of scales far away

    def value(self, x: FloatArray) -> float:
        """With the largest cut itself."""
        with np.errstate(all="ignore"):
            error, largest = self.members.squared_error(x)[0], float(self._cut_values(x)[0].max())
        return 0.5 * math.log(error * largest) if usable(error, largest) else math.inf

    def smooth(self, x: FloatArray, sharpness: float) -> tuple[float, FloatArray]:
        """With a p-norm in place of the largest cut, and the gradient."""
        error, error_slope = self.members.squared_error(x)
        values, products = self._cut_values(x)
        if not usable(error, *values):
            return math.inf, np.zeros_like(x)
        square, by_cut = p_norm(values, sharpness)
        T = sum((w * cut.scale * cut.T for w, cut in zip(by_cut, self.cuts, strict=True)), np.zeros(1))
        by_c, by_log_d = products.gradient(T)
        loss, by_log_d = 0.5 * (math.log(error) + math.log(square)), by_log_d / square
        if self.near is not None:
            away = np.log(products.d) - self.near
            pull = _PULL / len(self.cuts) ** 2 / len(away)
            loss, by_log_d = loss + pull * float(away @ away), by_log_d + 4 * pull * away
        return loss, 0.5 * (error_slope / error + self.members.pull_back(x, by_c / square, by_log_d))

    def minimize(self, starts: list[FloatArray]) -> list[Descent]:
        """The points that descents from these starts reach, lowest first, each once; their loss is `value`."""
        found = [self._descend(start) for start in starts if math.isfinite(self.value(start))]
        found.sort(key=lambda descent: descent.loss)
        distinct = found[:1]
        for descent in found[1:]:
            if descent.loss > distinct[-1].loss + _SAME:
                distinct.append(descent)
        return distinct

    def _descend(self, start: FloatArray) -> Descent:
        x, iterations = start, 0
        for sharpness in _SHARPNESS if len(self.cuts) > 1 else _SHARPNESS[-1:]:
            descent = descend(
                lambda y, sharpness=sharpness: self.smooth(y, sharpness),  # type: ignore[misc]
                x,
                max_iterations=_MOST_ITERATIONS,
                tolerance=_TOLERANCE,
                memory=20,
            )
            x, iterations = descent.x, iterations + descent.iterations
        return Descent(x, self.value(x), iterations, descent.outcome, descent.detail)

    def _cut_values(self, x: FloatArray) -> tuple[FloatArray, Table]:
        products = self.law.products(*self.members.parts(x))
        return np.array([cut.scale * float(np.vdot(cut.T, products.table)) for cut in self.cuts]), products
