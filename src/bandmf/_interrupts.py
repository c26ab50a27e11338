"""Ctrl-C and SIGTERM at moments that suit a run: between steps, never in the middle of what must be whole.

Signals reach the main thread alone; in any other thread nothing here does anything.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C in here is answered at the end."""
    before = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(before):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        before(*arrived[0])


class Termination:
    """Notes a SIGTERM while a run iterates; `passed_on` lets it have its effect when the run has saved."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._listens = False

    def __enter__(self) -> Termination:
        if _in_main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._listens = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __exit__(self, *_: object, signal: Any = signal, os: Any = os) -> None:  # also when Python ends
        if not self._listens:
            return
        self._listens = False
        # None: something that is not Python's was there before, which cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        if self.asked:
            os.kill(os.getpid(), signal.SIGTERM)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
