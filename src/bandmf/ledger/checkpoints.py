"""A folder of checkpoints: each appears whole or not at all, is sealed, and is verified before anything of it is read.

A checkpoint is a folder `checkpoints/NNN`, where NNN is the length of the ledger. It is written under another name,
sealed (see seal.py), put on the disk and then renamed. The last two are kept.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bandmf._files import make_private_folder, sync_folder
from bandmf.ledger import Ledger, seal
from bandmf.ledger.run_folder import Opened
from bandmf.ledger.seal import Seal

KEPT = 2


def prepare(folder: Path, draft: Path) -> None:
    """Clear what a crash left over, and make the folder to write to."""
    make_private_folder(folder)
    for left_over in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        shutil.rmtree(left_over)
    make_private_folder(draft)


def add_seal(draft: Path, names: list[str], step: int, opened: Opened) -> None:
    """Seal a checkpoint whose files are complete. Each process digests a share of them; the first has the ledger."""
    processes, key = opened.ranks, opened.run_key
    shares = processes.gather(seal.digests(draft, names[processes.rank :: processes.world], key))
    files = {name: digest for share in shares for name, digest in share.items()}

    def write(ledger: Ledger) -> None:
        known = Seal(ledger.run_id, step, ledger.proof(step), ledger.entries, ledger.chain(), files)
        seal.write(draft, known, key)

    opened.on_ledger(write)


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


def verify(path: Path, opened: Opened) -> Seal:
    """The seal of a checkpoint; refuses one that was changed, and one of this run that the ledger does not know."""
    keys, processes = [], opened.ranks

    def check(ledger: Ledger) -> Seal:
        read, key = seal.read(path, ledger)
        keys.append(key)
        if read.run_id == opened.run_id:
            ledger.expect(read.step, read.proof)
        return read

    known: Seal = opened.on_ledger(check)
    key = processes.share_key(keys[0] if keys else None)
    mine = sorted(known.files)[processes.rank :: processes.world]
    bad = sorted(name for share in processes.gather(seal.changed(path, known, mine, key)) for name in share)
    if bad:
        raise ValueError(
            f"{path / bad[0]}: was changed after it was written; restore it, or remove {path} to go on from the "
            "checkpoint before it"
        )
    return known
