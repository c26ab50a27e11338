"""What any engine does at step i, as one linear form that every backend executes:

    y_i = sum_d feed_d z_d + sum_s weight_s history[s] + prepared[i],

then history[store] = y_i (banded C), or history[s] = decay_s history[s] + y_i (buffered C), or nothing
(banded C^-1, whose past z are drawn again), or history[store] = z_i (banded C^-1 with kept inputs).

For a scaled strategy this is the noise of the unscaled one. What is added is `scale` times y_i, and `Schedule.scale`
multiplies that number by the step's own.

Kept inputs. A banded C^-1 needs the last p - 1 of z. Each can be drawn again, which takes no memory and the
cipher's time, or read from a ring, which takes a vector and is several times as fast. `kept_inputs` of them,
the most recent, are read; older ones are drawn.

Look-ahead. For a banded C, reading bands - 1 vectors of history at every step is what costs. Instead, every
T steps one pass over the history computes what all of it contributes to each of the next T steps,

    prepared[t] = sum_{r > t} -C[i, i-r] / C[i, i] y_{i-r},    i = base + t,   t = 0 ... T-1,

and within those steps only the vectors made since `base` are read. It is Algorithm 1 with its sum regrouped:
about b/T + T/2 vectors are read per step instead of b.

A second, inner level (`inner` < T) saves most of the T/2: every `inner` steps, while a step has all vectors
made since `base` at hand for its own sum, it also adds their share to the sums prepared for the next
inner - 1 steps (`forward`); those then read only what was made since.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bandmf import _check
from bandmf.noise.normals import Float32
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence, ScaledRecurrence, Strategy

MAX_LOOKAHEAD = 16
INNER = {"cpu": None, "cuda": 4}  # steps of the inner level: the fused kernels have so many accumulators
DEVICES = tuple(INNER)
BYTES_PER_NUMBER = 4  # history and prepared sums are float32


@dataclass(frozen=True)
class Step:
    """The linear form of one step."""

    draws: tuple[tuple[int, float], ...]  # (step of z, feed)
    reads: tuple[tuple[int, float], ...]  # (slot of the history, weight)
    prepared: int | None = None  # row of the prepared sums to add
    store: int | None = None  # slot that y goes to, or z
    stores_input: bool = False  # z of this step goes there, which is the first of the draws
    decays: tuple[float, ...] = ()  # of the buffers
    forward: tuple[tuple[float, ...], ...] = ()  # weights of the same reads in the next prepared rows


def best_lookahead(bands: int, inner: int | None = None) -> int:
    """T near sqrt(2 bands), or with an inner level near 2 sqrt(bands) and a multiple of it; at most 16.

    1, which is none, where a pass would save nothing.
    """
    if bands < (12 if inner else 8):
        return 1
    if inner:
        return min(MAX_LOOKAHEAD, inner * round(2 * math.sqrt(bands) / inner))
    return min(MAX_LOOKAHEAD, round(math.sqrt(2 * bands)))


def vectors_held(
    strategy: Strategy, device: str | None = None, max_vectors: int | None = None, kept_inputs: int | None = 0
) -> int:
    """Vectors of the model's size that an engine keeps there; for None the device that keeps more.

    >>> from bandmf.strategies import BandedInverse
    >>> strategy = BandedInverse([1.0, -0.5, -0.1, -0.05], steps=100)
    >>> vectors_held(strategy), vectors_held(strategy, kept_inputs=None)
    (0, 3)
    """
    devices = DEVICES if device is None else (device,)
    return max(
        Schedule(strategy, inner=INNER[kind], max_vectors=max_vectors, kept_inputs=kept_inputs).vectors
        for kind in devices
    )


class Schedule:
    """The steps of a strategy, with look-ahead `lookahead` (chosen if None, 1 for none) and `inner` level.

    `kept_inputs` is how many of the last z a banded C^-1 keeps, None for all that it needs; others are drawn again.
    `max_vectors` caps the memory: the look-ahead is then chosen as large as fits, and so are kept inputs of None.

    >>> from bandmf.strategies import BandedToeplitz
    >>> schedule = Schedule(BandedToeplitz([1.0, 0.5], 8, normalize_columns=False))
    >>> schedule.slots, schedule.lookahead
    (1, 1)
    >>> schedule.step(3)
    Step(draws=((3, 1.0),), reads=((0, -0.5),), prepared=None, store=0, stores_input=False, decays=(), forward=())
    """

    def __init__(
        self,
        strategy: Strategy,
        lookahead: int | None = None,
        inner: int | None = None,
        max_vectors: int | None = None,
        kept_inputs: int | None = 0,
    ) -> None:
        self.strategy = strategy
        self.steps = strategy.steps
        given = strategy.recurrence
        self.recurrence = given.unscaled if isinstance(given, ScaledRecurrence) else given
        self.gains = given.gains if isinstance(given, ScaledRecurrence) else None
        self.kept_inputs = self._kept_inputs(kept_inputs, max_vectors)
        self.slots = self._slots()
        self.lookahead = self._lookahead(lookahead, inner, max_vectors)
        self.inner = min(inner or self.lookahead, self.lookahead)

    def _kept_inputs(self, wanted: int | None, max_vectors: int | None) -> int:
        if not isinstance(self.recurrence, InputRecurrence):
            return _check.whole("kept_inputs", 0 if wanted is None else wanted, 0, 0, "0 (only for banded C^-1)")
        most, why = min(self.recurrence.bands, self.steps) - 1, "bands of C^-1, less one"
        if max_vectors is not None and max_vectors < most:
            most, why = max(0, max_vectors), f"max_vectors={max_vectors}"
        return most if wanted is None else _check.whole("kept_inputs", wanted, 0, most, f"{most} ({why})")

    def _slots(self) -> int:
        match self.recurrence:
            case OutputRecurrence(bands=bands):
                return min(bands, self.steps) - 1
            case BufferRecurrence(scales=scales):
                return len(scales)
            case InputRecurrence():
                return self.kept_inputs

    def _lookahead(self, wanted: int | None, inner: int | None, max_vectors: int | None) -> int:
        room = MAX_LOOKAHEAD if max_vectors is None else max_vectors - self.slots
        if room < 0:
            raise _check.fail(
                "max_vectors", max_vectors, f"the history alone takes {self.slots} vectors", "use fewer bands"
            )
        if not isinstance(self.recurrence, OutputRecurrence):
            return _check.whole("lookahead", wanted or 1, 1, 1, "1 (only banded C looks ahead)")
        # A pass may run only as far ahead as the ring is long, or it would need vectors that are gone.
        limit = max(1, min(self.slots, MAX_LOOKAHEAD, room))
        if wanted is None:
            return min(best_lookahead(self.slots + 1, inner), limit)
        return _check.whole("lookahead", wanted, 1, limit, f"{limit} (bands - 1, at most {MAX_LOOKAHEAD})")

    def scale(self, i: int, scale: float) -> float:
        """What y_i is multiplied by, for noise of the deviation `scale`: rounded as in every engine."""
        return scale if self.gains is None else float(np.float32(scale) * self.gains[i])

    def base(self, i: int) -> int:
        """The step at whose start the sums that step i uses were prepared."""
        return i - i % self.lookahead

    def pass_matrix(self, base: int) -> Float32:
        """prepared = pass_matrix @ history[:columns], before step `base` (or later, for the steps still to come).

        By then the steps base, base + 1, ... may have replaced the oldest vectors; their weights in later rows
        are zero, so those rows come out the same, bit for bit.
        """
        assert isinstance(self.recurrence, OutputRecurrence)
        count = min(base, self.slots)
        sources = np.arange(base - count, base)
        matrix = np.zeros((self.lookahead, count), np.float32)
        for i in range(base, min(base + self.lookahead, self.steps)):
            row, r = self.recurrence.row(i), i - sources
            near = r <= self.slots
            matrix[i - base, sources[near] % self.slots] = -row[r[near]] / row[0]
        return matrix

    def step(self, i: int, refreshed: int = -1) -> Step:
        """The linear form of step i, if the prepared sums hold all that was made before step `refreshed`."""
        match self.recurrence:
            case OutputRecurrence():
                return self._ahead(i, refreshed) if self.lookahead > 1 else self._output(i, min(i, self.slots))
            case InputRecurrence():
                return self._input(i)
            case BufferRecurrence(scales=scales, decays=decays):
                reads = tuple((k, -float(scale)) for k, scale in enumerate(scales))
                return Step(((i, 1.0),), reads, decays=tuple(float(decay) for decay in decays))

    def _output(self, i: int, reach: int) -> Step:
        """Step i, reading the last `reach` vectors."""
        row = self._scaled_row(i)
        reads = tuple(((i - r) % self.slots, -float(row[r])) for r in range(1, reach + 1))
        feed = float(1 / self.recurrence.row(i)[0])  # type: ignore[union-attr]
        return Step(((i, feed),), reads, store=i % self.slots if self.slots else None)

    def _input(self, i: int) -> Step:
        """Step i of a banded C^-1: recent z are read, where they are kept, and older ones drawn again."""
        weights = self.recurrence.row(i)[: i + 1]  # type: ignore[union-attr]
        needed = [int(r) for r in np.flatnonzero(weights)]  # few for tree aggregation
        reads = tuple(((i - r) % self.slots, float(weights[r])) for r in needed if 0 < r <= self.kept_inputs)
        draws = tuple((i - r, float(weights[r])) for r in needed if r == 0 or r > self.kept_inputs)
        return Step(draws, reads, store=i % self.slots if self.slots else None, stores_input=self.slots > 0)

    def _ahead(self, i: int, refreshed: int) -> Step:
        base = self.base(i)
        begin = i - (i - base) % self.inner  # of the inner block
        if i == begin > base:
            step = self._output(i, i - base)
            later = range(i + 1, min(begin + self.inner, base + self.lookahead, self.steps))
            forward = tuple(self._forward(i, k - i, i - base) for k in later)
        else:
            step = self._output(i, i - (begin if refreshed == begin else base))
            forward = ()
        return replace(step, prepared=i - base, forward=forward)

    def _forward(self, i: int, ahead: int, reach: int) -> tuple[float, ...]:
        """What step i + ahead takes of the last `reach` vectors before step i."""
        row = self._scaled_row(i + ahead)
        near = [float(row[r + ahead]) if r + ahead <= self.slots else 0.0 for r in range(1, reach + 1)]
        return tuple(-weight for weight in near)

    def _scaled_row(self, i: int) -> np.ndarray:
        row = self.recurrence.row(i)  # type: ignore[union-attr]
        return row / row[0]

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
        if self.gains is not None:
            text.update(self.gains.tobytes())
        return text.hexdigest()[:16]
