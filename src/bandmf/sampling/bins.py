"""Balls-in-bins sampling: every example draws one place in the cycle, and keeps it in every epoch.

    batch of step i = the examples whose bin is i mod cycle

So each example takes part once in every cycle, an epoch, always at the same place; an epoch that the last step cuts off
leaves some out. Sizes of batches are Binomial(examples, 1 / cycle), drawn once and repeated: divide by the expected
size, as bins and real sizes must stay secret.

Guarantees:
- the bin of example e is the e-th 64-bit word, modulo `cycle`, of a ChaCha20 stream with the key derived for "bins": a
  function of the key, the cycle and its own index alone, so that no other example's presence changes it;
- bins are independent and uniform: the probability of each is 1 / cycle, to a relative cycle / 2^64;
- batches of equal size, or any other shuffle, would not be balls-in-bins, and its accounting would not hold for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bandmf import _check
from bandmf.accounting.events import Event
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices, Stream
from bandmf.sampling.base import check_step, describe

_CHUNK = 1 << 20  # examples; whole blocks of the cipher, which hold 8 words each
MOST_EXAMPLES = 2**32 * 8  # one 64-bit word each, of 2^32 blocks


def placed_in_bins(stream: Stream, examples: int, cycle: int) -> Indices:
    """bin * examples + index of every example, in increasing order: bin by bin."""
    placed = np.empty(examples, np.int64)
    for begin in range(0, examples, _CHUNK):
        here = placed[begin : begin + _CHUNK]
        bins = stream.words(len(here)) % np.uint64(cycle)
        np.multiply(bins, examples, out=here, casting="unsafe")
        here += np.arange(begin, begin + len(here))
    placed.sort()
    return placed


class BallsInBins:
    """The batches of passes over the data that take `cycle` steps each, every example at a random place of its own.

    It holds one 64-bit number per example, drawn in one pass and then sorted in place (1e8 examples: 0.8 GB, about ten
    seconds of one core); a batch then costs O(batch).
    There are no `events`: what these batches cost depends on the strategy too, and the plan's certificate says it.

    >>> batches = BallsInBins(Key(bytes(32)), examples=10, steps=8, cycle=3)
    >>> [batches.batch(step).tolist() for step in range(4)]
    [[0, 2, 5], [1, 6, 8], [3, 4, 7, 9], [0, 2, 5]]
    """

    def __init__(self, key: Key, *, examples: int, steps: int, cycle: int) -> None:
        self.examples = _check.whole("examples", examples, 1, MOST_EXAMPLES)
        self.steps = _check.whole("steps", steps)
        most = min(self.steps, (2**63 - 1) // self.examples)  # a bin and an index share 63 bits
        self.cycle = _check.whole("cycle", cycle, 1, most, f"{most} (steps={self.steps})")
        secret = key.derive("bins")
        self._placed = placed_in_bins(Stream(secret, 0), self.examples, self.cycle)
        self._bounds = np.searchsorted(self._placed, np.arange(self.cycle + 1) * self.examples)
        self._provenance = describe(self, secret, self.cycle)

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
        place = check_step(step, self.steps) % self.cycle
        begin, end = self._bounds[place : place + 2]
        return self._placed[begin:end] - place * self.examples
