"""The paper's general banded strategy: C[i, j] = 0 unless 0 <= i - j < bands, every entry free.

Banded(columns),    columns[j, r] = C[j + r, j]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from bandmf import _check, band_columns
from bandmf._types import FloatArray
from bandmf.strategies.base import OutputRecurrence, Strategy
from bandmf.streaming import StreamingOperator, banded_inverse


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Banded(Strategy):
    """A banded strategy from its compact columns, shape (steps, bands).

    >>> Banded([[1.0, 0.5], [1.0, 0.0]]).materialize()
    array([[1. , 0. ],
           [0.5, 1. ]])
    """

    compact: FloatArray

    # Written out, since the argument's name is also that of the method every strategy has.
    def __init__(self, columns: FloatArray) -> None:
        compact = _check.array("columns", columns, 2)
        steps, bands = compact.shape
        _check.whole("bands", bands, 1, steps, f"steps={steps}")
        if (zero := np.flatnonzero(compact[:, 0] == 0)).size:
            raise ValueError(f"columns[{zero[0]}, 0]=0.0: the diagonal of C must not be zero")
        beyond = np.add.outer(np.arange(steps), np.arange(bands)) >= steps
        if np.any(compact[beyond]):
            raise ValueError(f"columns: entries [j, r] with j + r >= steps={steps} lie below C and must be zero")
        _check.moderate("columns", compact)
        object.__setattr__(self, "compact", compact)

    @property
    def steps(self) -> int:  # type: ignore[override]
        return len(self.compact)

    @property
    def bands(self) -> int:
        return self.compact.shape[1]

    def columns(self, start: int = 0, stop: int | None = None) -> FloatArray:
        return self.compact[start:stop]

    @property
    def recurrence(self) -> OutputRecurrence:
        return OutputRecurrence(partial(band_columns.row_of, self.compact), self.bands)

    def inverse(self) -> StreamingOperator:
        return banded_inverse(self.recurrence.row, self.bands, self.steps)
