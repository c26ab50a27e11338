"""Batch streams that carry their own privacy event.

A sampler maps a step to the indices of its batch. It has no state: batch i is a pure function of the key, the
plan and i, so a restart replays nothing, and every rank can compute it. It costs O(batch), not O(data).

Cyclic Poisson sampling (Algorithm 2 of the paper): the N examples are divided into b parts; at step i the part
i mod b has its turn, and each of its examples enters the batch independently with probability q = b B / N.

Guarantees:
- the events of a sampler are those of its plan, and the number of examples is the plan's;
- under add-remove adjacency parts are independent and uniform for each example, as if each were assigned on
  its own; under zero-out and replace adjacency they are equal in size, up to one;
- batches of different steps are independent; a batch cut to `max_batch_size` is a uniform choice from it;
- all randomness comes from ChaCha20 with the keys derived for "partition" and "sampling", except that the part
  sizes are drawn by NumPy's Philox generator, seeded with 128 bits of that stream.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import Any, Protocol

import numpy as np

from bandmf import _check
from bandmf.accounting.events import Event, capped, one_release
from bandmf.participation import MinSeparation, Participation, Single
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices, Permutation, Stream

_ORDER, _SIZES = 0, 1  # numbers of the streams of the partition key; those of the sampling key are the steps


class SampledPlan(Protocol):
    """What a sampler must know of a plan."""

    @property
    def steps(self) -> int: ...
    @property
    def bands(self) -> int: ...
    @property
    def examples(self) -> int | None: ...
    @property
    def batch_size(self) -> float: ...
    @property
    def sampling_probability(self) -> float: ...
    @property
    def adjacency(self) -> str: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def participation(self) -> Participation | None: ...


class Sampler(Protocol):
    """What CyclicPoisson and FixedOrder have in common."""

    examples: int
    steps: int

    def batch(self, step: int) -> Indices: ...
    @property
    def events(self) -> tuple[Event, ...]: ...
    @property
    def provenance(self) -> dict[str, Any]: ...


def sampler(plan: SampledPlan, key: Key, examples: int | None = None) -> Sampler:
    """The sampler of a plan, for a data set with this many examples (by default the plan's own number).

    The same key twice gives the same batches. make_private gives each run a key of its own, `key.for_run(run_id)`:
    runs that shared their secret batches would not compose as their plans say.

    >>> import bandmf
    >>> plan = bandmf.plan(epsilon=8, delta=1e-6, examples=1000, batch_size=50, steps=40, bands=4)
    >>> batches = sampler(plan, Key(bytes(32)))
    >>> np.array_equal(batches.batch(7), batches.batch(7))
    True
    """
    if plan.examples is None:
        plan_examples = _check.whole("examples", examples, remedy="this plan does not say how many there are")
    else:
        plan_examples = plan.examples
    if examples is not None and examples != plan_examples:
        raise _check.fail(
            "len(dataset)",
            examples,
            f"must be the plan's examples={plan_examples}",
            "make a plan for this data",
        )
    if plan.participation is None:
        return CyclicPoisson(plan, key)
    if plan.adjacency == "add-remove":
        raise _check.fail(
            "adjacency",
            plan.adjacency,
            "does not fit batches in a fixed order: one example more would move others to other batches",
            "plan with adjacency='zero-out' or 'replace', or draw batches of your own",
        )
    return FixedOrder(plan, key, plan_examples)


class CyclicPoisson:
    """Cyclic Poisson sampling: the part `step mod bands`, each of its examples with the plan's probability."""

    def __init__(self, plan: SampledPlan, key: Key) -> None:
        assert plan.examples is not None
        self.examples, self.steps, self.parts = plan.examples, plan.steps, plan.bands
        self.probability = plan.sampling_probability
        self.max_batch_size, self.adjacency = plan.max_batch_size, plan.adjacency
        self._key = key.derive("sampling")
        partition = key.derive("partition")
        self._bounds = self._draw_bounds(partition)
        self._provenance = _describe(self, partition, probability=self.probability, adjacency=self.adjacency)
        self._arrange = Permutation(Stream(partition, _ORDER), self.examples) if self.parts > 1 else None

    def _draw_bounds(self, key: Key) -> Indices:
        """Where each part begins in the permuted data: independent uniform assignments have multinomial sizes."""
        if self.adjacency != "add-remove" or self.parts == 1:
            return _even_bounds(self.examples, self.parts)
        seed = int.from_bytes(Stream(key, _SIZES).words(2).tobytes(), "little")
        generator = np.random.Generator(np.random.Philox(key=seed))
        sizes = generator.multinomial(self.examples, np.full(self.parts, 1 / self.parts))
        return np.concatenate([[0], np.cumsum(sizes)])

    @property
    def events(self) -> tuple[Event, ...]:
        """What the accountant must be told of these batches; where parts differ in size, the worst counts."""
        event = Event(self.probability, -(-self.steps // self.parts), self.adjacency)
        return capped(event, self.max_batch_size, np.unique(np.diff(self._bounds)).tolist())

    @property
    def provenance(self) -> dict[str, Any]:
        """What the ledger records: two samplers with this provenance and the same key draw the same batches."""
        return self._provenance

    def part(self, number: int) -> Indices:
        """The examples of one part, in increasing order: O(examples / bands), for inspection."""
        return self._indices(np.arange(self._bounds[number], self._bounds[number + 1]))

    def batch(self, step: int) -> Indices:
        """The examples of a step, in increasing order."""
        step = _check_step(step, self.steps)
        begin, end = self._bounds[step % self.parts : step % self.parts + 2]
        stream = Stream(self._key, step)
        positions = poisson_sample(stream, int(end - begin), self.probability)
        if self.max_batch_size is not None and len(positions) > self.max_batch_size:
            lottery = np.argsort(stream.words(len(positions)), kind="stable")
            positions = positions[lottery[: self.max_batch_size]]
        return self._indices(begin + positions)

    def _indices(self, positions: Indices) -> Indices:
        return np.sort(positions if self._arrange is None else self._arrange(positions))


class FixedOrder:
    """The order of an unamplified plan: parts of equal size in turns, so each example returns after a cycle.

    No randomness counts towards privacy; the data are shuffled once, by the key, for the sake of training.
    `participation` is what really happens, never more than the plan's own. Examples that it can never use are
    named in a warning.
    """

    def __init__(self, plan: SampledPlan, key: Key, examples: int) -> None:
        assert plan.participation is not None
        self.examples, self.steps, self.adjacency = examples, plan.steps, plan.adjacency
        self._most = math.ceil(plan.batch_size)
        self.parts = cycle_length(plan.participation, plan.steps, examples, plan.batch_size)
        self._bounds = _even_bounds(examples, self.parts)
        partition = key.derive("partition")
        self._arrange = Permutation(Stream(partition, _ORDER), examples)
        self._provenance = _describe(self, partition, batch_size=self._most)
        if note := unused_note(plan.participation, plan.steps, examples, plan.batch_size):
            warnings.warn(note, stacklevel=3)

    @property
    def events(self) -> tuple[Event, ...]:
        """One release: no sampling counts."""
        return (one_release(self.adjacency),)

    @property
    def participation(self) -> MinSeparation:
        """How often and how far apart an example really takes part."""
        return MinSeparation(-(-self.steps // self.parts), self.parts)

    @property
    def provenance(self) -> dict[str, Any]:
        """What the ledger records: two samplers with this provenance and the same key draw the same batches."""
        return self._provenance

    def batch(self, step: int) -> Indices:
        """The examples of a step, in increasing order."""
        turn = _check_step(step, self.steps) % self.parts
        begin, end = self._bounds[turn : turn + 2]
        return np.sort(self._arrange(np.arange(begin, min(end, begin + self._most))))


def cycle_length(participation: Participation, steps: int, examples: int, batch_size: float) -> int:
    """After how many steps the same examples come again, if the participation permits that.

    A whole pass over the data takes examples / batch_size steps. With MinSeparation examples may rest longer, in
    smaller batches.
    """
    times, separation = participation.spacing(steps)
    whole_pass = math.ceil(examples / batch_size)
    if isinstance(participation, MinSeparation):
        cycle = max(separation, whole_pass)
        if (needed := -(-steps // cycle)) > participation.max_participations:
            raise _check.fail(
                "max_participations",
                participation.max_participations,
                f"must be at least {needed}: {steps} steps with {examples} examples in batches of {batch_size:g} "
                f"come back to each every {cycle} steps",
                f"plan with participation=MinSeparation({needed}, {cycle})",
            )
        return cycle
    if isinstance(participation, Single):
        fits = steps <= whole_pass
    else:
        fits = math.floor(examples / batch_size) <= separation <= whole_pass
    if not fits:
        raise _check.fail(
            "participation",
            participation,
            f"{steps} steps of {batch_size:g} examples are {steps * batch_size / examples:.3g} passes over "
            f"examples={examples}, not {times}",
            f"use batch_size={examples * times / steps:g}, or another number of steps",
        )
    return separation


def used_examples(participation: Participation, steps: int, examples: int, batch_size: float) -> int:
    """How many of the examples a fixed order uses at all.

    >>> used_examples(Single(), steps=10, examples=1000, batch_size=20)
    200
    """
    cycle = cycle_length(participation, steps, examples, batch_size)
    turns, most = min(steps, cycle), math.ceil(batch_size)
    whole_parts = -(-examples // cycle) <= most
    return examples * turns // cycle if whole_parts else turns * most


def unused_note(participation: Participation, steps: int, examples: int, batch_size: float) -> str:
    """A sentence about examples that a fixed order never uses, and the remedy; empty if it uses all."""
    unused = examples - used_examples(participation, steps, examples, batch_size)
    if not unused:
        return ""
    cycle = cycle_length(participation, steps, examples, batch_size)
    remedy = f"take at least {cycle} steps" if cycle > steps else f"plan with batch_size={examples / cycle:g}"
    return (
        f"{unused} of examples={examples} are never used: {steps} steps of at most {math.ceil(batch_size)} reach only "
        f"{examples - unused}; {remedy}, or with fewer examples"
    )


def poisson_sample(stream: Stream, size: int, probability: float) -> Indices:
    """Each of 0 .. size-1 independently with this probability, in increasing order; O(the number chosen).

    The gaps between successes are geometric: floor(E / -log(1 - q)) for an exponential E.
    """
    if probability >= 1:
        return np.arange(size)
    expected = size * probability
    chunk = math.ceil(expected + 4 * math.sqrt(expected) + 8)  # enough in all but few cases
    chosen, last = [], -1
    while last < size:
        uniform = np.minimum(stream.words(chunk) * 2.0**-64, 1 - 2.0**-53)
        gaps = np.floor(np.log1p(-uniform) / math.log1p(-probability))
        steps = np.minimum(gaps, size).astype(np.int64) + 1  # no gap needs to reach further than the end
        chosen.append(last + np.cumsum(steps))
        last = int(chosen[-1][-1])
    positions = np.concatenate(chosen)
    return positions[: np.searchsorted(positions, size)]


def _even_bounds(examples: int, parts: int) -> Indices:
    return np.array([examples * k // parts for k in range(parts + 1)], np.int64)


def _check_step(step: int, steps: int) -> int:
    return _check.whole("step", step, 0, steps - 1, remedy=f"the plan ends after steps={steps}")


def _describe(batches: Any, key: Key, **more: Any) -> dict[str, Any]:
    """Kind and numbers of a sampler, with a keyed digest of its part sizes: their draw is NumPy's to change."""
    sizes = hashlib.blake2b(batches._bounds.tobytes(), key=key.derive("sizes").secret, digest_size=16)
    plain = {
        "kind": type(batches).__name__,
        "version": 1,
        "examples": batches.examples,
        "parts": batches.parts,
    }
    return {
        **plain,
        "max_batch_size": getattr(batches, "max_batch_size", None),
        **more,
        "sizes": sizes.hexdigest(),
    }
