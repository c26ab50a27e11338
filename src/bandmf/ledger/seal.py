"""The seal of a checkpoint: whose it is, what its ledger knew, and a keyed digest of every file.

`seal.json` is read before anything else of a checkpoint. The other files hold pickled objects, which could execute
code while they are read; so none is opened unless its digest, which only the key of the run can make, is right.

Guarantees: a checkpoint of another run, a changed file, and a ledger that has lost lines which the checkpoint knew are
refused; any number of ranks can check it, each a share of the files.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bandmf._files import create_secret
from bandmf.ledger import Ledger
from bandmf.randomness.key import Key

NAME = "seal.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Seal:
    """What is known of a checkpoint before any of its data is read."""

    run_id: str
    step: int
    proof: str  # that the ledger has the step before it
    entries: int  # lines of the ledger when it was written
    chain: str  # and their digest
    files: dict[str, str]  # keyed digests by name


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, oldest first; what was not finished or is being removed has no such name."""
    named = [path for path in folder.glob("[0-9]*") if path.name.isascii() and path.name.isdigit()]
    return sorted(named, key=lambda path: int(path.name))


def write(folder: Path, seal: Seal, key: Key) -> None:
    """Add the seal to a checkpoint whose other files are complete, and close them all to others."""
    for name in seal.files:
        os.chmod(folder / name, 0o600)
    contents = asdict(seal)
    create_secret(folder / NAME, json.dumps({**contents, "mac": _mac(contents, key)}).encode())


def read(folder: Path, ledger: Ledger) -> tuple[Seal, Key]:
    """The seal of a checkpoint, if it is one of this run or of the run it was copied from, and that run's key."""
    damaged = ValueError(
        f"{folder / NAME}: was changed after it was written, or is missing; restore it, or remove {folder} to go on "
        "from the checkpoint before it"
    )
    try:
        contents = json.loads((folder / NAME).read_bytes())
        found, seal = contents.pop("mac"), Seal(**contents)
        key = ledger.key_of(seal.run_id)
        if key is not None and not hmac.compare_digest(found, _mac(contents, key)):
            raise damaged
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise damaged from None
    if key is None:
        raise ValueError(
            f"{folder}: is a checkpoint of another run, {seal.run_id!r}, not of {ledger.run_id!r}; remove it from here"
        )
    return seal, key


def check_all(folder: Path, ledger: Ledger) -> None:
    """Refuse to go on where a checkpoint is not of this run, or knows lines that the ledger has lost."""
    for path in reversed(checkpoints(folder)):  # the newest knows most
        seal, _ = read(path, ledger)
        if seal.run_id == ledger.run_id and not ledger.knows(seal.entries, seal.chain):
            raise ValueError(
                f"{folder.parent}: the ledger has {ledger.entries} lines, but checkpoint {path.name} was written when "
                f"it had {seal.entries}; steps that it lost may have been released: restore the ledger, or begin a "
                "new run in another folder, where what this one has spent counts in addition"
            )


def digests(folder: Path, names: Iterable[str], key: Key) -> dict[str, str]:
    """Keyed digests of these files."""
    secret = key.derive("checkpoint").secret
    return {name: _digest(folder / name, secret) for name in names}


def changed(folder: Path, seal: Seal, names: Iterable[str], key: Key) -> list[str]:
    """Those of these files that are not as they were written."""
    found = digests(folder, [name for name in names if (folder / name).is_file()], key)
    return [name for name in names if not hmac.compare_digest(found.get(name, ""), seal.files[name])]


def _digest(path: Path, secret: bytes) -> str:
    found = hashlib.blake2b(key=secret, digest_size=32)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _mac(contents: dict[str, object], key: Key) -> str:
    secret = key.derive("seal").secret
    return hmac.new(secret, json.dumps(contents, sort_keys=True).encode(), hashlib.sha256).hexdigest()
