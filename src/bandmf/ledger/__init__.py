"""What a run has released: an append-only record, and the guards that rest on it.

The noise of a step depends on the key, the run and the step alone. Two results of one step with different gradients
reveal their difference without any noise; so a released step may be taken again only if it releases the same sum.

Each line of the file is a JSON object whose `chain` is a keyed digest of itself and of all lines before it: the first
says what the run is, each later one what was released. A line is on the disk before its noise is added. The first line
holds the run's random id; the keys of the run derive from it and from the user's key, so that a key alone repeats
nothing. It also says where file and folder lie (device and inode), so that a copy is noticed.

Guarantees:
- a step is released once; the same sum again is a replay, an entry of its own; another sum is refused;
- steps are released in order and not past the plan;
- steps that are taken at once are reserved before, and recorded after; until then only the same chunk is permitted;
- a run goes on only with the plan, key, clip norm, sampler and number of examples it began with;
- the file appears with its first line or not at all; a later line torn by a crash is dropped (its step was not
  released); any other change of a line is refused. Whole lines lost at the end are noticed only by what knows of them:
  see `knows`;
- a ledger in another place is refused until it is stated whether it moved or was copied; a copy is another run;
- one process at a time, and not a fork of it;
- the digests are keyed, and depend on the step: the ledger alone does not even tell that two batches are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bandmf import _check
from bandmf.ledger.checks import (
    REVEALS,
    Recorded,
    ReleasedOtherwiseError,
    check_place,
    check_process,
    expect_same,
    one_at_a_time,
)
from bandmf.ledger.file import LockedLines, Place
from bandmf.randomness.key import Key

_FORMAT = 2  # since when a digest depends on the step, too
_SIZE = 16  # bytes of a digest
_CHAIN = b', "chain": "'  # what comes before it, at the end of a line
# Of the first line; the rest of it is what the run was given.
_BOOKKEEPING = ("kind", "format", "run_id", "place", "copied_from", "chain")


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
    bandmf.ledger.checks.ReleasedOtherwiseError: step=0: was released before with another sum of gradients; ...

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
        self._user_key, self._process = key, os.getpid()
        self._lock, self._interrupted = threading.RLock(), False
        self._moved = _check.choice("moved", moved, (None, "moved", "copied"))
        self._file = None if path is None else LockedLines(Path(path))
        self._forget(_fresh_run_id())
        try:
            if self._file is not None and self._file.path.exists():
                for number, line in enumerate(self._file.read()):
                    self._read(number, line)
            self._check_place()
            if run is not None:
                self.begin(run)
        finally:
            if not self._begun:
                self.close()  # until `begin`; whatever fails before that leaves no lock behind

    def _forget(self, run_id: str) -> None:
        """Be the empty ledger of this run."""
        self.run_id, self.run_key = run_id, self._user_key.for_run(run_id)
        self._secret = self.run_key.derive("ledger").secret
        self.run: dict[str, Any] = {}
        self._released = bytearray()  # two digests for each step
        self._chains = bytearray()  # one for each line
        self._place: Place | None = None
        self.copied_from: dict[str, Any] | None = None
        # Chunks, each with its first step, its end and what goes in: the last one, and all that may be taken again.
        self._reserved: tuple[int, int, str] | None = None
        self.replays = 0
        self._begun = False
        self._chunks: set[tuple[int, int, str]] = set()

    # --- the beginning ------------------------------------------------------------------------------------

    @one_at_a_time
    def begin(self, run: Mapping[str, Any]) -> None:
        """Write the first line of a new run; of one that is on record, check that it goes on as it began."""
        self._check_process()
        steps = _check.whole("steps", run["steps"])
        path = self._file and self._file.path
        if self._file is not None:
            self._file.take_up()
        try:
            if self.entries:
                expect_same(self.run, dict(run), path)
            elif self.copied_from is not None:
                expect_same({"plan": self.copied_from["plan"]}, {"plan": run.get("plan")}, path)
            self.run = dict(run)
            self._steps, self._begun = steps, True
            if not self.entries:
                self._create()
            elif self._moved is not None and self._file is not None:
                self._append({"kind": "moved", "place": self._file.place()})
        except BaseException:
            self.close()
            raise

    def copy(self) -> None:
        """Become the ledger of a new run, which the one on record is the ancestor of; `begin` replaces the file."""
        ancestor = {
            "run_id": self.run_id,
            "plan": self.run.get("plan"),  # without which nobody could tell what those steps have spent
            "number": self.number,
            "steps": [*self.inherited_steps, self.steps_spent],
        }
        self._forget(_fresh_run_id())
        self.copied_from = ancestor

    def key_of(self, run_id: str) -> Key | None:
        """The key of this run or of the one that it was copied from; None for any other."""
        known = {self.run_id, self.copied_from["run_id"] if self.copied_from else self.run_id}
        return self._user_key.for_run(run_id) if run_id in known else None

    def _create(self) -> None:
        entry: dict[str, Any] = {"kind": "run", "format": _FORMAT, "run_id": self.run_id}
        if self.copied_from is not None:
            entry["copied_from"] = self.copied_from
        if self._file is None:
            self._append({**entry, **self.run})
            return

        def first_line(place: Place) -> bytes:
            return self._line({**entry, "place": place, **self.run})

        kept = None
        if self.copied_from is not None:
            kept = self._file.path.with_name(f"copied-{self.copied_from['run_id']}.jsonl")
        self._file.create(first_line, kept)

    def _check_place(self) -> None:
        if self._file is None or not self.entries:
            if self._moved is not None:
                raise _check.fail("moved", self._moved, "there is no run to go on with", "leave moved= out")
            return
        check_place(self._file.path.parent, self._file.place() == self._place, self._moved)

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
    def steps_spent(self) -> int:
        """As `steps_released`, with those of a chunk that did not finish: they may have been seen."""
        return self._pending[1] if self._pending else self.steps_released

    @property
    def inherited_steps(self) -> list[int]:
        """How many steps the runs had released that this one was copied from, oldest first."""
        return list(self.copied_from["steps"]) if self.copied_from else []

    @one_at_a_time
    def release(self, step: int, batch: bytes, total: bytes) -> str:
        """Record, on the disk, that the noisy `total` of this `batch` is about to be released.

        Returns "step", or "replay" if this very sum was released before; refuses anything else.
        """
        self._check_process()
        self._check_step(step)
        if self._pending and step >= self._pending[0]:
            raise self._unfinished(step)
        return self._release(step, batch, total)

    @one_at_a_time
    def reserve(self, step: int, count: int, inputs: bytes) -> None:
        """Record, on the disk, that `count` steps from this one on are about to be taken at once, as a chunk.

        Their sums are known only when their noise has been added, and `finish` records them then. `inputs` is all that
        decides them. Until then nothing but this chunk, with these inputs, may be taken: its noise may be known.
        """
        self._check_process()
        self._check_step(step)
        end = step + _check.whole("count", count, 1, self._steps - step, "steps of the plan that are left")
        chunk = step, end, self._digest(inputs, step, b"inputs").hex()
        if self._pending and end > self._pending[0] and chunk != self._pending:
            raise self._unfinished(step)
        if step < self.steps_released and chunk not in self._chunks:  # its sums would show it too late
            what = "was released before, and not by this chunk with this program, these weights and batches"
            raise ReleasedOtherwiseError(str(_check.fail("step", step, what, REVEALS)))
        if end > self.steps_released and chunk != self._pending:
            self._append({"kind": "reserve", "step": step, "count": count, "inputs": chunk[2]})
            self._reserve(chunk)

    @one_at_a_time
    def finish(self, step: int, sums: list[tuple[bytes, bytes]]) -> None:
        """Record the (batch, total) of every step of a chunk that was reserved, from this step on."""
        self._check_process()
        self._check_step(step)
        if step + len(sums) > self.steps_spent:
            raise _check.fail("count", len(sums), f"only the steps before {self.steps_spent} were reserved")
        for number, (batch, total) in enumerate(sums, start=step):
            self._release(number, batch, total)

    def recorded(self, step: int) -> Recorded | None:
        """What began at this step; None for a step that is new."""
        if step >= self.steps_spent:
            return None
        ends = [end for first, end, _ in self._chunks if first == step]
        pending = self._pending is not None and self._pending[0] == step
        return Recorded(max(ends), True, pending) if ends else Recorded(step + 1, False, False)

    def _reserve(self, chunk: tuple[int, int, str]) -> None:
        self._reserved = chunk
        self._chunks.add(chunk)

    @property
    def _pending(self) -> tuple[int, int, str] | None:
        """The chunk that was reserved and did not finish."""
        return self._reserved if self._reserved and self.steps_released < self._reserved[1] else None

    def _unfinished(self, step: int) -> ReleasedOtherwiseError:
        assert self._pending is not None
        first, end, _ = self._pending
        told = _check.fail(
            "step", step, f"the steps {first} to {end - 1} were begun as one chunk that did not end, and their noise "
            "may be known", "take just this chunk again, from the same weights, with the same batches and program; "
            + REVEALS,
        )  # fmt: skip
        return ReleasedOtherwiseError(str(told))

    def _check_step(self, step: int) -> None:
        _check.whole("step", step, 0, self._steps - 1, remedy=f"the plan ends after steps={self._steps}")
        if step > self.steps_released:
            raise _check.fail("step", step, f"must be at most {self.steps_released}: steps are released in order")

    def _release(self, step: int, batch: bytes, total: bytes) -> str:
        found = self._digest(batch, step, b"batch") + self._digest(total, step, b"sum")
        before = self._digests(step)
        if before and found != before:
            what = "sum of gradients" if found[:_SIZE] == before[:_SIZE] else "batch of examples"
            told = _check.fail("step", step, f"was released before with another {what}", REVEALS)
            raise ReleasedOtherwiseError(str(told))
        kind = "replay" if before else "step"
        self._append({"kind": kind, "step": step, "batch": found[:_SIZE].hex(), "sum": found[_SIZE:].hex()})
        self._apply(kind, found)
        return kind

    def proof(self, step: int) -> str:
        """What a checkpoint before this step keeps, to show that it belongs to this ledger."""
        return self._digests(step - 1).hex() if step else ""

    def expect(self, step: int, proof: str) -> None:
        """Refuse a checkpoint of another run, or of lines that are gone."""
        if step > self.steps_released or proof != self.proof(step):
            raise _check.fail(
                "step", step, f"the ledger has {self.steps_released} steps, and not the one before this checkpoint",
                "use the checkpoint and the ledger of one run",
            )  # fmt: skip

    def chain(self, entries: int | None = None) -> str:
        """The digest of the first so many lines: of all of them, unless told."""
        end = _SIZE * (self.entries if entries is None else entries)
        return bytes(self._chains[end - _SIZE : end]).hex()

    def knows(self, entries: int, chain: str) -> bool:
        """Whether the first so many lines have this digest. If not, lines were lost that a checkpoint knew."""
        return 0 < entries <= self.entries and self.chain(entries) == chain

    @one_at_a_time
    def lose(self, step: int) -> None:
        """Record that chunks from this step on cannot be taken again: their steps are spent, as if taken alone."""
        self._check_process()
        self._check_step(step)
        self._append({"kind": "lost", "step": step})
        self._lose(step)

    def _digest(self, contents: bytes, step: int = 0, purpose: bytes = b"") -> bytes:
        # With the step and the purpose: equal digests would show that two batches are equal, and so most likely empty.
        own, salt = self._secret, step.to_bytes(16, "big")
        return hashlib.blake2b(contents, key=own, digest_size=_SIZE, salt=salt, person=purpose).digest()

    def _digests(self, step: int) -> bytes:
        """Those of a released step; empty if it was not released."""
        return bytes(self._released[2 * _SIZE * step : 2 * _SIZE * (step + 1)])

    def _check_process(self) -> None:
        check_process(self._process)

    def close(self) -> None:
        """Let another process have the ledger."""
        if self._file is not None:
            self._file.close()

    # --- its lines ----------------------------------------------------------------------------------------

    def _append(self, entry: dict[str, Any]) -> None:
        self._check_process()
        line = self._line(entry)
        if self._file is not None:
            try:
                self._file.append(line)
            except BaseException:
                del self._chains[-_SIZE:]
                raise

    def _line(self, entry: dict[str, Any]) -> bytes:
        """An entry as the next line of the chain."""
        body = json.dumps(entry).encode()[:-1]
        chain = self._link(body)
        self._chains += chain
        return body + _CHAIN + chain.hex().encode() + b'"}'

    def _link(self, body: bytes) -> bytes:
        """The keyed digest of a line and, through that of the line before, of all before it."""
        return self._digest(bytes(self._chains[-_SIZE:]) + body)

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry, (body, chain) = json.loads(line), line.removesuffix(b'"}').rsplit(_CHAIN, 1)
            if number == 0:
                self._forget(entry["run_id"])
            link = self._link(body)
            good = chain == link.hex().encode() and (entry["kind"] == "run") == (number == 0)
            good &= entry["kind"] != "step" or entry["step"] == self.steps_released
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            good = False
        if not good:
            where = f"{self._file and self._file.path}: line {number + 1}"
            other = ", or with another key" if number == 0 else ""
            raise ValueError(f"{where} was changed after it was written{other}; restore the file")
        if number == 0 and entry.get("format") != _FORMAT:
            raise ValueError(
                f"{self._file and self._file.path}: was written by another version of bandmf (format "
                f"{entry.get('format', 1)}, not {_FORMAT}); finish its run with that version, or begin one elsewhere"
            )
        self._chains += link
        kind = entry["kind"]
        if "place" in entry:
            self._place = entry["place"]
        if kind == "run":
            self.copied_from = entry.get("copied_from")
            self.run = {name: value for name, value in entry.items() if name not in _BOOKKEEPING}
        elif kind == "reserve":
            self._reserve((entry["step"], entry["step"] + entry["count"], entry["inputs"]))
        elif kind == "lost":
            self._lose(entry["step"])
        elif kind != "moved":
            self._apply(kind, bytes.fromhex(entry.get("batch", "") + entry.get("sum", "")))

    def _apply(self, kind: str, found: bytes) -> None:
        if kind == "replay":
            self.replays += 1
        else:
            self._released += found

    def _lose(self, step: int) -> None:
        for number in range(self.steps_released, self.steps_spent):  # no sum has these digests
            self._released += self._digest(b"lost", number, b"batch") + self._digest(b"lost", number, b"sum")
        self._reserved = None
        self._chunks = {chunk for chunk in self._chunks if chunk[1] <= step}
