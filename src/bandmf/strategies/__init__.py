"""Strategies C: which noise is correlated with which. One family per file."""

from bandmf.strategies.banded import Banded
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence, Strategy
from bandmf.strategies.dense import Dense
from bandmf.strategies.files import load, save
from bandmf.strategies.toeplitz import BandedToeplitz, Identity

__all__ = [
    "Banded",
    "BandedToeplitz",
    "BufferRecurrence",
    "Dense",
    "Identity",
    "InputRecurrence",
    "OutputRecurrence",
    "Strategy",
    "load",
    "save",
]
