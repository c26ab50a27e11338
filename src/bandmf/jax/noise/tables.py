"""The coefficients of all steps as arrays, for compiled code, where the step is not known in advance.

Rows that repeat are kept once: a banded Toeplitz strategy of a million steps needs about 2 * bands rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from bandmf.noise.schedule import Schedule
from bandmf.strategies.base import BufferRecurrence, OutputRecurrence, Strategy
from bandmf.strategies.scaled import unscaled

_BLOCK = 1 << 14


class Table(NamedTuple):
    """Row k holds for the steps from starts[k] on: y = feeds . (z_i, z_{i-1}, ...) + weights . past.

    The noise of a scaled strategy is y_i times gains[i]; others have no gains.

    Arrays of NumPy, or of JAX in a state.
    """

    starts: Any  # int32, (rows,)
    feeds: Any  # float32, (rows, draws)
    weights: Any  # float32, (rows, vectors)
    gains: Any  # float32, (steps,) or (0,)

    def scale(self, step: Any, scale: Any) -> Any:
        """As Schedule.scale, for a step that is known when the program runs."""
        return scale * self.gains[step] if len(self.gains) else scale


def table(schedule: Schedule) -> Table:
    """The table of a strategy. `weights` belong to y_{i-1}, y_{i-2}, ..., to the kept z_{i-1}, ... or to buffers."""
    starts, feeds, weights = _table(schedule)
    gains = np.zeros(0, np.float32) if schedule.gains is None else schedule.gains
    return Table(starts.astype(np.int32), feeds.astype(np.float32), weights.astype(np.float32), gains)


def _table(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    recurrence = schedule.recurrence
    if isinstance(recurrence, BufferRecurrence):
        one, scales = np.ones((1, 1)), recurrence.scales
        return np.zeros(1), one, -scales[None, :]
    starts, rows = _distinct(_rows(schedule))
    if isinstance(recurrence, OutputRecurrence):
        return starts, 1 / rows[:, :1], -rows[:, 1:] / rows[:, :1]
    kept = slice(1, 1 + schedule.kept_inputs)
    feeds = rows.copy()
    feeds[:, kept] = 0
    return starts, feeds, rows[:, kept]


def _distinct(blocks: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The first step of every run of equal rows, and the rows."""
    starts, rows, count = [], [], 0
    previous = np.full((1, 1), np.nan)
    for block in blocks:
        before = np.concatenate([np.broadcast_to(previous, (1, block.shape[1])), block[:-1]])
        new = np.flatnonzero(np.any(block != before, axis=1))
        starts.append(count + new)
        rows.append(block[new])
        previous, count = block[-1:], count + len(block)
    return np.concatenate(starts), np.concatenate(rows)


def _rows(schedule: Schedule) -> Iterator[np.ndarray]:
    """All rows of the recurrence, in blocks."""
    recurrence = schedule.recurrence
    assert not isinstance(recurrence, BufferRecurrence)
    for start in range(0, schedule.steps, _BLOCK):
        stop = min(start + _BLOCK, schedule.steps)
        if isinstance(recurrence, OutputRecurrence):
            yield _rows_of_columns(unscaled(schedule.strategy), start, stop)
        else:
            yield np.array([recurrence.row(i) for i in range(start, stop)])


def _rows_of_columns(strategy: Strategy, start: int, stop: int) -> np.ndarray:
    """Rows start ... stop - 1 of C, newest first, from its columns: much faster than one by one."""
    bands = strategy.bands
    first = max(0, start - bands + 1)
    columns = strategy.columns(first, stop)
    steps, r = np.arange(start, stop)[:, None], np.arange(bands)
    column = steps - r - first
    return np.where(steps >= r, columns[np.maximum(column, 0), r], 0.0)
