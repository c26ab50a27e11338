"""Answers kept on disk, shared by the user's processes: each with its question, sealed, so that damage is noticed.

The seal is no secret. Answers count only from folders and files that the user, or root, alone can write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bandmf._files import cache_folder, make_own_folder, read_own, write_first, write_whole

Read = Callable[[Any], Any]  # from an answer as it is kept to what it means
# What damaged answers, and those of other versions, come to.
_NO_ANSWER = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


def _as_kept(answer: Any) -> Any:
    return answer


def recall(kind: str, question: dict[str, Any], read: Read = _as_kept) -> Any:
    """The answer that was kept for this very question, every digit of it; None if there is none.

    One that is damaged, or that `read` fails for, is none.
    """
    text = json.dumps(question, sort_keys=True)
    try:
        path = _path(kind, text)
        entry = {} if path is None else json.loads(read_own(path))
        answer = entry["answer"]
        whole = entry["question"] == text and entry["seal"] == _seal(text, answer)
        return read(answer) if whole else None
    except _NO_ANSWER:
        return None


def remember(kind: str, question: dict[str, Any], answer: Any, read: Read = _as_kept) -> Any:
    """Keep an answer (JSON values), unless another process was first; the one that all will recall.

    All or nothing: a reader never sees half a file. No cache is no error.
    """
    text = json.dumps(question, sort_keys=True)
    path = _path(kind, text)
    if path is None:
        return read(answer)
    entry = json.dumps({"question": text, "answer": answer, "seal": _seal(text, answer)}).encode()
    try:
        make_own_folder(path.parent)
        if not write_first(path, entry, mode=0o600):
            if (known := recall(kind, question, read)) is not None:
                return known
            write_whole(path, entry, mode=0o600)  # that was none
    except OSError:
        pass
    return read(answer)


def once(kind: str, question: dict[str, Any], compute: Callable[[], Any], read: Read = _as_kept) -> Any:
    """What was kept, or what `compute` gives, which is then kept. Of several processes one computes; others wait."""
    answer = recall(kind, question, read)
    if answer is not None:
        return answer
    with _alone(_path(kind, json.dumps(question, sort_keys=True))):
        answer = recall(kind, question, read)
        if answer is None:
            answer = remember(kind, question, compute(), read)
    return answer


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """No other process is here with the same path; without a cache, or locks, it may be."""
    try:
        import fcntl

        if path is None:
            raise OSError
        make_own_folder(path.parent)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below)
    except (ImportError, OSError):
        yield
        return
    with lock:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path(kind: str, text: str) -> Path | None:
    folder = cache_folder(kind)
    return None if folder is None else folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _seal(text: str, answer: Any) -> str:
    return hashlib.sha256(f"{text} {json.dumps(answer, sort_keys=True)}".encode()).hexdigest()
