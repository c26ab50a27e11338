"""Cyclic Poisson sampling (Algorithm 2 of the paper).

The N examples are divided into b parts; at step i the part i mod b has its turn, and each of its examples enters the
batch independently with probability q = b B / N.

Guarantees:
- under add-remove adjacency parts are independent and uniform for each example, as if each were assigned on
  its own; under zero-out and replace adjacency they are equal in size, up to one;
- batches of different steps are independent; a batch cut to `max_batch_size` is a uniform choice from it;
- all randomness comes from ChaCha20 with the keys derived for "partition" and "sampling", except that the part
  sizes are drawn by NumPy's Philox generator, seeded with 128 bits of that stream.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bandmf.accounting.events import Event, capped
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices, Permutation, Stream
from bandmf.sampling.base import ORDER, SIZES, SampledPlan, check_step, describe, even_bounds


class CyclicPoisson:
    """Cyclic Poisson sampling: the part `step mod bands`, each of its examples with the plan's probability."""

    def __init__(self, plan: SampledPlan, key: Key) -> None:
        assert plan.examples is not None
        assert plan.sampling_probability is not None
        self.examples, self.steps, self.parts = plan.examples, plan.steps, plan.bands
        self.probability = plan.sampling_probability
        self.max_batch_size, self.adjacency = plan.max_batch_size, plan.adjacency
        self._key = key.derive("sampling")
        partition = key.derive("partition")
        self._bounds = self._draw_bounds(partition)
        self._provenance = describe(self, partition, self.parts, probability=self.probability, adjacency=self.adjacency)
        self._arrange = Permutation(Stream(partition, ORDER), self.examples) if self.parts > 1 else None

    def _draw_bounds(self, key: Key) -> Indices:
        """Where each part begins in the permuted data: independent uniform assignments have multinomial sizes."""
        if self.adjacency != "add-remove" or self.parts == 1:
            return even_bounds(self.examples, self.parts)
        seed = int.from_bytes(Stream(key, SIZES).words(2).tobytes(), "little")
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
        step = check_step(step, self.steps)
        begin, end = self._bounds[step % self.parts : step % self.parts + 2]
        stream = Stream(self._key, step)
        positions = poisson_sample(stream, int(end - begin), self.probability)
        if self.max_batch_size is not None and len(positions) > self.max_batch_size:
            lottery = np.argsort(stream.words(len(positions)), kind="stable")
            positions = positions[lottery[: self.max_batch_size]]
        return self._indices(begin + positions)

    def _indices(self, positions: Indices) -> Indices:
        return np.sort(positions if self._arrange is None else self._arrange(positions))


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
