"""A candidate: one mechanism that a plan could be made of, with its noise, error and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bandmf import _check
from bandmf._text import counted
from bandmf.accounting.verified import REDRAWN
from bandmf.strategies import Banded, BandedInverse, BandedToeplitz, BufferedToeplitz, Dense, Strategy
from bandmf.strategies.scaled import unscaled

_FAMILIES: dict[type[Strategy], str] = {
    BandedInverse: "banded-inverse",
    BufferedToeplitz: "blt",
    BandedToeplitz: "banded",
    Banded: "banded",
    Dense: "dense",
}


class Candidate(NamedTuple):
    """Its noise multiplier and error, and the memory of its noise on each device, if it fits.

    `bands` are those of C; for a "banded-inverse" those of C^-1, and for a "blt" its buffers. For balls-in-bins the
    noise multiplier of a candidate that was not chosen is an estimate.
    """

    bands: int
    noise_multiplier: float
    rmse: float
    memory: float | None
    sampling: str = "cyclic-poisson"
    mechanism: str = "banded"
    vectors: int | None = None  # of the model's size, kept by its noise; None where they do not fit
    scaled: bool = False  # by a public number for each step

    @property
    def name(self) -> str:
        """For people: "BLT(4) in bins", "32 bands"."""
        buffered = {"blt": f"BLT({self.bands})", "banded-inverse": f"inverse({self.bands})"}
        what = buffered.get(self.mechanism, counted(self.bands, "band"))
        scaled = " with step scales" if self.scaled else ""
        where = {"balls-in-bins": " in bins", REDRAWN: " in redrawn bins", "b-min-sep": ", b-min-sep"}.get(
            self.sampling, ""
        )
        return what + scaled + where


Progress = Callable[[Candidate | str], None]  # is told of every candidate, and in words of what takes long


def mechanism_of(strategy: Strategy) -> str:
    """The family of a strategy, as `bandmf.plan(mechanism=...)` calls it."""
    family = unscaled(strategy)
    return next((name for kind, name in _FAMILIES.items() if isinstance(family, kind)), "other")


def size_of(strategy: Strategy) -> int:
    """What a candidate has in `bands`."""
    strategy = unscaled(strategy)
    if isinstance(strategy, BandedInverse):
        return len(strategy.inverse_coefficients)
    return strategy.buffers if isinstance(strategy, BufferedToeplitz) else strategy.bands


def checked_candidate(given: Candidate) -> Candidate:
    """The candidate, if its entries are what their names say."""
    try:
        found = Candidate(*given)
    except TypeError:
        raise _check.fail("candidates", given, f"must be ({', '.join(Candidate._fields)})") from None
    return Candidate(
        _check.whole("candidate.bands", found.bands),
        _check.real("candidate.noise_multiplier", found.noise_multiplier, 0, open_low=True),
        _check.real("candidate.rmse", found.rmse, 0),
        None if found.memory is None else _check.real("candidate.memory", found.memory, 0),
        str(found.sampling),
        str(found.mechanism),
        None if found.vectors is None else _check.whole("candidate.vectors", found.vectors, 0),
        _check.choice("candidate.scaled", found.scaled, (False, True)),
    )
