"""Files that must be whole or absent, secrets that only their owner may read, and where answers are cached."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, contents: bytes) -> None:
    """Replace the file at once: a reader, or a crash, never sees half of it."""
    with _draft(path, contents) as draft:
        os.replace(draft, path)


def write_first(path: Path, contents: bytes) -> bool:
    """The same, unless there is a file already; whether there was none. Of several processes one is the first."""
    with _draft(path, contents) as draft:
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            os.replace(draft, path)
    return True


@contextmanager
def _draft(path: Path, contents: bytes) -> Iterator[Path]:
    """A file beside this one, on the disk; removed in the end if it still has its name."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except OSError as error:
        if Path(str(error.filename)).name == draft.name:
            error.filename = str(path)  # the name that people know
        raise
    finally:
        draft.unlink(missing_ok=True)


def cache_folder(kind: str) -> Path | None:
    """In BANDMF_CACHE (a folder, or "off"), else in bandmf in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("BANDMF_CACHE")
    if own is not None:
        off = own.strip().lower() in ("", "0", "off", "none")
        return None if off else Path(own).expanduser() / kind
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification demands
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "bandmf" / kind


def create_secret(path: str | os.PathLike[str], contents: bytes) -> None:
    """Write a new file that only its owner can read; FileExistsError if there is one already."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def make_private_folder(folder: Path) -> None:
    """Make a folder, with its parents, that only its owner can enter; one that is there is closed to others."""
    new = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        os.chmod(folder, 0o700)
    if new:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk: a file that was synced may otherwise be lost with its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
