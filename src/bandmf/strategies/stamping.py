"""Stamping (Denisov, McMahan, Rush, Smith, Thakurta 2022): a strategy for one epoch, repeated in each epoch.

    C = diag(C_1, C_1, ..., C_1),    one block C_1 for each epoch

Noise is correlated within an epoch and starts afresh in the next. An example that takes part once in each
of k epochs meets k blocks that share no row, so its sensitivity is sqrt(k) times that of one epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.strategies.base import BufferRecurrence, InputRecurrence, OutputRecurrence, ScaledRecurrence, Strategy
from bandmf.strategies.scaled import Scaled
from bandmf.streaming import Matrices, StreamingOperator


def stamping(strategy: Strategy, epochs: int) -> Stamped:
    """`strategy`, made for the steps of one epoch, used again in each of `epochs` epochs.

    >>> from bandmf.strategies.toeplitz import BandedToeplitz
    >>> stamping(BandedToeplitz([1.0, 0.5], steps=2, normalize_columns=False), epochs=2).materialize()
    array([[1. , 0. , 0. , 0. ],
           [0.5, 1. , 0. , 0. ],
           [0. , 0. , 1. , 0. ],
           [0. , 0. , 0.5, 1. ]])
    """
    return Stamped(strategy, epochs)


@dataclass(frozen=True, eq=False, repr=False)
class Stamped(Strategy):
    """Block-diagonal: `epochs` copies of `epoch`."""

    epoch: Strategy
    epochs: int

    def __post_init__(self) -> None:
        if not isinstance(self.epoch, Strategy):
            raise _check.fail("strategy", self.epoch, "must be a strategy for the steps of one epoch")
        if isinstance(self.epoch, Scaled):
            raise _check.fail("strategy", self.epoch, "must not be scaled", "scale what stamping() returns")
        object.__setattr__(self, "epochs", _check.whole("epochs", self.epochs))

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.epoch.steps * self.epochs

    @property
    def bands(self) -> int:
        return self.epoch.bands

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        places = np.array(range(self.steps)[start:stop], dtype=int) % self.epoch.steps
        return self.epoch.columns()[places]

    def column_norms(self) -> FloatArray:
        return np.tile(self.epoch.column_norms(), self.epochs)

    def largest_column_norm(self) -> float:
        return self.epoch.largest_column_norm()

    def equal_column_norms(self) -> bool:
        return self.epoch.equal_column_norms()

    def sensitivity_error(self, separation: int, count: int) -> float:
        return count * self.epoch.sensitivity_error(1, 1)

    @property
    def recurrence(self) -> OutputRecurrence | InputRecurrence:
        """That of one epoch; its rows are zero before the epoch began, so nothing is carried over."""
        length, inner = self.epoch.steps, self.epoch.recurrence
        assert not isinstance(inner, ScaledRecurrence)
        if isinstance(inner, BufferRecurrence):  # buffers cannot be emptied: keep the outputs instead
            columns = self.epoch.columns()
            return OutputRecurrence(lambda i: band_columns.row_of(columns, i % length), self.bands)
        row = inner.row
        return type(inner)(lambda i: row(i % length), inner.bands)

    def inverse(self) -> StreamingOperator:
        return _restarted(self.epoch.inverse(), self.epoch.steps, self.steps)

    @property
    def buffers(self) -> int:
        return self.epoch.buffers


def _restarted(operator: StreamingOperator, length: int, steps: int) -> StreamingOperator:
    """`operator` with its state thrown away every `length` steps."""

    def init(shape: tuple[int, ...]) -> Any:
        return 0, operator.init(shape)

    def step(state: Any, z: FloatArray) -> tuple[FloatArray, Any]:
        i, inner = state
        y, inner = operator.step(operator.init(z.shape) if i % length == 0 else inner, z)
        return y, (i + 1, inner)

    inner_matrices = operator.matrices
    if inner_matrices is None:
        return StreamingOperator(operator.buffers, init, step, None, steps)

    def matrices(i: int) -> Matrices:
        F, G, H, D = inner_matrices(i % length)
        keep = float((i + 1) % length != 0)
        return Matrices(keep * F, keep * G, H, D)

    return StreamingOperator(operator.buffers, init, step, matrices, steps)
