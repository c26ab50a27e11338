"""Privacy events: what the accountant must know of a mechanism. Sampler, plan and accountant share this one type.

A *round* adds noise N(0, sigma^2) to a sum to which the example in question, when it is sampled, contributes
at most 1. An event is so many rounds that sample alike; where step scales make some of them weigh less, its levels say
what the example contributes to which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import special

from bandmf import _check
from bandmf._types import FloatArray, IntArray

Levels = tuple[tuple[float, int], ...]  # (most that the example contributes, rounds of it)
ADJACENCIES = ("add-remove", "zero-out", "replace")
MIN_EPSILON, MAX_EPSILON = 1e-3, 200.0
MAX_ROUNDS = 10**8
MOST_LEVELS = 32
_MOST_VALUES = 512  # among which levels are chosen
_DIGITS = 2.0**20  # of levels: what is alike but for rounding is equal
MIN_DELTA = 1e-13  # the accountant cuts tails of mass 1e-15 and books them as certain disclosure


@dataclass(frozen=True)
class Event:
    """Rounds that sample each of `examples` examples with `sampling_probability`; 1 means no sampling.

    `max_batch_size` caps a batch; what the cap costs depends on `examples`, how many a round samples *from*,
    the example in question included. Both are None when no sample can be larger.
    `levels`, in order of time, are pairs of the most that the example contributes to a round, and how many rounds that
    holds for; None for 1 in all of them.

    >>> Event(0.1, rounds=8).after(3)
    Event(sampling_probability=0.1, rounds=3, adjacency='add-remove', max_batch_size=None, examples=None, levels=None)
    >>> Event(0.1, rounds=8, levels=((1.0, 2), (0.5, 6))).after(3).levels
    ((1.0, 2), (0.5, 1))
    """

    sampling_probability: float
    rounds: int
    adjacency: str = "add-remove"
    max_batch_size: int | None = None
    examples: int | None = None
    levels: Levels | None = None

    def __post_init__(self) -> None:
        q = _check.real(
            "sampling_probability",
            self.sampling_probability,
            0,
            1,
            open_low=True,
            remedy="it is bands * batch_size / examples, or 1 for no sampling",
        )
        rounds = _check.whole("rounds", self.rounds, 1, MAX_ROUNDS, remedy="use more bands: fewer rounds")
        _check.choice("adjacency", self.adjacency, ADJACENCIES)
        cap, examples = self.max_batch_size, self.examples
        if cap is not None:
            cap = _check.whole("max_batch_size", cap)
            needed = "max_batch_size needs the number of examples that a round samples from"
            examples = _check.whole("examples", examples, remedy=needed)
        if cap is None or examples is None or cap >= examples:
            cap = examples = None
        levels = _checked_levels(self.levels, rounds)
        checked = {
            "sampling_probability": q, "rounds": rounds, "max_batch_size": cap, "examples": examples, "levels": levels
        }  # fmt: skip
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def after(self, rounds: int) -> Event:
        """The first `rounds` rounds of it."""
        if self.levels is None:
            return replace(self, rounds=rounds)
        ends = np.cumsum([count for _, count in self.levels])
        left = np.minimum([count for _, count in self.levels], np.maximum(rounds - np.append(0, ends[:-1]), 0))
        levels = tuple((level, int(count)) for (level, _), count in zip(self.levels, left, strict=True) if count)
        return replace(self, rounds=rounds, levels=levels)

    @property
    def of_sampling(self) -> Event:
        """What a sampler knows of it: all but the levels, which are the strategy's."""
        return replace(self, levels=None)

    @cached_property
    def kinds(self) -> Levels:
        """Levels with the number of their rounds, whenever they are, largest first."""
        counts: dict[float, int] = {}
        for level, count in self.levels or ((1.0, self.rounds),):
            counts[level] = counts.get(level, 0) + count
        return tuple(sorted(counts.items(), reverse=True))

    @property
    def weight(self) -> float:
        """The sum of squared contributions: the rounds that the event is worth without sampling."""
        return sum(count * level**2 for level, count in self.kinds)

    @property
    def unsampled(self) -> bool:
        """Plain Gaussian releases: together they are one with noise sigma / sqrt(weight)."""
        return self.sampling_probability == 1 and self.max_batch_size is None

    @property
    def compositions(self) -> int:
        """Rounds that have to be composed numerically."""
        return 1 if self.unsampled else self.rounds

    @property
    def truncation(self) -> tuple[float, float]:
        """dp_accounting's model of a cap M on samples from N examples: the probability that it bites when the
        example is sampled, and the probability that the example is in the batch given that it bites.
        """
        q, N, M = self.sampling_probability, self.examples, self.max_batch_size
        if N is None or M is None:
            return 0.0, q
        bites = float(special.bdtrc(M - 1, N - 1, q))
        return bites, float(special.bdtrc(M, N, q)) * M / N / bites if bites else q


def _checked_levels(given: object, rounds: int) -> Levels | None:
    """Levels that add up to the rounds, neighbors that are alike as one; None where all are 1."""
    if given is None:
        return None
    found: list[tuple[float, int]] = []
    for level, count in given:  # type: ignore[attr-defined]
        level = _check.real("level", level, 0, 1, open_low=True)
        count = _check.whole("rounds of a level", count)
        if found and found[-1][0] == level:
            count += found.pop()[1]
        found.append((level, count))
    if sum(count for _, count in found) != rounds:
        raise _check.fail("levels", given, f"must add up to rounds={rounds}")
    return None if {level for level, _ in found} == {1.0} else tuple(found)


def levels_of(norms: FloatArray, bands: int, most: int = MOST_LEVELS) -> Levels | None:
    """The levels of a banded strategy with these column norms under cyclic Poisson sampling, over the largest norm.

    Guarantees: they dominate what every example contributes. In its i-th turn, one of the steps i b ... i b + b - 1,
    an example of any part contributes at most the largest norm R_i of these columns, since columns b apart share no
    row. A round of contribution r <= R is a round of contribution R whose output was multiplied by r / R and got noise
    of variance sigma^2 (1 - (r / R)^2): post-processing. So every part, and adaptively chosen gradients, are dominated
    by the composition with R_i in turn i, and that by the one with every R_i rounded up to a level. For norms that fall
    over time, R_i are those of the first part, and nothing is given away.

    Of all ways to round up to at most `most` levels it takes the one of least weight (the sum of squares).

    >>> levels_of(np.array([4.0, 4.0, 2.0, 1.9, 1.0, 1.0]), bands=2, most=2)
    ((1.0, 1), (0.5, 2))
    """
    turns = -(-len(norms) // bands)
    largest = np.pad(norms, (0, turns * bands - len(norms))).reshape(turns, bands).max(axis=1)
    relative = np.minimum(np.ceil(largest / largest.max() * _DIGITS) / _DIGITS, 1.0)
    values, counts = np.unique(relative, return_counts=True)
    allowed = values[_best_levels(values, counts, most)]
    rounded = allowed[np.searchsorted(allowed, relative)]
    return _checked_levels([(float(level), 1) for level in rounded], turns)


def _best_levels(values: FloatArray, counts: IntArray, most: int) -> list[int]:
    """Places of the levels, the last among them, for which values rounded up have the least sum of squares."""
    if len(values) > _MOST_VALUES:  # as well as these few show it
        few = np.unique(np.linspace(0, len(values) - 1, _MOST_VALUES).round().astype(int))
        between = np.diff(np.append(0, np.cumsum(counts)[few]))
        return [int(few[place]) for place in _best_levels(values[few], between, most)]
    ends = np.append(0, np.cumsum(counts))
    # cost[i, j]: of the values i ... j at level j, infinite where i > j; best[j]: of all up to j, the last level j.
    cost = np.where(np.tri(len(values), dtype=bool).T, (ends[1:] - ends[:-1, None]) * values**2, np.inf)
    best, before = cost[0], []
    for _ in range(min(most, len(values)) - 1):
        total = best[:-1, None] + cost[1:]  # the level before at i - 1
        before.append(np.append(-1, total.argmin(axis=0)[1:]))
        best = np.append(best[0], total.min(axis=0)[1:])
    places = [len(values) - 1]
    for earlier in reversed(before):
        if places[-1] > 0:
            places.append(int(earlier[places[-1]]))
    return sorted(places)


def one_release(adjacency: str) -> Event:
    """A single Gaussian release without sampling: what an unamplified run is."""
    return Event(1.0, 1, adjacency)


def sampling_probability(bands: int, batch_size: float, examples: int) -> float:
    """bands * batch_size / examples, at most one."""
    return min(1.0, bands * batch_size / examples)


def capped(event: Event, max_batch_size: int | None, sizes: Iterable[int]) -> tuple[Event, ...]:
    """The events of rounds that cut a batch to `max_batch_size`, for parts of these sizes; the worst one counts.

    Under add-remove the neighbor of a part may hold one example less or one more. The larger of two neighbors
    decides what the cap costs: the part itself, or the part with one example more.
    """
    if max_batch_size is None:
        return (event,)
    more = (0, 1) if event.adjacency == "add-remove" else (0,)
    larger = sorted({size + extra for size in sizes for extra in more})
    events = (replace(event, max_batch_size=max_batch_size, examples=size) for size in larger)
    return tuple(dict.fromkeys(events))


def cyclic_poisson(
    steps: int,
    bands: int,
    batch_size: float,
    examples: int,
    adjacency: str,
    max_batch_size: int | None,
    levels: Levels | None = None,
) -> tuple[Event, ...]:
    """The events of cyclic Poisson sampling with this many bands; the worst one counts. `levels` as of `levels_of`.

    There is more than one only with a cap on the batch, whose cost depends on the size of the parts.
    """
    probability = sampling_probability(bands, batch_size, examples)
    event = Event(probability, -(-steps // bands), adjacency, levels=levels)
    if max_batch_size is not None and bands > 1 and adjacency == "add-remove":
        raise _check.fail(
            "max_batch_size",
            max_batch_size,
            "with several bands, needs parts of known size, which adjacency='add-remove' does not have",
            "use adjacency='zero-out', or bands=1",
        )
    return capped(event, max_batch_size, {examples // bands, -(-examples // bands)})


def checked_delta(delta: float, event: Event) -> float:
    """`delta`, if the accountant can certify it for this event."""
    delta = _check.real("delta", delta, 0, 1, open_low=True, open_high=True)
    least = max(MIN_DELTA, event.compositions * 2.0**-51)
    if delta < least:
        raise _check.fail(
            "delta",
            delta,
            f"must be at least {least:.2g}, the least that the accountant can certify for rounds={event.rounds}",
            "raise delta, or use more bands: fewer rounds",
        )
    return delta


def usable_delta(event: Event, delta: float) -> float:
    """Delta less what rounding in the accountant can hide (measured: up to 0.8 of this, in 400 cases)."""
    return delta - event.compositions * 2.0**-52


def scatter(event: Event, delta: float) -> float:
    """How far rounding moves epsilon, relatively: some hundredths of what it does to delta."""
    return 0.05 * (1 - usable_delta(event, delta) / delta)
