"""b-min-sep Poisson sampling: every example that was not used in the last b - 1 steps joins with probability p.

The law, with its warm start, is that of `accounting.min_separation.law`. An example's steps are a renewal process:

    first = wait + g_1,    next = last + b + g,    wait ~ the stationary waits 0 ... b - 1,    g ~ Geometric(p) from 0.

So at every step each example is in the batch with probability p / (1 + (b - 1) p), and two of its steps are never less
than b apart. Batches and their sizes must stay secret: divide by the expected size.

Guarantees:
- the wait of example e is drawn from the e-th 64-bit word of stream 0 of ChaCha20 with the key derived for
  "min-separation", and its r-th gap from the e-th word of stream r: functions of the key, p, b and its own index alone,
  so that no other example's presence, nor the number of steps, changes it;
- examples are independent, and each follows the law to an absolute 2^-50 in the probability of any wait or gap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray
from bandmf.accounting.events import Event
from bandmf.accounting.min_separation.law import checked_law
from bandmf.randomness.chacha import Keystream
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices
from bandmf.sampling.base import check_step, describe

_CHUNK = 1 << 18  # examples; whole blocks of the cipher, which hold 8 words each
_MOST_EXAMPLES = 2**32 * 8  # one 64-bit word each, of 2^32 blocks


class MinSeparationPoisson:
    """The batches of `steps` steps, each example's at least `separation` apart; warm start.

    It holds one 64-bit number per participation (examples times epochs), drawn chunk by chunk and then sorted; a batch
    then costs O(batch). Ten million examples in eight epochs: 0.64 GB, twice that while it is made.
    There are no `events`: what these batches cost depends on the strategy too, and the plan's certificate says it.

    >>> batches = MinSeparationPoisson(Key(bytes(32)), examples=10, steps=8, separation=3, probability=0.5)
    >>> [batches.batch(step).tolist() for step in range(4)]
    [[1, 4, 6], [3, 7, 9], [], [0, 1, 2, 4]]
    """

    def __init__(self, key: Key, *, examples: int, steps: int, separation: int, probability: float) -> None:
        self.examples = _check.whole("examples", examples, 1, _MOST_EXAMPLES)
        most = (2**63 - 1) // self.examples - 1  # a step and an index share 63 bits
        self.steps = _check.whole("steps", steps, 1, min(most, 2**31), remedy="take fewer steps")
        self.separation, self.probability = checked_law(separation, probability)
        secret = key.derive("min-separation")
        self._keystream = Keystream(secret.secret)
        chunks = [self._chunk(begin) for begin in range(0, self.examples, _CHUNK)]
        self._placed = np.concatenate(chunks)
        self._placed.sort()
        self._bounds = np.searchsorted(self._placed, np.arange(self.steps + 1) * self.examples)
        law = {"separation": self.separation, "probability": self.probability}
        self._provenance = describe(self, secret, self.steps, **law)

    def _chunk(self, begin: int) -> Indices:
        """step * examples + index of every participation of the examples from `begin` on."""
        size = min(_CHUNK, self.examples - begin)
        index, placed = np.arange(begin, begin + size), []
        time = waits(self._uniform(0, begin, size), self.separation, self.probability)
        number = 1
        while len(index):
            time += gaps(self._uniform(number, begin, size)[index - begin], self.steps, self.probability)
            inside = time < self.steps
            index, time = index[inside], time[inside]
            placed.append(time * self.examples + index)
            time = time + self.separation
            number += 1
        return np.concatenate(placed)

    def _uniform(self, stream: int, begin: int, size: int) -> FloatArray:
        """One number in (0, 1) for each example, from its own word."""
        words = np.empty(16 * -(-size // 8), np.uint32)
        self._keystream.fill(words, (stream, 0, 0), begin // 8)
        return np.clip(words.view(np.uint64)[:size] * 2.0**-64, 2.0**-65, 1 - 2.0**-53)

    @property
    def events(self) -> tuple[Event, ...]:
        """None: a certificate speaks for the whole run."""
        return ()

    @property
    def provenance(self) -> dict[str, Any]:
        """What the ledger records: two samplers with this provenance and the same key draw the same batches."""
        return self._provenance

    def batch(self, step: int) -> Indices:
        """The examples of a step, in increasing order."""
        step = check_step(step, self.steps)
        begin, end = self._bounds[step : step + 2]
        return self._placed[begin:end] - step * self.examples


def waits(uniform: FloatArray, separation: int, probability: float) -> Indices:
    """Steps until free at the warm start: 0, or 1 ... separation - 1 with p / (1 + (b - 1) p) each."""
    beyond = uniform * (1 + (separation - 1) * probability) - 1  # free below 0; then p for every wait
    waiting = np.minimum(np.floor(beyond / probability) + 1, separation - 1)
    return np.where(beyond < 0, 0, waiting).astype(np.int64)


def gaps(uniform: FloatArray, most: int, probability: float) -> Indices:
    """Free steps before joining: geometric from 0; beyond `most` it does not matter how many."""
    scale = -math.log1p(-probability) if probability < 1 else math.inf
    return np.minimum(np.floor(-np.log1p(-uniform) / scale), most).astype(np.int64)
