"""Bins redrawn every epoch: every example draws a fresh place in the cycle in each pass over the data.

    batch of step i = the examples whose bin of the epoch i // cycle is i mod cycle

So each example takes part once in every epoch, at places that have nothing to do with each other; an epoch that the
last step cuts off leaves out those whose place would come later. Divide by the expected size, examples / cycle, as
places and real sizes must stay secret.

Guarantees:
- the place of example e in epoch k is the e-th 64-bit word, modulo `cycle`, of ChaCha20 stream k with the key derived
  for "redrawn-bins": a function of the key, the cycle, the epoch and its own index alone, so that no other example's
  presence, nor the number of steps, changes it;
- places are independent between examples and between epochs, and uniform, to a relative cycle / 2^64;
- an order that is shuffled anew in every epoch would not be this sampling, and its accounting would not hold for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bandmf import _check
from bandmf.accounting.events import Event
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices, Stream
from bandmf.sampling.base import check_step, describe
from bandmf.sampling.bins import MOST_EXAMPLES, placed_in_bins

_HELD = 2  # epochs: loaders that read ahead cross a border before others do


class _Epoch(NamedTuple):
    number: int
    placed: Indices
    bounds: Indices


class RedrawnBins:
    """The batches of passes over the data that take `cycle` steps each, every example at a fresh place in each.

    An epoch is drawn when a batch of it is asked for: one 64-bit number per example, and the last two epochs are kept
    (1e8 examples: 1.6 GB, ten seconds of one core an epoch); a batch then costs O(batch).
    There are no `events`: what these batches cost depends on the strategy too, and the plan's certificate says it.

    >>> batches = RedrawnBins(Key(bytes(32)), examples=10, steps=8, cycle=3)
    >>> [batches.batch(step).tolist() for step in range(4)]
    [[0, 5, 9], [1, 3, 7], [2, 4, 6, 8], [5, 7]]
    """

    def __init__(self, key: Key, *, examples: int, steps: int, cycle: int) -> None:
        self.examples = _check.whole("examples", examples, 1, MOST_EXAMPLES)
        self.steps = _check.whole("steps", steps)
        most = min(self.steps, (2**63 - 1) // self.examples)  # a place and an index share 63 bits
        self.cycle = _check.whole("cycle", cycle, 1, most, f"{most} (steps={self.steps})")
        self._secret = key.derive("redrawn-bins")
        self._held: tuple[_Epoch, ...] = ()
        self._bounds = self._epoch(0).bounds
        self._provenance = describe(self, self._secret, self.cycle)

    def _epoch(self, number: int) -> _Epoch:
        for epoch in self._held:
            if epoch.number == number:
                return epoch
        placed = placed_in_bins(Stream(self._secret, number), self.examples, self.cycle)
        epoch = _Epoch(number, placed, np.searchsorted(placed, np.arange(self.cycle + 1) * self.examples))
        self._held = (*self._held, epoch)[-_HELD:]
        return epoch

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
        number, place = divmod(check_step(step, self.steps), self.cycle)
        epoch = self._epoch(number)
        begin, end = epoch.bounds[place : place + 2]
        return epoch.placed[begin:end] - place * self.examples
