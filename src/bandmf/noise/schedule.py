"""What any engine does at step i, as one linear form that every backend executes:

    y_i = sum_d feed_d z_d + sum_s weight_s history[s] + prepared[i],

then history[store] = y_i (banded C), or history[s] = decay_s history[s] + y_i (buffered C), or nothing
(banded C^-1, whose past z are drawn again).

Look-ahead. For a banded C, reading bands - 1 vectors of history at every step is what costs. Instead, every
T steps one pass over the history computes what all of it contributes to each of the next T steps,

    prepared[t] = sum_{r > t} -C[i, i-r] / C[i, i] y_{i-r},    i = base + t,   t = 0 ... T-1,

and within those steps only the vectors made since `base` are read. It is Algorithm 1 with its sum regrouped:
about b/T + T/2 vectors are read per step instead of b, least near T = sqrt(2 b).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bandmf import _check
from bandmf.noise.normals import Float32
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence, Strategy

MAX_LOOKAHEAD = 16


@dataclass(frozen=True)
class Step:
    """The linear form of one step."""

    draws: tuple[tuple[int, float], ...]  # (step of z, feed)
    reads: tuple[tuple[int, float], ...]  # (slot of the history, weight)
    prepared: int | None = None  # row of the prepared sums to add
    store: int | None = None  # slot that y goes to
    decays: tuple[float, ...] = ()  # of the buffers


def best_lookahead(bands: int) -> int:
    """T near sqrt(2 bands), at most 16; 1 (none) where a pass would save nothing."""
    if bands < 6:
        return 1
    return min(MAX_LOOKAHEAD, round(math.sqrt(2 * bands)))


class Schedule:
    """The steps of a strategy, with look-ahead `lookahead` (chosen if None, 1 for none).

    >>> from bandmf.strategies import BandedToeplitz
    >>> schedule = Schedule(BandedToeplitz([1.0, 0.5], 8, normalize_columns=False))
    >>> schedule.slots, schedule.step(3)
    (1, Step(draws=((3, 1.0),), reads=((0, -0.5),), prepared=None, store=0, decays=()))
    """

    def __init__(self, strategy: Strategy, lookahead: int | None = None) -> None:
        self.strategy = strategy
        self.steps = strategy.steps
        self.recurrence = strategy.recurrence
        self.slots = self._slots()
        self.lookahead = self._lookahead(lookahead)

    def _slots(self) -> int:
        match self.recurrence:
            case OutputRecurrence(bands=bands):
                return min(bands, self.steps) - 1
            case BufferRecurrence(scales=scales):
                return len(scales)
            case InputRecurrence():
                return 0

    def _lookahead(self, wanted: int | None) -> int:
        if not isinstance(self.recurrence, OutputRecurrence):
            _check.whole("lookahead", 1 if wanted is None else wanted, 1, 1, "1 (only banded C looks ahead)")
            return 1
        # A pass may only run as far ahead as the ring is long, or it would need vectors already overwritten.
        limit = max(1, min(self.slots, MAX_LOOKAHEAD))
        if wanted is None:
            return min(best_lookahead(self.slots + 1), limit)
        return _check.whole("lookahead", wanted, 1, limit, f"{limit} (bands - 1, at most {MAX_LOOKAHEAD})")

    def base(self, i: int) -> int:
        """The step at whose start the sums that step i uses were prepared."""
        return i - i % self.lookahead

    def step(self, i: int) -> Step:
        """The linear form of step i."""
        match self.recurrence:
            case OutputRecurrence(row=row):
                return self._output(i, row(i))
            case InputRecurrence(row=row):
                weights = row(i)[: i + 1]
                return Step(tuple((i - r, float(w)) for r, w in enumerate(weights)), ())
            case BufferRecurrence(scales=scales, decays=decays):
                reads = tuple((k, -float(scale)) for k, scale in enumerate(scales))
                return Step(((i, 1.0),), reads, decays=tuple(float(decay) for decay in decays))

    def _output(self, i: int, row: np.ndarray) -> Step:
        ahead = self.lookahead > 1
        reach = i - self.base(i) if ahead else min(i, self.slots)
        reads = tuple(((i - r) % self.slots, -float(row[r] / row[0])) for r in range(1, reach + 1))
        return Step(
            draws=((i, float(1 / row[0])),),
            reads=reads,
            prepared=i - self.base(i) if ahead else None,
            store=i % self.slots if self.slots else None,
        )

    def pass_matrix(self, base: int) -> Float32:
        """The (lookahead, slots) matrix that turns the history at step `base` into the prepared sums."""
        assert isinstance(self.recurrence, OutputRecurrence)
        matrix = np.zeros((self.lookahead, self.slots), np.float32)
        for t in range(min(self.lookahead, self.steps - base)):
            i = base + t
            row = self.recurrence.row(i)
            r = np.arange(t + 1, min(i, self.slots) + 1)
            matrix[t, (i - r) % self.slots] = -row[r] / row[0]
        return matrix

    @property
    def vectors(self) -> int:
        """Vectors of the model's size that the engine keeps: history and prepared sums."""
        return self.slots + (self.lookahead if self.lookahead > 1 else 0)

    @cached_property
    def digest(self) -> str:
        """Tells strategies apart: a hash over the shape of the recurrence and rows spread over all steps."""
        spread = np.unique(np.geomspace(1, self.steps, 64).astype(np.int64)) - 1
        sample = np.union1d(spread, self.steps - 1 - spread)
        recurrence = self.recurrence
        text = hashlib.sha256(f"{type(recurrence).__name__} {self.steps} {self.slots}".encode())
        if isinstance(recurrence, BufferRecurrence):
            text.update(np.concatenate([recurrence.scales, recurrence.decays]).tobytes())
        else:
            for i in sample:
                text.update(np.ascontiguousarray(recurrence.row(int(i)), np.float64).tobytes())
        return text.hexdigest()[:16]
