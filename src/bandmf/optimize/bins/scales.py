"""Step scales d of C = T D by a few free unknowns: a power of what noise at each step costs, and a smooth curve.

    log d_t = p log(a_t + exp(q)) + sum_{j=1..J} z_j P_j(2 t / (n-1) - 1),    unknowns (p, q, z),

a_t being the norm of the workload's column t over the largest, and P_j the Legendre polynomials. exp(q) is a floor:
the last steps of a schedule that ends at zero keep a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.polynomial.legendre import legvander

from bandmf._types import FloatArray

_SHAPES = 3  # polynomials
_POWER, _FLOOR = 0.3, 0.02  # where to begin
_WIDEST = 12.0  # of log d: beyond, a step is as good as left out


@dataclass(frozen=True, eq=False)
class Curve:
    """Scales that follow the column norms of a workload."""

    norms: FloatArray  # any multiple of a
    shapes: int = _SHAPES

    @property
    def unknowns(self) -> int:
        """How many there are."""
        return 2 + self.shapes

    def start(self) -> FloatArray:
        """Unknowns to begin with."""
        return np.array([_POWER, np.log(_FLOOR), *np.zeros(self.shapes)])

    def nearest(self, scales: FloatArray | None) -> FloatArray:
        """Unknowns whose scales are about these: all polynomials fitted, after the usual floor."""
        z = self.start()
        if scales is None:
            z[0] = 0.0
            return z
        logs = np.log(scales) - np.log(scales).mean()
        terms = np.column_stack([self._log_norms(z), self._polynomials])
        found = np.linalg.lstsq(
            terms - terms.mean(axis=0), _WIDEST * np.arctanh(np.clip(logs / _WIDEST, -0.999, 0.999))
        )[0]
        return np.array([found[0], z[1], *found[1:]])

    def log_scales(self, z: FloatArray) -> FloatArray:
        """log d, of mean zero."""
        logs = z[0] * self._log_norms(z) + self._polynomials @ z[2:]
        return _bounded(logs - logs.mean())

    def pull_back(self, z: FloatArray, slope: FloatArray) -> FloatArray:
        """d/dz from d/d log d."""
        logs = z[0] * self._log_norms(z) + self._polynomials @ z[2:]
        slope = slope / np.cosh((logs - logs.mean()) / _WIDEST) ** 2
        slope = slope - slope.mean()
        share = np.exp(z[1]) / (self._relative + np.exp(z[1]))
        return np.array([slope @ self._log_norms(z), z[0] * (slope @ share), *(slope @ self._polynomials)])

    def _log_norms(self, z: FloatArray) -> FloatArray:
        return np.log(self._relative + np.exp(z[1]))

    @cached_property
    def _relative(self) -> FloatArray:
        return self.norms / self.norms.max()

    @cached_property
    def _polynomials(self) -> FloatArray:
        n = len(self.norms)
        return np.asarray(legvander(np.linspace(-1, 1, n), self.shapes)[:, 1:], dtype=np.float64)


def _bounded(logs: FloatArray) -> FloatArray:
    return _WIDEST * np.tanh(logs / _WIDEST)
