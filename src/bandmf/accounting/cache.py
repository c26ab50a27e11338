"""The cache: answers kept on disk, shared by all processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bandmf._files import cache_folder, write_whole
from bandmf.accounting.events import Event

_SCHEME = 1  # raise it when the same inputs could give another number: old cache entries are then ignored


def cached(quantity: str, event: Event, delta: float, value: float, compute: Callable[[], float]) -> float:
    """What an earlier call, of any process, found for the same inputs; else compute and keep it."""
    question = {
        "quantity": quantity,
        "of": value,
        "delta": delta,
        **asdict(event),
        "scheme": _SCHEME,
        "dp_accounting": importlib.metadata.version("dp-accounting"),
    }
    text = json.dumps(question, sort_keys=True)
    folder = cache_folder("accounting")
    if folder is None:
        return compute()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    known = _read(path, text)
    if known is not None:
        return known
    answer = compute()
    _write(path, text, answer)
    return answer


def _seal(question: str, answer: float) -> str:
    return hashlib.sha256(f"{question} {answer!r}".encode()).hexdigest()


def _read(path: Path, question: str) -> float | None:
    """The stored answer, if the entry is whole and answers this very question."""
    try:
        entry = json.loads(path.read_bytes())
        answer = float(entry["answer"])
        return answer if entry["seal"] == _seal(question, answer) else None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _write(path: Path, question: str, answer: float) -> None:
    """Keep the answer, all or nothing: a reader never sees half a file. No cache is no error."""
    entry = {"question": json.loads(question), "answer": answer, "seal": _seal(question, answer)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, json.dumps(entry).encode())
    except OSError:
        pass
