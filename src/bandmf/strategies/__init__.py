"""Strategies C: which noise is correlated with which. One family per file."""

from bandmf.strategies.banded import Banded
from bandmf.strategies.banded_inverse import BandedInverse, banded_inverse_square_root, lambda_cgd
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence, ScaledRecurrence, Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.dense import Dense
from bandmf.strategies.files import load, save
from bandmf.strategies.scaled import Scaled
from bandmf.strategies.square_root import banded_square_root, lti, square_root
from bandmf.strategies.stamping import Stamped, stamping
from bandmf.strategies.toeplitz import BandedToeplitz, Identity
from bandmf.strategies.tree import OnlineTree, tree_aggregation, tree_encoder

__all__ = [
    "Banded",
    "BandedInverse",
    "BandedToeplitz",
    "BufferRecurrence",
    "BufferedToeplitz",
    "Dense",
    "Identity",
    "InputRecurrence",
    "OnlineTree",
    "OutputRecurrence",
    "Scaled",
    "ScaledRecurrence",
    "Stamped",
    "Strategy",
    "banded_inverse_square_root",
    "banded_square_root",
    "lambda_cgd",
    "load",
    "lti",
    "save",
    "square_root",
    "stamping",
    "tree_aggregation",
    "tree_encoder",
]
