"""Ctrl-C and SIGTERM are delivered between steps, never in the middle of what must be whole.

Signals reach the main thread alone; in any other thread nothing here does anything.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C in here is answered at the end, also where that is an exception."""
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
    """Notes a SIGTERM while a run iterates, and lets it have its effect when all runs that do have saved.

    A second one has its effect at once: a run whose loop is not asked for its next item cannot save.
    """

    _listening: ClassVar[list[Termination]] = []  # several runs may take turns
    _before: ClassVar[Any] = None

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Termination:
        if _in_main_thread():
            if signal.getsignal(signal.SIGTERM) is not self._note:
                Termination._before = signal.signal(signal.SIGTERM, self._note)
            self.asked = any(each.asked for each in self._listening)
            self._listening.append(self)
        return self

    # Bound beforehand: an iterator may be closed when Python ends and names of modules are gone, or in any thread.
    def __exit__(self, *_: object, signal: Any = signal, os: Any = os, here: Any = threading) -> None:
        if self not in self._listening:
            return
        self._listening.remove(self)
        if self._listening:
            return
        if here.current_thread() is here.main_thread():
            self._stop(signal)
        if self.asked:
            os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def _note(number: int, frame: FrameType | None) -> None:
        if not Termination._listening or any(each.asked for each in Termination._listening):
            Termination._stop()
            os.kill(os.getpid(), signal.SIGTERM)
        for each in Termination._listening:
            each.asked = True

    @classmethod
    def _stop(cls, signal: Any = signal) -> None:
        # None: something that is not Python's was there before, which cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if cls._before is None else cls._before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
