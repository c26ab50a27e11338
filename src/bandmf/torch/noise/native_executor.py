"""One step of a schedule in the native library: the CPU's fast path, on as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bandmf.noise import native
from bandmf.noise.native import Memory
from bandmf.noise.schedule import Step
from bandmf.torch.noise.executor import Vectors


class NativeExecutor:
    """Takes steps of tensors on the CPU, one call for all of them."""

    def __init__(self, secret: bytes, cipher_rounds: int, vectors: Vectors) -> None:
        self.vectors = vectors
        parts = [
            native.Part(one.tensor, one.region, _memory(one.history), _memory(one.prepared)) for one in vectors.slices
        ]
        self._kernels = native.Kernels(secret, cipher_rounds, parts)

    def ready(self, step: Step, gradients: list[torch.Tensor], scale: float) -> Callable[[], None]:
        return partial(self.advance, step, gradients, scale)

    def advance(self, step: Step, gradients: list[torch.Tensor], scale: float) -> None:
        """One step of all slices, whose flat gradients are given in the same order."""
        places = [_place(gradient) for gradient in gradients]
        self._kernels.step(step, places, scale, torch.get_num_threads())

    def prepare(self, matrix: np.ndarray) -> None:
        """prepared = matrix @ history: the look-ahead pass."""
        history, prepared = self.vectors.history, self.vectors.prepared
        size, threads = history.shape[1], torch.get_num_threads()
        self._kernels.prepare(matrix, _memory(history), _memory(prepared), size, threads)

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is, in one read."""
        flat = gradient.contiguous()
        return torch.tensor(native.finite(*_place(flat), flat.numel(), torch.get_num_threads()))


def _memory(rows: torch.Tensor) -> Memory:
    return Memory(rows.data_ptr(), rows.stride(0))


def _place(numbers: torch.Tensor) -> tuple[int, str]:
    return numbers.data_ptr(), str(numbers.dtype).removeprefix("torch.")
