"""Privacy events: what the accountant must know of a mechanism. Sampler, plan and accountant share this one type.

A *round* adds noise N(0, sigma^2) to a sum to which the example in question, when it is sampled, contributes
at most 1. An event is so many rounds of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scipy import special

from bandmf import _check

ADJACENCIES = ("add-remove", "zero-out", "replace")
MIN_EPSILON, MAX_EPSILON = 1e-3, 200.0
MAX_ROUNDS = 10**8
MIN_DELTA = 1e-13  # the accountant cuts tails of mass 1e-15 and books them as certain disclosure


@dataclass(frozen=True)
class Event:
    """Rounds that sample each of `examples` examples with `sampling_probability`; 1 means no sampling.

    `max_batch_size` caps a batch; what the cap costs depends on `examples`, how many a round samples *from*,
    the example in question included. Both are None when no sample can be larger.

    >>> Event(0.1, rounds=8).after(3)
    Event(sampling_probability=0.1, rounds=3, adjacency='add-remove', max_batch_size=None, examples=None)
    """

    sampling_probability: float
    rounds: int
    adjacency: str = "add-remove"
    max_batch_size: int | None = None
    examples: int | None = None

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
        checked = {"sampling_probability": q, "rounds": rounds, "max_batch_size": cap, "examples": examples}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def after(self, rounds: int) -> Event:
        """The first `rounds` rounds of it."""
        return replace(self, rounds=rounds)

    @property
    def unsampled(self) -> bool:
        """Plain Gaussian releases: k of them are one with noise sigma / sqrt(k)."""
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
    steps: int, bands: int, batch_size: float, examples: int, adjacency: str, max_batch_size: int | None
) -> tuple[Event, ...]:
    """The events of cyclic Poisson sampling with this many bands; the worst one counts.

    There is more than one only with a cap on the batch, whose cost depends on the size of the parts.
    """
    event = Event(sampling_probability(bands, batch_size, examples), -(-steps // bands), adjacency)
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
