"""Opening a run folder: it begins a run, goes on with one, or is refused.

| in the folder | what happens |
| --- | --- |
| nothing of a run | a run begins: first its ledger appears, whole, then its key |
| a ledger of one line, neither key nor checkpoint | the start was interrupted; the run begins anew |
| ledger and key | the run goes on, if all checkpoints are its own and the ledger knows what they know |
| a key or a checkpoint, no ledger | refused: nobody knows which steps were released |
| ledger and key, in another place than recorded | refused until `moved` says what happened |

Guarantees: a crash at any moment leaves a folder that the next start accepts; what is refused is left as it was; only
its owner can enter the folder or read the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bandmf import _check
from bandmf._files import make_private_folder, sync_folder
from bandmf.ledger import Ledger, seal
from bandmf.ledger.processes import Processes
from bandmf.planning import Plan, plan_file
from bandmf.randomness.key import Key
from bandmf.sampling import Sampler

log = logging.getLogger("bandmf")

LEDGER, KEY, CHECKPOINTS, PLAN = "ledger.jsonl", "key", "checkpoints", "plan.json"


class Opened:
    """A run that may go on: every rank has its id and its key, rank 0 its ledger."""

    def __init__(self, folder: Path | None, key: Key | None, moved: str | None, ranks: Processes) -> None:
        self._folder, self._given, self.ranks = folder, key, ranks
        self.ledger: Ledger | None = None
        self.run_id: str
        self.inherited_steps: list[int]  # that the runs which this one was copied from had released
        self.run_id, self.inherited_steps = ranks.on_first(lambda: self._open(moved))
        self.run_key = ranks.share_key(self.ledger.run_key if self.ledger else None)

    def _open(self, moved: str | None) -> tuple[str, list[int]]:
        self._user_key = _user_key(self._given, self._folder)
        path = None if self._folder is None else self._folder / LEDGER
        ledger = Ledger(path, self._user_key, moved=moved)
        if self._folder is not None:
            seal.check_all(self._folder / CHECKPOINTS, ledger)
        if moved == "copied":
            ledger.copy()
        self.ledger = ledger
        return ledger.run_id, ledger.inherited_steps

    def spent(self, plan: Plan, steps: int) -> float:
        """The epsilon of this run's first `steps` steps, and of what the runs that it was copied from had released."""
        return sum(plan.spent_after(each) for each in (*self.inherited_steps, steps))

    def begin(self, run: dict[str, Any], plan: Plan) -> int:
        """Begin or go on with this run, which `provenance` describes; how many steps it has spent."""
        try:
            return self.on_ledger(lambda ledger: self._begin(ledger, run, plan))
        except BaseException:
            self.close()
            raise

    def on_ledger(self, action: Callable[[Ledger], Any]) -> Any:
        """What rank 0 does with the ledger; its result comes to every rank."""

        def act() -> Any:
            assert self.ledger is not None
            return action(self.ledger)

        return self.ranks.on_first(act)

    def close(self) -> None:
        """Let another process have the run."""
        if self.ledger is not None:
            self.ledger.close()

    def _begin(self, ledger: Ledger, run: dict[str, Any], plan: Plan) -> int:
        if self._folder is not None:
            _make(self._folder)
            for name in (KEY, LEDGER, PLAN):
                for draft in self._folder.glob(f".{name}.*"):
                    draft.unlink(missing_ok=True)  # of a start that was interrupted
        ledger.begin(run)
        if self._folder is not None:
            _keep(self._user_key, self._folder / KEY)
            _keep_plan(plan, self._folder / PLAN)
        return ledger.steps_spent


def provenance(plan: Plan, key: Key, batches: Sampler, *, clip_norm: float, per_layer: bool) -> dict[str, Any]:
    """What must stay the same as long as a run goes on."""
    promise = {
        name: value if isinstance(value, int | float | str) else repr(value) for name, value in plan.promise.items()
    }
    return promise | {
        "plan": plan.digest, "steps": plan.steps, "key": key.fingerprint, "clip_norm": clip_norm,
        "per_layer": per_layer, "sampler": batches.provenance, "examples": batches.examples,
    }  # fmt: skip


def plan_of(folder: Path | None, given: Plan) -> Plan:
    """The plan of the run in the folder, if it is of one promise with the given one; else that.

    Planning again, where the answer is not in a cache, gives another certificate, and so another plan.
    """
    if folder is None or given.certificate is None or plan_file.holds(folder / PLAN, given):
        return given
    try:
        with open(folder / LEDGER, "rb") as file:
            begun = json.loads(file.readline())["plan"]
        kept = Plan.load(folder / PLAN)
    except (OSError, ValueError, KeyError, TypeError):  # whatever is wrong there is told when the folder is opened
        return given
    if begun == given.digest or begun != kept.digest or kept.promise != given.promise:
        return given
    log.info("%s: goes on with its own plan, whose certificate is another one of the same promise", folder)
    return kept


def _make(folder: Path) -> None:
    try:
        make_private_folder(folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _check.fail("folder", str(folder), f"cannot be made ({reason})", "give another folder") from error


def _user_key(key: Key | None, folder: Path | None) -> Key:
    """The key in the folder, the one given, or a fresh one; refuses a folder that is not whole."""
    if key is not None and not isinstance(key, Key):  # what it is instead is not shown: it may be secret
        raise _check.fail("key", type(key).__name__, "must be a bandmf.Key", "Key(32 secret bytes), or Key.load(file)")
    if folder is None:
        return Key() if key is None else key
    _refuse_remains(folder)
    if (folder / KEY).is_symlink() and not (folder / KEY).exists():
        raise _check.fail("folder", str(folder), "its key is a link to a file that is not there", "restore that file")
    if (folder / KEY).exists():
        stored = Key.load(folder / KEY)
        if key is not None and key != stored:
            raise ValueError(f"key: the run in {folder} has another key; leave key= out, or use another folder")
        return stored
    if (folder / LEDGER).exists() and not _discard_interrupted(folder) and key is None:
        raise _check.fail(
            "key", None, f"the run in {folder} has lost its key file", "restore the file, or give the key as key="
        )
    return Key() if key is None else key


def _refuse_remains(folder: Path) -> None:
    """Without the ledger nobody knows what was released: whatever else is left of a run must not go on."""
    if (folder / LEDGER).exists():
        return
    remains = [folder / KEY] if (folder / KEY).exists() else []
    remains += [*seal.checkpoints(folder / CHECKPOINTS), *folder.glob("copied-*.jsonl")]
    if remains:
        raise ValueError(
            f"{folder}: has {remains[0].relative_to(folder)} but no {LEDGER}, which says what was released; restore "
            "it, or begin a new run in another folder: what this one has spent counts in addition"
        )


def _discard_interrupted(folder: Path) -> bool:
    """Remove the ledger of a start that was interrupted before the key had its name: nothing was released."""
    with open(folder / LEDGER, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{folder}: another process is beginning this run; wait for it") from None
        remains = (folder / KEY).exists() or seal.checkpoints(folder / CHECKPOINTS)
        if file.read().count(b"\n") != 1 or remains:
            return False
        os.unlink(folder / LEDGER)
        return True


def _keep(key: Key, path: Path) -> None:
    """Write the key, under its name only when it is complete."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        key.save(draft)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _keep_plan(plan: Plan, path: Path) -> None:
    """Write the plan: planning again, on another machine, can give another certificate, and so another plan.

    The ledger has begun with this plan, so whatever else has its name is not the run's.
    """
    if not plan_file.holds(path, plan):
        plan.save(path)
    for file in path.parent.glob(f"{path.stem}.*"):
        file.chmod(0o600)
    sync_folder(path.parent)
