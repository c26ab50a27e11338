"""Who may take part when: the participation pattern under which sensitivity is measured.

A *pattern* is the set of steps in which one example (or user) contributes. The sensitivity of a strategy is
the largest effect that one example can have over all permitted patterns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from bandmf import _check


class Spacing(NamedTuple):
    """How often an example can take part, and the fewest steps between two of its participations."""

    participations: int
    separation: int


@dataclass(frozen=True)
class Single:
    """Each example takes part in at most one step.

    >>> list(Single().patterns(3))
    [(0,), (1,), (2,)]
    """

    def spacing(self, steps: int) -> Spacing:
        """Once; the next time would come after the end."""
        return Spacing(1, steps)

    def patterns(self, steps: int) -> Iterator[tuple[int, ...]]:
        """Every largest permitted pattern."""
        return ((i,) for i in range(steps))


@dataclass(frozen=True)
class MinSeparation:
    """At most `max_participations` times, any two of them at least `separation` steps apart.

    >>> list(MinSeparation(2, 3).patterns(5))
    [(2,), (0, 3), (0, 4), (1, 4)]
    """

    max_participations: int
    separation: int

    def __post_init__(self) -> None:
        for name in ("max_participations", "separation"):
            object.__setattr__(self, name, _check.whole(name, getattr(self, name)))

    def spacing(self, steps: int) -> Spacing:
        """What these limits come to in `steps` steps."""
        return Spacing(self.count(steps), min(self.separation, steps))

    def count(self, steps: int) -> int:
        """How often an example can really take part in `steps` steps."""
        return min(self.max_participations, 1 + (steps - 1) // self.separation)

    def patterns(self, steps: int) -> Iterator[tuple[int, ...]]:
        """Every permitted pattern to which no step can be added: exponentially many, for small `steps`."""
        for size in range(1, self.count(steps) + 1):
            for pattern in combinations(range(steps), size):
                if self._permits(pattern) and (size == self.max_participations or not self._extensible(pattern, steps)):
                    yield pattern

    def _permits(self, pattern: tuple[int, ...]) -> bool:
        return all(b - a >= self.separation for a, b in pairwise(pattern))

    def _extensible(self, pattern: tuple[int, ...], steps: int) -> bool:
        return any(all(abs(i - j) >= self.separation for j in pattern) for i in range(steps))


@dataclass(frozen=True)
class FixedEpochs:
    """Every example once an epoch, always at the same place: steps i, i + n/k, i + 2n/k, ...

    `epochs` must divide the number of steps.

    >>> list(FixedEpochs(2).patterns(6))
    [(0, 3), (1, 4), (2, 5)]
    """

    epochs: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", _check.whole("epochs", self.epochs))

    def spacing(self, steps: int) -> Spacing:
        """Once an epoch, an epoch apart."""
        return Spacing(self.epochs, self.separation(steps))

    def separation(self, steps: int) -> int:
        """Steps between two participations: the length of an epoch."""
        if steps % self.epochs:
            raise ValueError(f"epochs={self.epochs}: must divide steps={steps}; choose a multiple as steps")
        return steps // self.epochs

    def patterns(self, steps: int) -> Iterator[tuple[int, ...]]:
        """One pattern for each place in the epoch."""
        length = self.separation(steps)
        return (tuple(range(i, steps, length)) for i in range(length))


Participation = Single | MinSeparation | FixedEpochs


def checked_participation(participation: Participation | None) -> Participation:
    """The participation, if it is one; none means a single one."""
    if participation is None:
        return Single()
    if not isinstance(participation, (Single, MinSeparation, FixedEpochs)):
        required = "must be Single(), MinSeparation(...) or FixedEpochs(...)"
        raise _check.fail("participation", participation, required)
    return participation
