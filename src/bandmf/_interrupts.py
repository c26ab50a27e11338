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
            if not self._listening:
                Termination._before = signal.signal(signal.SIGTERM, _note)
            self.asked = any(each.asked for each in self._listening)
            self._listening.append(self)
        return self

    def __exit__(self, *_: object) -> None:  # also when Python ends
        if self in self._listening:
            self._listening.remove(self)
            if not self._listening:
                _end_listening(pass_on=self.asked)


def _note(number: int, frame: FrameType | None) -> None:
    if any(each.asked for each in Termination._listening):
        _end_listening(pass_on=True)
    for each in Termination._listening:
        each.asked = True


def _end_listening(pass_on: bool, signal: Any = signal, os: Any = os) -> None:
    # None: something that is not Python's was there before, which cannot be put back.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if Termination._before is None else Termination._before)
    if pass_on:
        os.kill(os.getpid(), signal.SIGTERM)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
