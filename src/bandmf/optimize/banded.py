"""The best general banded strategy, with a proof of how good it is.

Every entry of the band is free; the columns are scaled to norm one (the paper's parameterisation), so the
sensitivity is one and the loss is the error alone. Loss and gradient cost O(n b^2) (covariance.py). The same
loss serves a user's own family of strategies: any function from parameters to band entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bandmf import _check, workloads
from bandmf._check import FloatArray
from bandmf.covariance import BandCovariance, banded_product, banded_product_adjoint
from bandmf.error import per_step_error
from bandmf.optimize.certificate import optimality_gap
from bandmf.optimize.horizon import horizon_columns
from bandmf.optimize.objectives import Objective, parse
from bandmf.optimize.solution import Clock, Descent, Solution, Watcher, descend
from bandmf.optimize.toeplitz import square_root_coefficients
from bandmf.strategies import Banded, BandedToeplitz
from bandmf.workloads import Workload


class NormalizedLoss:
    """log of the objective of the column-normalised band, and its gradient."""

    def __init__(self, workload: Workload) -> None:
        if workload.inverse_columns is None:
            raise ValueError(
                f"workload={workload.name!r}: its inverse is not banded, so a banded strategy cannot be "
                "optimised for it at scale; use optimize.dense for up to a few thousand steps"
            )
        self.inverse = workload.inverse_columns(0, workload.steps)

    def __call__(self, entries: FloatArray, objective: Objective) -> tuple[float, FloatArray]:
        """At any band entries with zeros past the end; scaling a column changes nothing."""
        norms = np.linalg.norm(entries, axis=1, keepdims=True)
        C = entries / norms
        covariance = BandCovariance(banded_product(C, self.inverse))
        value, weights = objective.smooth(covariance.errors)
        d_product, _ = covariance.gradient(weights)
        d_C = banded_product_adjoint(d_product, self.inverse, entries.shape[1])
        d_entries = (d_C - C * np.sum(C * d_C, axis=1, keepdims=True)) / norms
        return math.log(value), d_entries / value
