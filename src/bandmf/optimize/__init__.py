"""Optimizers: which strategy of a family has the least error, and how that is known."""

from bandmf.optimize.banded import banded, parameterized
from bandmf.optimize.banded_inverse import banded_inverse
from bandmf.optimize.bins.search import BinsSolution, optimize_for_bins
from bandmf.optimize.buffered import buffered_toeplitz
from bandmf.optimize.dense import dense
from bandmf.optimize.descent import Outcome
from bandmf.optimize.federated import averaged_banded_toeplitz, robust_banded_toeplitz
from bandmf.optimize.horizon import horizon
from bandmf.optimize.one_parameter import inverse_plus_constant, lti
from bandmf.optimize.solution import Solution
from bandmf.optimize.toeplitz import banded_toeplitz, stretch

__all__ = [
    "BinsSolution",
    "Outcome",
    "Solution",
    "averaged_banded_toeplitz",
    "banded",
    "banded_inverse",
    "banded_toeplitz",
    "buffered_toeplitz",
    "dense",
    "horizon",
    "inverse_plus_constant",
    "lti",
    "optimize_for_bins",
    "parameterized",
    "robust_banded_toeplitz",
    "stretch",
]
