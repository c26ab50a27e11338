"""What a run has released: an append-only record, and the guards that rest on it.

The noise of a step depends on the key, the run and the step alone. Two results of one step with the same noise but
different gradients reveal the difference of the gradients without any noise; so a released step may be run
again (after a crash) only if it releases the very same sum.

Each line of the file is a JSON object whose `chain` is a keyed digest of itself and of all lines before it: the first
says what the run is, each later one what was released. A line is on the disk before its noise is added. The first line
holds the run's random id; the keys of the run derive from it and from the user's key, so that a key alone repeats
nothing. It also says where file and folder lie (device and inode), so that a copy is noticed.

Guarantees:
- a step is released once; the same sum again is a replay, an entry of its own; another sum is refused;
- steps are released in order and not past the plan;
- a run goes on only with the plan, key, clip norm, sampler and number of examples it began with;
- the file appears with its first line or not at all; a later line torn by a crash is dropped (its step was not
  released); any other change of a line is refused. Whole lines lost at the end are noticed only by what knows of them:
  see `knows`;
- a ledger in another place is refused until it is stated whether it moved or was copied; a copy is another run;
- one process at a time, and not a fork of it;
- the digests are keyed: they tell nothing about the data to whoever has only the ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bandmf import _check
from bandmf._files import sync_folder
from bandmf.randomness.key import Key

_SIZE = 16  # bytes of a digest
_BOOKKEEPING = (
    "kind",
    "run_id",
    "place",
    "copied_from",
)  # of the first line; the rest is what the run was given
_REVEALS = (
    "two results with the same noise reveal their difference: restart with the same code, data, machine and number "
    "of ranks, or begin a new run in another folder; if nobody ever saw anything that came of the steps from {0} on, "
    "say so with withdraw({0}, statement)"
)
_REMEDY = {
    "plan": "continue with the plan of the run, or begin another run in another folder",
    "key": "load the key of the run",
    "clip_norm": "the noise was planned for the clip norm of the run",
    "sampler": "the privacy of the plan rests on the batches of the sampler",
    "examples": "the data may not change during a run",
}
_MOVED = (
    "if the original is gone, say so with moved='moved'; if it may still be used, moved='copied' begins a run of its "
    "own from these weights, whose privacy is spent in addition"
)


def _fresh_run_id() -> str:
    """128 bits of the operating system. Tests that need two equal runs replace this function; nothing else does."""
    return os.urandom(16).hex()


class Ledger:
    """The record of one run, in a file or, without a path, in memory.

    >>> ledger = Ledger(None, Key(), {"plan": "5f2c", "steps": 10})
    >>> ledger.release(0, b"indices", b"sum"), ledger.release(0, b"indices", b"sum")
    ('step', 'replay')
    >>> ledger.release(0, b"indices", b"other")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: step=0: was released before with another sum of gradients; ...

    Without `run` it is opened for reading, and `begin(run)` comes later: what a run is given (its sampler) can depend
    on `run_key`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        key: Key,
        run: Mapping[str, Any] | None = None,
        moved: str | None = None,
    ) -> None:
        self._user_key, self._path, self._process = key, None if path is None else Path(path), os.getpid()
        self._moved = _check.choice("moved", moved, (None, "moved", "copied"))
        self._file: int | None = None
        self._forget(_fresh_run_id())
        try:
            lines = self._open() if self._path is not None and self._path.exists() else []
            for number, line in enumerate(lines):
                self._read(number, line)
            self._check_place()
            if run is not None:
                self.begin(run)
        except BaseException:
            self.close()
            raise

    def _forget(self, run_id: str) -> None:
        """Be the empty ledger of this run."""
        self.run_id, self.run_key = run_id, self._user_key.for_run(run_id)
        self._secret = self.run_key.derive("ledger").secret
        self.run: dict[str, Any] = {}
        self._released, self._chains = (
            bytearray(),
            bytearray(),
        )  # two digests for each step; one for each line
        self._place: dict[str, Any] | None = None
        self.copied_from: dict[str, Any] | None = None
        self.replays = 0

    # --- the beginning ------------------------------------------------------------------------------------

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write the first line of a new run; of one that is on record, check that it goes on as it began."""
        self._check_process()
        self._steps = _check.whole("steps", run["steps"])
        if self.entries:
            _expect(self.run, dict(run), self._path)
            if self._moved is not None:
                self._append({"kind": "moved", "place": self._here(self._file)})
        else:
            self.run = dict(run)
            self._create()

    def copy(self) -> None:
        """Become the ledger of a new run, which the one on record is the ancestor of; `begin` replaces the file."""
        ancestor = {
            "run_id": self.run_id,
            "number": self.number,
            "steps": [*self.inherited_steps, self.steps_released],
        }
        self._forget(_fresh_run_id())
        self.copied_from = ancestor

    def key_of(self, run_id: str) -> Key | None:
        """The key of this run or of the one that it was copied from; None for any other."""
        known = {self.run_id, self.copied_from["run_id"] if self.copied_from else self.run_id}
        return self._user_key.for_run(run_id) if run_id in known else None

    def _create(self) -> None:
        entry: dict[str, Any] = {"kind": "run", "run_id": self.run_id}
        if self.copied_from is not None:
            entry["copied_from"] = self.copied_from
        if self._path is None:
            self._append({**entry, **self.run})
            return
        # Complete before it has its name, so that a crash leaves a run that began or none.
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        original, self._file = (
            self._file,
            os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600),
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._append({**entry, "place": self._here(self._file), **self.run})
            self._publish(draft, original is not None)
        finally:
            draft.unlink(missing_ok=True)
            if original is not None:
                os.close(original)
        sync_folder(self._path.parent)

    def _publish(self, draft: Path, replace: bool) -> None:
        assert self._path is not None
        if not replace:
            try:
                os.link(draft, self._path)
            except (FileExistsError, FileNotFoundError):
                raise RuntimeError(f"{self._path}: another process began a run there just now") from None
            return
        assert self.copied_from is not None
        with contextlib.suppress(FileExistsError):  # a copy that was interrupted here
            os.link(self._path, self._path.with_name(f"copied-{self.copied_from['run_id']}.jsonl"))
        os.replace(draft, self._path)

    def _here(self, file: int | None) -> dict[str, Any]:
        """Where folder and file are."""
        assert self._path is not None
        assert file is not None
        folder, own = os.stat(self._path.parent), os.fstat(file)
        return {"folder": [folder.st_dev, folder.st_ino], "ledger": [own.st_dev, own.st_ino]}

    def _check_place(self) -> None:
        if self._file is None:
            if self._moved is not None:
                raise _check.fail(
                    "moved", self._moved, f"there is no run in {self._path}", "leave moved= out"
                )
            return
        here, folder = self._here(self._file), str(self._path and self._path.parent)
        if here == self._place and self._moved is not None:
            raise _check.fail(
                "moved", self._moved, f"{folder} lies where its ledger says it does", "leave moved= out"
            )
        if here != self._place and self._moved is None:
            raise _check.fail(
                "moved", None, f"{folder} was moved, copied or restored since its run began, and a copy that goes on "
                "beside its original uses the same noise for different sums", _MOVED,
            )  # fmt: skip

    # --- what a run may do --------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """How many lines there are."""
        return len(self._chains) // _SIZE

    @property
    def number(self) -> int:
        """As `entries`, and larger than any such number of the run that this one was copied from."""
        return self.entries + (self.copied_from["number"] if self.copied_from else 0)

    @property
    def steps_released(self) -> int:
        """How many steps have been released: the next new one is this."""
        return len(self._released) // (2 * _SIZE)

    @property
    def inherited_steps(self) -> list[int]:
        """How many steps the runs had released that this one was copied from, oldest first."""
        return list(self.copied_from["steps"]) if self.copied_from else []

    def release(self, step: int, batch: bytes, total: bytes) -> str:
        """Record, on the disk, that the noisy `total` of this `batch` is about to be released.

        Returns "step", or "replay" if this very sum was released before; refuses anything else.
        """
        self._check_process()
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

    def chain(self, entries: int | None = None) -> str:
        """The digest of the first so many lines: of all of them, unless told."""
        end = _SIZE * (self.entries if entries is None else entries)
        return bytes(self._chains[end - _SIZE : end]).hex()

    def knows(self, entries: int, chain: str) -> bool:
        """Whether the first so many lines have this digest. If not, lines were lost that a checkpoint knew."""
        return 0 < entries <= self.entries and self.chain(entries) == chain

    def withdraw(self, step: int, statement: str) -> None:
        """Take back all steps from this one on: only for results that nobody has seen, which you must state."""
        step = _check.whole("step", step, 0, self.steps_released)
        if not isinstance(statement, str) or not statement.strip():
            raise _check.fail("statement", statement, "must say why nobody can have seen these steps")
        self._append({"kind": "withdraw", "step": step, "statement": statement})
        self._apply("withdraw", step)

    def _digest(self, contents: bytes) -> bytes:
        return hashlib.blake2b(contents, key=self._secret, digest_size=_SIZE).digest()

    def _digests(self, step: int) -> bytes:
        """Those of a released step; empty if it was not released."""
        return bytes(self._released[2 * _SIZE * step : 2 * _SIZE * (step + 1)])

    def _check_process(self) -> None:
        check_process(self._process)

    def close(self) -> None:
        """Let another process have the ledger."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    # --- the file -----------------------------------------------------------------------------------------

    def _open(self) -> list[bytes]:
        """The whole lines of the file; what a crash tore off its end is removed."""
        assert self._path is not None
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(
                os.fstat(self._file), os.stat(self._path)
            )  # it may have been replaced meanwhile
        except BlockingIOError:
            mine = False
        if not mine:
            raise RuntimeError(f"{self._path}: another process is running this run; wait for it or stop it")
        with os.fdopen(os.dup(self._file), "rb") as file:
            contents = file.read()
        whole = contents.rfind(b"\n") + 1
        if not whole:
            raise ValueError(f"{self._path}: has no first line, so it was damaged; restore the file")
        self._torn = len(contents) - whole
        return contents[:whole].split(b"\n")[:-1]

    def _append(self, entry: dict[str, Any]) -> None:
        self._check_process()
        chain = self._link(entry)
        line = json.dumps({**entry, "chain": chain.hex()}).encode()
        if self._file is not None:
            before = os.fstat(self._file).st_size - self._torn
            if self._torn:  # only now, so that a run that is refused leaves the file as it was
                os.ftruncate(self._file, before)
                self._torn = 0
            try:
                if os.write(self._file, line + b"\n") <= len(line):
                    raise OSError("the disk is full")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, before)  # half a line must not come before the next
                raise
        self._chains += chain

    _torn = 0  # bytes at the end of the file that are no whole line

    def _link(self, entry: dict[str, Any]) -> bytes:
        """The keyed digest of an entry and, through that of the line before, of all before it."""
        return self._digest(bytes(self._chains[-_SIZE:]) + json.dumps(entry).encode())

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            chain = bytes.fromhex(entry.pop("chain"))
            if number == 0:
                self._forget(entry["run_id"])
            good = chain == self._link(entry) and (entry["kind"] == "run") == (number == 0)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            good = False
        if not good:
            other = ", or with another key" if number == 0 else ""
            raise ValueError(
                f"{self._path}: line {number + 1} was changed after it was written{other}; restore the file"
            )
        self._chains += chain
        kind = entry["kind"]
        if "place" in entry:
            self._place = entry["place"]
        if kind == "run":
            self.copied_from = entry.get("copied_from")
            self.run = {name: value for name, value in entry.items() if name not in _BOOKKEEPING}
        elif kind != "moved":
            self._apply(kind, entry["step"], bytes.fromhex(entry.get("batch", "") + entry.get("sum", "")))

    def _apply(self, kind: str, step: int, found: bytes = b"") -> None:
        if kind == "withdraw":
            del self._released[2 * _SIZE * step :]
        elif kind == "replay":
            self.replays += 1
        else:
            self._released += found


def check_process(opened_by: int) -> None:
    """Refuse to release anything in a fork of the process that opened the run."""
    if os.getpid() != opened_by:
        raise RuntimeError(
            f"this run was opened by process {opened_by}, and this is process {os.getpid()}, a fork of it: both would "
            "use the same noise for different sums; call make_private in the process that trains"
        )


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
