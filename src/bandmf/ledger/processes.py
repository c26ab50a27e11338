"""The processes of a run, and the little that they tell each other."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from bandmf.ledger.checks import check_process
from bandmf.randomness.key import Key


class Processes(ABC):
    """Which one of how many this is."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._process = os.getpid()

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Let the first process do something; its result, or its error, comes to every process. Not in a fork of it."""
        check_process(self._process)
        if self.world == 1:
            return action()
        result, error = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as raised:
                error = raised
        result, error = self._of_first((result, error))
        if error is not None:
            raise error
        return result

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, on every one of them."""
        return [value] if self.world == 1 else self._of_all(value)

    def share_key(self, key: Key | None) -> Key:
        """The key of the first process, which draws a fresh one if it has none."""
        return Key(self.on_first(lambda: (Key() if key is None else key).secret))

    @abstractmethod
    def _of_first(self, value: Any) -> Any:
        """What the first process has."""

    @abstractmethod
    def _of_all(self, value: Any) -> list[Any]:
        """What each of several has."""
