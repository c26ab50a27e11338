"""One step of a schedule in torch operations: the CPU's fast path, and CUDA's where Triton is missing.

History is read for all tensors at once, in one or two long operations for which torch uses all cores: one core
cannot read memory fast enough. z is drawn chunk by chunk, in the cache, in short operations that one thread runs: were
they shared, every one of them would wait for all cores, a hundredfold slower while another process has one. (Two
threads of Python that both draw are no faster than one; they wait for each other at its lock.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bandmf.noise.normals import GROUP, chunks
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.torch.draw import Drawer


@dataclass(frozen=True)
class Slice:
    """This rank's part of one tensor: the coordinates in `region`, and their columns of the field's matrices."""

    tensor: int
    region: Region
    history: torch.Tensor
    prepared: torch.Tensor

    @property
    def first_group(self) -> int:
        return self.region.start // GROUP

    @property
    def last_group(self) -> int:
        """The first group that has nothing of the slice any more."""
        return -(-(self.region.start + self.region.size) // GROUP)


@dataclass(frozen=True, eq=False)
class Field:
    """All slices of one place, side by side in two matrices, so that one pass, or one launch, serves them all."""

    slices: list[Slice]
    history: torch.Tensor
    prepared: torch.Tensor


class Operations:
    """Executes steps on one device."""

    def __init__(self, secret: bytes, rounds: int, device: torch.device) -> None:
        self._device = device
        self._drawer = Drawer(secret, rounds, device)

    def layout(self, field: Field) -> Field:
        """The tensors of a run, as `advance` takes them."""
        return field

    def advance(self, step: Step, field: Field, gradients: list[torch.Tensor], scale: float) -> None:
        """Take one step for all slices, whose flat gradients are given in the same order."""
        if step.prepared is not None:
            _read_ahead(step, field.history, field.prepared)
        for one, gradient in zip(field.slices, gradients, strict=True):
            self._advance(step, one, gradient, scale)

    def _advance(self, step: Step, one: Slice, gradient: torch.Tensor, scale: float) -> None:
        history, prepared, target = _arrays(one.history), _arrays(one.prepared), _arrays(gradient)
        for begin, end in self._cut(one.region):
            y = self._drawer.white(step, one.tensor, one.region, begin, end)
            if step.prepared is not None:
                y += prepared[step.prepared, begin:end]
            else:
                for slot, weight in step.reads:
                    y += weight * history[slot, begin:end]
            if step.store is not None:
                history[step.store, begin:end] = y
            for slot, decay in enumerate(step.decays):
                history[slot, begin:end] *= decay
                history[slot, begin:end] += y
            y *= scale
            # Added in float32 or better, and rounded once.
            target[begin:end] += y if type(y) is type(target) else torch.from_numpy(y)

    def _cut(self, region: Region) -> Iterator[tuple[int, int]]:
        """Positions in a region, cut so that no group is drawn twice."""
        offset = region.start if region.contiguous else 0
        for begin, end in chunks(offset, offset + region.size, self._drawer.chunk):
            yield begin - offset, end - offset

    def prepare(self, matrix: np.ndarray, history: torch.Tensor, prepared: torch.Tensor) -> None:
        """prepared = matrix @ history: the look-ahead pass."""
        weights = torch.from_numpy(matrix).to(self._device)
        with _full_precision():
            torch.mm(weights, history[: matrix.shape[1]], out=prepared)

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is; min and max pass NaN on, and need no memory of the gradient's size."""
        values = _arrays(gradient)
        return torch.isfinite(
            torch.stack([torch.as_tensor(values.min()), torch.as_tensor(values.max())])
        ).all()


def _read_ahead(step: Step, history: torch.Tensor, prepared: torch.Tensor) -> None:
    """Add what this step reads to its prepared sum, which nothing else needs any more, and to the next ones."""
    assert step.prepared is not None
    slots = [slot for slot, _ in step.reads]
    all_weights = torch.tensor([[weight for _, weight in step.reads], *step.forward], device=history.device)
    first = 0
    for last in range(1, len(slots) + 1):
        if last == len(slots) or slots[last] != slots[last - 1] + 1:
            past = history[slots[first] : slots[last - 1] + 1].T  # neighbours, as there are at most two runs
            for row, weights in enumerate(all_weights[:, first:last], start=step.prepared):
                prepared[row].addmv_(past, weights)
            first = last


def _arrays(tensor: torch.Tensor) -> Any:
    """NumPy's view of a tensor, where it can have one: its short operations are cheaper, and run on one thread."""
    visible = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    return tensor.numpy() if visible else tensor


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in full float32, whatever the user has chosen for the model."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
