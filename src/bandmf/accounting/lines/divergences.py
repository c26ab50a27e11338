"""Samples of the two divergences on random lines, each with its proved bound. Each use of a seed has its own stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from bandmf._types import FloatArray
from bandmf.accounting.bins.half_space import HalfSpace, half_space
from bandmf.accounting.bins.loss import PrivacyLoss
from bandmf.accounting.lines.line import Lines, lines
from bandmf.accounting.lines.tilt import Tilt
from bandmf.accounting.samples import Draw

REMOVE, ADD, PILOT, ESTIMATE, POSTERIOR, CLOCK = range(6)  # streams; certificates use the first two alone


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws with a divergence as expectation, and the most that one can be."""

    draw: Draw
    bound: float


def removed(loss: PrivacyLoss, epsilon: float, tilt: Tilt) -> Samples:
    """Of the remove divergence."""
    through = lines(loss)
    return Samples(partial(tilt.sample, through, epsilon), tilt.bound(through, epsilon))


def added(loss: PrivacyLoss, epsilon: float) -> Samples | None:
    """Of the add divergence; None where there is no half space, whose normal is the direction of the lines.

    On no line is it above the bound without sampling: with p.r = 0, Gibbs' inequality is the same for all r.
    """
    side = half_space(loss, epsilon)
    if side is None:
        return None
    through = lines(loss, side.positions)
    nearer = HalfSpace(side.positions, side.steepness, side.distance - through.rounding(1) / side.steepness)
    return Samples(partial(_added, through, epsilon), nearer.deterministic_bound())


def _added(through: Lines, epsilon: float, generator: np.random.Generator, rows: int) -> FloatArray:
    return through.added(through.across(generator, rows) - through.spread / 2, epsilon, through.rounding(1))
