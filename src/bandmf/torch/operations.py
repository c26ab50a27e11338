"""One step of a schedule in torch operations: the CPU's fast path, and CUDA's where Triton is missing.

It works chunk by chunk, so that nothing of the tensor's size is allocated. On the CPU the chunks go to a few
threads of its own, each of which runs every operation alone. With torch's own threads each of the many short
operations would wait for all cores: no faster on two, and a hundredfold slower while another process has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier

import numpy as np
import torch

from bandmf.noise.normals import GROUP, chunks
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.torch.draw import Drawer

Work = Callable[[Drawer, int, int], None]
MOST_THREADS = 4  # more would wait for each other at Python's lock
SMALL = 1 << 15  # torch runs operations this short on one thread anyway


@dataclass(frozen=True)
class Slice:
    """This rank's part of one tensor: the coordinates in `region`, with vectors that are theirs alone.

    Histories of all slices on a device lie in one matrix, as do the prepared sums: they share their strides.
    """

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


class Operations:
    """Executes steps on one device."""

    def __init__(self, secret: bytes, rounds: int, device: torch.device) -> None:
        self._device = device
        self._threads = 1 if device.type != "cpu" else max(1, min(MOST_THREADS, torch.get_num_threads() // 2))
        self._drawers = [Drawer(secret, rounds, device) for _ in range(self._threads)]
        self._pool: ThreadPoolExecutor | None = None

    def layout(self, slices: list[Slice]) -> list[Slice]:
        """The slices of a run, as `advance` takes them."""
        return slices

    def advance(self, step: Step, layout: list[Slice], gradients: list[torch.Tensor], scale: float) -> None:
        """Take one step for all slices, whose flat gradients are given in the same order."""
        for one, gradient in zip(layout, gradients, strict=True):
            self._advance(step, one, gradient, scale)

    def _advance(self, step: Step, one: Slice, gradient: torch.Tensor, scale: float) -> None:
        region, history, prepared = one.region, one.history, one.prepared

        def work(drawer: Drawer, begin: int, end: int) -> None:
            y = drawer.white(step, one.tensor, region, begin, end)
            for slot, weight in step.reads:
                y.add_(history[slot, begin:end], alpha=weight)
            if step.prepared is not None:
                y.add_(prepared[step.prepared, begin:end])
                for k, weights in enumerate(step.forward, start=1):
                    later = prepared[step.prepared + k, begin:end]
                    for (slot, _), weight in zip(step.reads, weights, strict=True):
                        later.add_(history[slot, begin:end], alpha=weight)
            if step.store is not None:
                history[step.store, begin:end] = y
            for slot, decay in enumerate(step.decays):
                history[slot, begin:end].mul_(decay).add_(y)
            gradient[begin:end].add_(y, alpha=scale)  # computed in float32 or better, rounded once

        offset = region.start if region.contiguous else 0
        pieces = chunks(offset, offset + region.size, self._piece(region.size))
        self._share(work, [(begin - offset, end - offset) for begin, end in pieces])

    def prepare(self, matrix: np.ndarray, history: torch.Tensor, prepared: torch.Tensor) -> None:
        """prepared = matrix @ history: the look-ahead pass."""
        weights, slots = torch.from_numpy(matrix).to(self._device), matrix.shape[1]

        def work(drawer: Drawer, begin: int, end: int) -> None:
            torch.mm(weights, history[:slots, begin:end], out=prepared[:, begin:end])

        size = history.shape[1]
        with _full_precision():
            self._share(work, list(chunks(0, size, self._piece(size))))

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is; min and max pass NaN on, and need no memory of the gradient's size."""
        flat = gradient.reshape(-1)
        extremes: list[torch.Tensor] = []

        def work(drawer: Drawer, begin: int, end: int) -> None:
            extremes.extend(torch.aminmax(flat[begin:end]))

        self._share(work, list(chunks(0, len(flat), self._piece(len(flat)))))
        return torch.isfinite(torch.stack(extremes)).all()

    def _piece(self, size: int) -> int:
        """Coordinates per piece: whole groups, at most a chunk, and work for every thread."""
        each = -(-size // (self._threads * GROUP)) * GROUP
        return max(GROUP, min(Drawer.CHUNK, each))

    def _share(self, work: Work, pieces: list[tuple[int, int]]) -> None:
        """Do every piece once, on whichever thread is free."""
        if self._device.type != "cpu" or sum(end - begin for begin, end in pieces) <= SMALL:
            for begin, end in pieces:
                work(self._drawers[0], begin, end)
            return
        queue = iter(pieces)  # a list's iterator hands each piece to one thread only

        def worker(drawer: Drawer) -> None:
            with torch.no_grad():
                for begin, end in queue:
                    work(drawer, begin, end)

        list(self._workers().map(worker, self._drawers))

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            chosen = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(self._threads, "bandmf-noise", torch.set_num_threads, (1,))
            all_started = Barrier(self._threads)
            list(self._pool.map(lambda _: all_started.wait(), range(self._threads)))
            torch.set_num_threads(chosen)  # for the threads that others will start
        return self._pool


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in full float32, whatever the user has chosen for the model."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
