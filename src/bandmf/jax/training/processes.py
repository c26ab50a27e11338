"""The processes of a run: one alone, or all that jax.distributed knows."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bandmf.ledger.checks import check_process
from bandmf.randomness.key import Key


class Processes:
    """Which process this is, and the little that the processes tell each other."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.rank, self.world = jax.process_index(), jax.process_count()

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Let process 0 do something; its result, or its error, comes to every process. Not in a fork of one."""
        check_process(self._process)
        if self.world == 1:
            return action()
        result, error = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as raised:
                error = raised
        result, error = self._broadcast((result, error))
        if error is not None:
            raise error
        return result

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, on every one of them."""
        if self.world == 1:
            return [value]
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = multihost_utils.process_allgather(np.array(len(own))).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(own)] = own
        every = multihost_utils.process_allgather(padded).reshape(self.world, -1)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(every, sizes, strict=True)]

    def share_key(self, key: Key | None) -> Key:
        """The key of process 0."""
        if self.world == 1:
            return Key() if key is None else key
        return Key(self._broadcast((Key() if key is None else key).secret if self.rank == 0 else None))

    def _broadcast(self, value: Any) -> Any:
        """What process 0 has."""
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.array(len(own))))
        buffer = own if self.rank == 0 else np.zeros(size, np.uint8)
        return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())
