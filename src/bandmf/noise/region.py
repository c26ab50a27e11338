"""Which coordinates of a global tensor a worker holds: a span, or a box of the tensor in C order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Region:
    """Spans of consecutive coordinates, all of `length`, in rising order; local order is span by span.

    >>> Region.box((4, 6), offset=(1, 2), shape=(2, 3)).coordinates(0, 6)
    array([ 8,  9, 10, 14, 15, 16])
    """

    starts: npt.NDArray[np.int64]
    length: int

    @staticmethod
    def span(start: int, stop: int) -> Region:
        """The coordinates start ... stop - 1."""
        return Region(np.array([start], np.int64), stop - start)

    @staticmethod
    def box(whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Region:
        """The box offset ... offset + shape of a tensor of shape `whole`."""
        if math.prod(shape) == 0:
            return Region.span(0, 0)
        dimensions = len(whole)
        # Trailing dimensions held in full make spans longer; the first cut one ends them.
        cut = next((k for k in reversed(range(dimensions)) if shape[k] != whole[k]), 0)
        strides = [math.prod(whole[k + 1 :]) for k in range(dimensions)]
        starts = np.zeros(1, np.int64)
        for k in range(cut):
            steps = (offset[k] + np.arange(shape[k], dtype=np.int64)) * strides[k]
            starts = np.add.outer(starts, steps).reshape(-1)
        first = offset[cut] * strides[cut] if dimensions else 0
        return Region(starts + first, math.prod(shape[cut:]))._joined()

    def _joined(self) -> Region:
        """One span where the spans touch, as they do when only the first dimension is cut."""
        if len(self.starts) > 1 and np.all(np.diff(self.starts) == self.length):
            return Region(self.starts[:1], self.length * len(self.starts))
        return self

    @property
    def size(self) -> int:
        return len(self.starts) * self.length

    @property
    def contiguous(self) -> bool:
        return len(self.starts) == 1

    @property
    def start(self) -> int:
        """The first coordinate."""
        return int(self.starts[0])

    def coordinates(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The global coordinates of the local positions begin ... end - 1."""
        local = np.arange(begin, end, dtype=np.int64)
        return self.starts[local // self.length] + local % self.length
