"""Threads of the linear algebra libraries: none for small matrices, where they only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController

_WIDE = 512
_limited = Lock()


@contextmanager
def one_thread(width: int = 0) -> Iterator[None]:
    """Linear algebra without threads of its own, for matrices up to a few hundred wide.

    Inside of our threads, or on a busy machine, they wait for each other: up to ten times slower on two cores. The
    limit is the process's, so one block at a time sets it and takes it back; those within and beside it find it set.
    """
    if width > _WIDE or not _limited.acquire(blocking=False):
        yield
        return
    try:
        with _libraries().limit(limits=1, user_api="blas"):
            yield
    finally:
        _limited.release()


@cache
def _libraries() -> ThreadpoolController:
    """The libraries in this process that have threads; NumPy's are loaded by now."""
    return ThreadpoolController()
