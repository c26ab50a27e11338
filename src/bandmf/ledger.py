"""What a run has released: an append-only record, and the guards that rest on it.

The noise of a step depends on the key and the step alone. Two results of one step with the same noise but
different gradients reveal the difference of the gradients without any noise; so a released step may be run
again (after a crash) only if it releases the very same sum.

Each line of the file is a JSON object with the SHA-256 of the line before it in its `chain`: the first says
what the run is, each later one what was released. A line is on the disk before its noise is added.

Guarantees:
- a step is released once; the same sum again is a replay, an entry of its own; another sum is refused;
- steps are released in order and not past the plan;
- a run goes on only with the plan, key, clip norm, sampler and number of examples it began with;
- a line torn by a crash is dropped (its step was not released); any other damage is refused;
- one process at a time;
- the digests are keyed: they tell nothing about the data to whoever has only the ledger.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bandmf import _check
from bandmf._files import sync_folder
from bandmf.randomness.key import Key

_SIZE = 16  # bytes of a digest
_REVEALS = (
    "two results with the same noise reveal their difference: restart with the same code, data, machine and number "
    "of ranks, or begin a new run with a new key; if nobody ever saw anything that came of the steps from {0} on, "
    "say so with withdraw({0}, statement)"
)
_REMEDY = {
    "plan": "continue with the plan of the run, or begin another run in another folder",
    "key": "load the key of the run",
    "clip_norm": "the noise was planned for the clip norm of the run",
    "sampler": "the privacy of the plan rests on the batches of the sampler",
    "examples": "the data may not change during a run",
}


class Ledger:
    """The record of one run, in a file or, without a path, in memory.

    >>> ledger = Ledger(None, Key(), {"plan": "5f2c", "steps": 10})
    >>> ledger.release(0, b"indices", b"sum"), ledger.release(0, b"indices", b"sum")
    ('step', 'replay')
    >>> ledger.release(0, b"indices", b"other")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: step=0: was released before with another sum of gradients; ...
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: Key, run: Mapping[str, Any]) -> None:
        self._key = key.derive("ledger").secret
        self._steps = _check.whole("steps", run["steps"])
        self._released = bytearray()  # two digests for each step
        self._chain, self.entries, self.replays = "", 0, 0
        self._file: int | None = None
        self.run: dict[str, Any] = {}
        lines = [] if path is None else self._open(Path(path))
        for number, line in enumerate(lines):
            self._read(number, line, path)
        if lines:
            _expect(self.run, dict(run), path)
        else:
            self.run = dict(run)
            self._append({"kind": "run", **self.run})

    # --- what a run may do --------------------------------------------------------------------------------

    @property
    def steps_released(self) -> int:
        """How many steps have been released: the next new one is this."""
        return len(self._released) // (2 * _SIZE)

    def release(self, step: int, batch: bytes, total: bytes) -> str:
        """Record, on the disk, that the noisy `total` of this `batch` is about to be released.

        Returns "step", or "replay" if this very sum was released before; refuses anything else.
        """
        _check.whole("step", step, 0, self._steps - 1, remedy=f"the plan ends after steps={self._steps}")
        if step > self.steps_released:
            raise _check.fail(
                "step", step, f"must be at most {self.steps_released}: steps are released in order"
            )
        found, before = self._digest(batch) + self._digest(total), self._digests(step)
        if before and found != before:
            what = "sum of gradients" if found[:_SIZE] == before[:_SIZE] else "batch of examples"
            raise _check.fail("step", step, f"was released before with another {what}", _REVEALS.format(step))
        kind = "replay" if before else "step"
        batch_digest, sum_digest = found[:_SIZE].hex(), found[_SIZE:].hex()
        self._append({"kind": kind, "step": step, "batch": batch_digest, "sum": sum_digest})
        self._apply(kind, step, found)
        return kind

    def proof(self, step: int) -> str:
        """What a checkpoint before this step keeps, to show that it belongs to this ledger."""
        return self._digests(step - 1).hex() if step else ""

    def expect(self, step: int, proof: str) -> None:
        """Refuse a checkpoint of another run, or of steps that were withdrawn."""
        if step > self.steps_released or proof != self.proof(step):
            raise _check.fail(
                "step", step, f"the ledger has {self.steps_released} steps, and not the one before this checkpoint",
                "use the checkpoint and the ledger of one run, and none of steps that were withdrawn",
            )  # fmt: skip

    def withdraw(self, step: int, statement: str) -> None:
        """Take back all steps from this one on: only for results that nobody has seen, which you must state."""
        step = _check.whole("step", step, 0, self.steps_released)
        if not isinstance(statement, str) or not statement.strip():
            raise _check.fail("statement", statement, "must say why nobody can have seen these steps")
        self._append({"kind": "withdraw", "step": step, "statement": statement})
        self._apply("withdraw", step)

    def _digest(self, contents: bytes) -> bytes:
        return hashlib.blake2b(contents, key=self._key, digest_size=_SIZE).digest()

    def _digests(self, step: int) -> bytes:
        """Those of a released step; empty if it was not released."""
        return bytes(self._released[2 * _SIZE * step : 2 * _SIZE * (step + 1)])

    def close(self) -> None:
        """Let another process have the ledger."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # --- the file -----------------------------------------------------------------------------------------

    def _open(self, path: Path) -> list[bytes]:
        """The whole lines of the file, made if it is not there; what a crash tore off is removed."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(
                f"{path}: another process is running this run; wait for it or stop it"
            ) from None
        with os.fdopen(os.dup(self._file), "rb") as file:
            contents = file.read()
        whole = contents.rfind(b"\n") + 1
        if whole < len(contents):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        sync_folder(path.parent)
        return contents[:whole].splitlines()

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps({**entry, "chain": self._chain}).encode()
        if self._file is not None:
            before = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line + b"\n") <= len(line):
                    raise OSError("the disk is full")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, before)  # half a line must not come before the next
                raise
        self._chain = hashlib.sha256(line).hexdigest()
        self.entries += 1

    def _read(self, number: int, line: bytes, path: Any) -> None:
        try:
            entry = json.loads(line)
            good = entry.pop("chain") == self._chain and (entry["kind"] == "run") == (number == 0)
        except (ValueError, KeyError, AttributeError, TypeError):
            good = False
        if not good:
            raise ValueError(f"{path}: line {number + 1} was changed after it was written; restore the file")
        self._chain = hashlib.sha256(line).hexdigest()
        self.entries += 1
        kind = entry.pop("kind")
        if kind == "run":
            self.run = entry
        else:
            self._apply(kind, entry["step"], bytes.fromhex(entry.get("batch", "") + entry.get("sum", "")))

    def _apply(self, kind: str, step: int, found: bytes = b"") -> None:
        if kind == "withdraw":
            del self._released[2 * _SIZE * step :]
        elif kind == "replay":
            self.replays += 1
        else:
            self._released += found


def _expect(recorded: dict[str, Any], given: dict[str, Any], path: Any) -> None:
    given = json.loads(json.dumps(given))
    for name in sorted(recorded.keys() | given.keys(), key=lambda name: (name not in _REMEDY, name)):
        if recorded.get(name) != given.get(name):
            raise _check.fail(
                name,
                given.get(name),
                f"the run in {path} began with {recorded.get(name)!r}",
                _REMEDY.get(name, ""),
            )
