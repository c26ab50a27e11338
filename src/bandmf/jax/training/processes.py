"""The processes of a run: one alone, or all that jax.distributed knows."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bandmf.ledger import processes


class Processes(processes.Processes):
    """Those of JAX."""

    def __init__(self) -> None:
        super().__init__(jax.process_index(), jax.process_count())

    def _of_first(self, value: Any) -> Any:
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.array(len(own))))
        buffer = own if self.rank == 0 else np.zeros(size, np.uint8)
        return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())

    def _of_all(self, value: Any) -> list[Any]:
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = multihost_utils.process_allgather(np.array(len(own))).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(own)] = own
        every = multihost_utils.process_allgather(padded).reshape(self.world, -1)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(every, sizes, strict=True)]
