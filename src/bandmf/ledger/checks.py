"""That a run goes on as it began, and in the process that opened it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from bandmf import _check
from bandmf._interrupts import uninterrupted

REVEALS = (
    "two results with the same noise reveal their difference: restart with the program, data, learning rates, machine "
    "and number of processes as they were, or begin a new run in another folder (what both release counts)"
)
MOVED = (
    "if the original is gone, say so with moved='moved'; if it may still be used, moved='copied' begins a run of its "
    "own from these weights, whose privacy is spent in addition"
)
_OTHER_PLAN = "continue with the plan of the run, or begin a run in another folder"
_REMEDY = {
    "plan": "continue with the plan of the run, which is saved beside the ledger: bandmf.Plan.load(folder / "
    "'plan.json'); planning again can give another certificate, and so another plan. Or begin a run in another folder",
    "key": "load the key of the run",
    "clip_norm": "the noise was planned for the clip norm of the run",
    "sampler": "the privacy of the plan rests on the batches of the sampler",
    "examples": "the data may not change during a run",
}


class Recorded(NamedTuple):
    """Where what began at a step has to end again, whether that was a chunk, and whether it did not finish."""

    end: int
    in_chunk: bool
    pending: bool


class ReleasedOtherwiseError(ValueError):
    """A step that was released before, with another sum or batch: it must not be released again."""


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Threads take turns: two that release one step would both find that it is new. Ctrl-C waits for the end.

    After an exception of a signal handler the file may have a line that is not in memory: it must be read again.
    """

    @wraps(method)
    def alone(self: Any, *given: Any) -> Any:
        with self._lock, uninterrupted():
            if self._interrupted:
                raise RuntimeError("the ledger was interrupted while it wrote; open the run again to go on")
            self._interrupted = True
            try:
                result = method(self, *given)
            except Exception:
                self._interrupted = self._file is not None and self._file.holds_more
                raise
            self._interrupted = False
            if self._file is not None:
                self._file.holds_more = False
            return result

    return alone


def check_process(opened_by: int) -> None:
    """Refuse to release anything in a fork of the process that opened the run."""
    if os.getpid() != opened_by:
        raise RuntimeError(
            f"this run was opened by process {opened_by}, and this is process {os.getpid()}, a fork of it: both would "
            "use the same noise for different sums; construct Training in the process that trains"
        )


def check_place(folder: Path, is_here: bool, moved: str | None) -> None:
    """Refuse a folder that lies elsewhere than its ledger says, until it is stated what happened to it."""
    if is_here and moved is not None:
        raise _check.fail("moved", moved, f"{folder} lies where its ledger says it does", "leave moved= out")
    if not is_here and moved is None:
        raise _check.fail(
            "moved", None, f"{folder} was moved, copied or restored since its run began, and a copy that goes on "
            "beside its original uses the same noise for different sums", MOVED,
        )  # fmt: skip


def expect_same(recorded: dict[str, Any], given: dict[str, Any], path: Any) -> None:
    """Refuse to go on with a run that was begun with something else."""
    given = json.loads(json.dumps(given))
    for name in sorted(recorded.keys() | given.keys(), key=lambda name: (name in _REMEDY, name == "plan", name)):
        if recorded.get(name) != given.get(name):
            remedy = _REMEDY.get(name, _OTHER_PLAN)
            raise _check.fail(name, given.get(name), f"the run in {path} began with {recorded.get(name)!r}", remedy)
