"""One step of a schedule in torch operations: the CPU's fast path, and CUDA's where Triton is missing.

History is read for all tensors at once, in one or two long operations for which torch uses all cores: one core
cannot read memory fast enough. z is drawn chunk by chunk, in the cache, in short operations that one thread runs: were
they shared, every one of them would wait for all cores, a hundredfold slower while another process has one. (Two
threads of Python that both draw are no faster than one; they wait for each other at its lock.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bandmf.noise.normals import chunks
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.torch.noise.executor import Slice, Vectors
from bandmf.torch.noise.normals import Drawer
from bandmf.torch.noise.precision import exact


class TorchExecutor:
    """Takes steps in torch operations, on the device where the vectors are."""

    def __init__(self, secret: bytes, cipher_rounds: int, vectors: Vectors) -> None:
        self.vectors, self._device = vectors, vectors.history.device
        self._drawer = Drawer(secret, cipher_rounds, self._device)

    def ready(self, step: Step, gradients: list[torch.Tensor], scale: float) -> Callable[[], None]:
        return partial(self.advance, step, gradients, scale)

    def advance(self, step: Step, gradients: list[torch.Tensor], scale: float) -> None:
        """One step of all slices, whose flat gradients are given in the same order."""
        if step.prepared is not None:
            with exact():
                _read_ahead(step, self.vectors.history, self.vectors.prepared)
        for one, gradient in zip(self.vectors.slices, gradients, strict=True):
            self._advance(step, one, gradient, scale)

    def _advance(self, step: Step, one: Slice, gradient: torch.Tensor, scale: float) -> None:
        history, prepared, target = _arrays(one.history), _arrays(one.prepared), _arrays(gradient)
        for begin, end in self._cut(one.region):
            y, newest = self._drawer.white(step, one.tensor, one.region, begin, end)
            if step.prepared is not None:
                y += prepared[step.prepared, begin:end]
            else:
                for slot, weight in step.reads:
                    y += weight * history[slot, begin:end]
            if step.store is not None:
                history[step.store, begin:end] = y if newest is None else newest
            for slot, decay in enumerate(step.decays):
                history[slot, begin:end] *= decay
                history[slot, begin:end] += y
            y *= scale
            # Added in float32 or better, and rounded once.
            both_numpy = isinstance(target, np.ndarray) or not isinstance(y, np.ndarray)
            target[begin:end] += y if both_numpy else torch.from_numpy(y)

    def _cut(self, region: Region) -> Iterator[tuple[int, int]]:
        """Positions in a region, cut so that no group is drawn twice."""
        offset = region.start if region.contiguous else 0
        for begin, end in chunks(offset, offset + region.size, self._drawer.chunk):
            yield begin - offset, end - offset

    def prepare(self, matrix: np.ndarray) -> None:
        """prepared = matrix @ history: the look-ahead pass."""
        weights = torch.from_numpy(matrix).to(self._device)
        with exact():
            torch.mm(weights, self.vectors.history[: matrix.shape[1]], out=self.vectors.prepared)

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is; min and max pass NaN on, and need no memory of the gradient's size."""
        return torch.isfinite(torch.stack(torch.aminmax(gradient))).all()


def _read_ahead(step: Step, history: torch.Tensor, prepared: torch.Tensor) -> None:
    """Add what this step reads to its prepared sum, which nothing else needs any more, and to the next ones."""
    assert step.prepared is not None
    order = sorted(range(len(step.reads)), key=lambda k: step.reads[k][0])
    all_weights = [[weight for _, weight in step.reads], *step.forward]
    slots = np.array([step.reads[k][0] for k in order])
    for piece in np.split(np.arange(len(order)), np.flatnonzero(np.diff(slots) != 1) + 1):
        if not len(piece):
            continue  # the first step after a pass reads nothing
        past = history[slots[piece[0]] : slots[piece[-1]] + 1].T  # of neighbors: the ring is cut at most once
        for row, weights in enumerate(all_weights, start=step.prepared):
            chosen = torch.tensor([weights[order[k]] for k in piece], dtype=torch.float32, device=history.device)
            prepared[row].addmv_(past, chosen)


def _arrays(tensor: torch.Tensor) -> Any:
    """NumPy's view of a tensor, where it can have one: its short operations are cheaper, and run on one thread."""
    visible = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    return tensor.numpy() if visible else tensor
