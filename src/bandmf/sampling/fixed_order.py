"""The fixed order of plans without amplification."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from bandmf import _check
from bandmf.accounting.events import Event, one_release
from bandmf.participation import MinSeparation, Participation, Single
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices, Permutation, Stream
from bandmf.sampling.base import ORDER, SampledPlan, check_step, describe, even_bounds


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
        self._bounds = even_bounds(examples, self.parts)
        partition = key.derive("partition")
        self._arrange = Permutation(Stream(partition, ORDER), examples)
        self._provenance = describe(self, partition, self.parts, batch_size=self._most)
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
        turn = check_step(step, self.steps) % self.parts
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
