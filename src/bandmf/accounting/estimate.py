"""The fast estimate: epsilon by our own composition, and the grid that suits the accountant."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import fft

from bandmf._types import FloatArray
from bandmf.accounting.events import MAX_EPSILON, Event, scatter, usable_delta

DEFAULT_INTERVAL = 1e-4  # dp_accounting's own value_discretization_interval
INTERVALS = tuple(float(f"{digit}e{exponent}") for exponent in range(0, -10, -1) for digit in (5, 2, 1))
TIGHT = 1e-4  # relative excess of epsilon that is spent to make the accountant fast
LOOSE = 1e-2  # beyond this excess the accountant's default grid is refined


class _Losses(NamedTuple):
    """A privacy loss distribution: values, and how much mass lies on each."""

    values: FloatArray
    masses: FloatArray


Kinds = list[tuple[_Losses, int]]  # of rounds, and how many there are of each


def round_losses(event: Event, sigma: float) -> Kinds:
    """The privacy loss of one round of each kind, for a fine grid of noise values (spectrally accurate)."""
    if event.unsampled:
        return [(_mixture_losses(sigma / math.sqrt(event.weight), 1.0, event.adjacency == "replace"), 1)]
    return [(_sampled_losses(event, sigma / level), count) for level, count in event.kinds]


def _sampled_losses(event: Event, sigma: float) -> _Losses:
    bites, q_then = event.truncation
    usual = _mixture_losses(sigma, event.sampling_probability, event.adjacency == "replace")
    if not bites:
        return usual
    swapped = _mixture_losses(sigma / 2, q_then, replace=True)
    values = np.concatenate([usual.values, swapped.values])
    masses = np.concatenate([usual.masses * (1 - bites), swapped.masses * bites])
    return _Losses(values[masses > 0], masses[masses > 0])


def _mixture_losses(sigma: float, q: float, replace: bool) -> _Losses:
    """(1-q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2), or against its own mirror image."""
    x = np.arange(-10, 10 + 1 / sigma, 0.02)  # in units of sigma
    shift = 1 / (2 * sigma**2)
    outside = math.log1p(-q) if q < 1 else -math.inf
    values = np.logaddexp(outside, math.log(q) + x / sigma - shift)
    masses = np.exp(values - x**2 / 2)
    if replace:
        values = values - np.logaddexp(outside, math.log(q) - x / sigma - shift)
    return _Losses(values[masses > 0], masses[masses > 0] / masses.sum())


def _estimate(kinds: Kinds, delta: float, interval: float) -> float:
    """Epsilon of all rounds together on a grid of privacy losses, pessimistic as the accountant's own.

    "Connect the dots": a loss between two grid points is split between them so that the mass under either
    distribution is kept. Up to rounding this is what dp_accounting does, for one of its two directions.
    """
    grids = [(_on_grid(losses, interval), rounds) for losses, rounds in kinds]
    low, high = (math.floor(bound) for bound in _bounds(grids, delta))
    size = fft.next_fast_len(high - low + 2, real=True)
    spectrum = np.ones(size // 2 + 1, complex)
    for grid, rounds in grids:
        spectrum *= fft.rfft(np.bincount(grid.values.astype(np.int64) % size, grid.masses, size)) ** rounds
    composed = fft.irfft(spectrum, size)
    places = np.arange(low + size - 1, low - 1, -1)
    masses, values = composed[places % size], places * interval
    # delta(e) = sum over losses v > e of mass (1 - exp(e - v)); the first place from above that exceeds delta
    above, weighed = np.cumsum(masses), np.cumsum(masses * np.exp(-np.maximum(values, -700)))
    exceeds = above - np.exp(np.minimum(values, 700)) * weighed > delta
    i = int(np.argmax(exceeds))
    if i == 0 or values[i - 1] <= 0:
        return 0.0
    return max(0.0, math.log((above[i - 1] - delta) / weighed[i - 1])) if above[i - 1] > delta else values[i]


def _on_grid(losses: _Losses, interval: float) -> _Losses:
    """A loss between two grid points in parts on both of them, so that the mass under either distribution is kept."""
    below = np.floor(losses.values / interval)
    rest = losses.values - below * interval
    share = np.expm1(rest) / (np.expm1(rest) - np.expm1(rest - interval))
    return _Losses(
        np.concatenate([below, below + 1]), np.concatenate([losses.masses * (1 - share), losses.masses * share])
    )


def _bounds(kinds: Kinds, delta: float) -> tuple[float, float]:
    """Where all but delta / 1000 of the sum of all losses lies, by Chernoff's bound."""
    squares = [rounds * float(np.average(losses.values**2, weights=losses.masses)) for losses, rounds in kinds]
    orders = np.geomspace(1e-2, 1e2, 40) / max(math.sqrt(sum(squares)), 1e-300)
    bounds = []
    for sign in (-1, 1):
        moments, most = np.zeros_like(orders), 0.0
        for losses, rounds in kinds:
            values = sign * losses.values
            largest = float(values.max())
            moments += rounds * (np.log(losses.masses @ np.exp(np.outer(values - largest, orders))) + orders * largest)
            most += rounds * largest
        bounds.append(min(float(np.min((moments + math.log(1e3 / delta)) / orders)), most))
    return -bounds[0], bounds[1]


def interval(event: Event, delta: float, kinds: Kinds, tolerance: float = TIGHT) -> float | None:
    """The coarsest grid for the accountant that exceeds epsilon by about `tolerance`; None beyond 200.

    The excess falls at least linearly with the interval, so two estimates tell it. Where a fine grid is cheap
    a tenth of the tolerance is demanded, where it is expensive up to five times as much granted. All intervals
    down to the default are multiples of it: a coarser grid can then only report more.
    """
    rounds, blur = event.compositions, scatter(event, delta)
    delta = usable_delta(event, delta)
    low, high = _bounds(kinds, delta)
    if high > 3 * MAX_EPSILON:
        return None
    span = widest(kinds)
    width = span + (high - low) / 10  # what the accountant's time is proportional to
    estimate: Callable[[float], float] = partial(_estimate, kinds, delta)
    candidates = [d for d in INTERVALS if d <= max((high - low) / 500, 2 * DEFAULT_INTERVAL)]
    excessive = estimate(candidates[0])
    for interval, finer in pairwise(candidates):
        value = estimate(finer)
        price = min(max((len(kinds) * width / finer / 40_000) ** 2, 0.1), 5.0)  # a point costs 10 to 20 microseconds
        tolerated = tolerance * price + blur
        if excessive - value <= tolerated / 2 * value:
            return interval if value <= MAX_EPSILON else None
        if finer <= DEFAULT_INTERVAL:
            # The excess falls linearly to quadratically: it is the difference, or a third of it.
            enough = finer == DEFAULT_INTERVAL and excessive - value <= 3 * LOOSE * value
            # Clipped rounding errors of the accountant's second differences grow as 1 / interval^2.
            blurred = rounds * 1e-17 * span / (finer / 2) ** 2 > LOOSE
            if enough or blurred or width > 50_000 * finer:
                return finer if value <= MAX_EPSILON else None
        excessive = value
    return candidates[-1]


def widest(kinds: Kinds) -> float:
    """The widest range of losses of any round."""
    return max(float(np.ptp(losses.values)) for losses, _ in kinds)


def hopeless(event: Event, sigma: float) -> bool:
    """Whether one sampled round loses far more than 200: not worth the memory to say how much."""
    return sigma < 0.02 * (math.sqrt(event.weight) if event.unsampled else event.kinds[0][0])


def rough(event: Event, delta: float, interval: float, sigma: float) -> float:
    """The estimate on a given grid."""
    if hopeless(event, sigma):
        return math.inf
    kinds, delta = round_losses(event, sigma), usable_delta(event, delta)
    if _bounds(kinds, delta)[1] > 3 * MAX_EPSILON:
        return math.inf
    return _estimate(kinds, delta, interval)
