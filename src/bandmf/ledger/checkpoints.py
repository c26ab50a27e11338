"""A folder of checkpoints: each appears whole or not at all, is sealed, and is verified before anything of it is read.

A checkpoint is a folder `checkpoints/NNN`, where NNN is the length of the ledger. It is written under another name,
sealed (see seal.py), put on the disk and then renamed. The last two are kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bandmf._files import make_private_folder, sync_folder
from bandmf.ledger import Ledger, seal
from bandmf.ledger.seal import Seal
from bandmf.randomness.key import Key

KEPT = 2


class Processes(Protocol):
    """What a run must know of the processes that share it."""

    rank: int
    world: int

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Let the first process do something; its result, or its error, comes to every process."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, on every one of them."""

    def share_key(self, key: Key | None) -> Key:
        """The key of the first process."""


def prepare(folder: Path, draft: Path) -> None:
    """Clear what a crash left over, and make the folder to write to."""
    make_private_folder(folder)
    for left_over in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        shutil.rmtree(left_over)
    make_private_folder(draft)


def add_seal(draft: Path, names: list[str], step: int, ledger: Ledger | None, key: Key, processes: Processes) -> None:
    """Seal a checkpoint whose files are complete. Each process digests a share of them; the first has the ledger."""
    shares = processes.gather(seal.digests(draft, names[processes.rank :: processes.world], key))
    files = {name: digest for share in shares for name, digest in share.items()}

    def write() -> None:
        assert ledger is not None
        known = Seal(ledger.run_id, step, ledger.proof(step), ledger.entries, ledger.chain(), files)
        seal.write(draft, known, key)

    processes.on_first(write)


def publish(draft: Path, target: Path) -> None:
    """Give a sealed checkpoint its name, and remove those before the last two."""
    sync_folder(draft)
    os.rename(draft, target)
    sync_folder(target.parent)
    for old in seal.checkpoints(target.parent)[:-KEPT]:
        # Renamed first: a crash in the middle of removing must not leave half a checkpoint under its name.
        leaving = old.with_name(f".removing-{old.name}")
        os.rename(old, leaving)
        shutil.rmtree(leaving)


def verify(path: Path, run_id: str, ledger: Ledger | None, processes: Processes) -> Seal:
    """The seal of a checkpoint; refuses one that was changed, and one of this run that the ledger does not know."""
    keys = []

    def check() -> Seal:
        assert ledger is not None
        read, key = seal.read(path, ledger)
        keys.append(key)
        if read.run_id == run_id:
            ledger.expect(read.step, read.proof)
        return read

    known: Seal = processes.on_first(check)
    key = processes.share_key(keys[0] if keys else None)
    mine = sorted(known.files)[processes.rank :: processes.world]
    bad = sorted(name for share in processes.gather(seal.changed(path, known, mine, key)) for name in share)
    if bad:
        raise ValueError(
            f"{path / bad[0]}: was changed after it was written; restore it, or remove {path} to go on from the "
            "checkpoint before it"
        )
    return known
