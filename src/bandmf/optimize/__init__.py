"""Optimisers: which strategy of a family has the least error, and how that is known."""

from bandmf.optimize.banded import banded, parameterized
from bandmf.optimize.dense import dense
from bandmf.optimize.gradient_free import inverse_plus_constant
from bandmf.optimize.horizon import horizon
from bandmf.optimize.solution import Solution
from bandmf.optimize.toeplitz import banded_toeplitz

__all__ = [
    "Solution",
    "banded",
    "banded_toeplitz",
    "dense",
    "horizon",
    "inverse_plus_constant",
    "parameterized",
]
