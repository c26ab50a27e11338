"""What is known of sigma from the Gram matrices where it was estimated, and the strategy that looks best from there.

At noise sigma the bins' likelihood ratio depends on K = G / sigma^2 alone, and the derivative of delta with respect
to K_ij is proportional to T_ij = E[pi_i pi_j | L = e^epsilon], pi being the posterior of an example's bin. So sigma^2,
as a function of G at fixed (epsilon, delta), has the gradient sigma_k^2 T_k / <T_k, G_k> at G_k, and since it scales
with G the tangent there is

    cut_k(G) = sigma_k^2 <T_k, G> / <T_k, G_k>.

The model is the largest cut. Were sigma^2 convex in G, it would never be above sigma^2; that is a heuristic, which
decides how good a strategy is found and never how private it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bandmf._types import FloatArray
from bandmf.optimize.bins.families import Family
from bandmf.optimize.bins.gram import Forms, LinearForm
from bandmf.optimize.descent import Descent, descend
from bandmf.optimize.objectives import p_norm

_SHARPNESS = (64.0, 4096.0, 65536.0)  # p-norms stand for the largest cut: the last is within 2e-5 of it
_TOLERANCE = 1e-9  # of the logarithm of the error
_MOST_ITERATIONS = 400
_SAME = 1e-6  # two descents that end this close have ended at the same point


@dataclass(frozen=True, eq=False)
class Cut:
    """G -> `scale` <T, G>: the tangent of sigma^2 at one Gram matrix."""

    form: LinearForm
    scale: float

    @staticmethod
    def at(c: FloatArray, sigma: float, T: FloatArray) -> Cut:
        """The tangent where the Toeplitz coefficients are c."""
        form = LinearForm.of(T)
        return Cut(form, sigma**2 / float(Forms([form], c).values[0]))


def _usable(*squares: float) -> bool:
    """Whether these are squares of something: far out, differences of poles cancel and series overflow."""
    return all(0 < square < math.inf for square in squares)


@dataclass(frozen=True, eq=False)
class Model:
    """log(error * sigma) of a family's members as the cuts see it."""

    family: Family
    cuts: list[Cut]

    def value(self, x: FloatArray) -> float:
        """With the largest cut itself."""
        error, largest = self.family.squared_error(x)[0], float(self._cut_values(x)[0].max())
        return 0.5 * math.log(error * largest) if _usable(error, largest) else math.inf

    def smooth(self, x: FloatArray, sharpness: float) -> tuple[float, FloatArray]:
        """With a p-norm in place of the largest cut, and the gradient."""
        error, error_slope = self.family.squared_error(x)
        values, forms = self._cut_values(x)
        if not _usable(error, *values):
            return math.inf, np.zeros_like(x)
        square, by_cut = p_norm(values, sharpness)
        slope = self.family.pull_back(x, forms.gradient(by_cut * self._scales))
        return 0.5 * (math.log(error) + math.log(square)), 0.5 * (error_slope / error + slope / square)

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

    @property
    def _scales(self) -> FloatArray:
        return np.array([cut.scale for cut in self.cuts])

    def _cut_values(self, x: FloatArray) -> tuple[FloatArray, Forms]:
        forms = Forms([cut.form for cut in self.cuts], self.family.coefficients(x))
        return self._scales * forms.values, forms
