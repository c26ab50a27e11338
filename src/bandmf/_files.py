"""Files that are whole or absent, secret, the user's own, or of limited size; and where answers are cached."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_log = logging.getLogger("bandmf")


def write_whole(path: Path, contents: bytes, mode: int = 0o666) -> None:
    """Replace the file at once: a reader, or a crash, never sees half of it."""
    with _draft(path, contents, mode) as draft:
        os.replace(draft, path)


def write_first(path: Path, contents: bytes, mode: int = 0o666) -> bool:
    """The same, unless there is a file already; whether there was none. Of several processes one is the first."""
    with _draft(path, contents, mode) as draft:
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            os.replace(draft, path)
    return True


@contextmanager
def _draft(path: Path, contents: bytes, mode: int) -> Iterator[Path]:
    """A file beside this one, on the disk; removed in the end if it still has its name."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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


def read_own(path: Path) -> bytes:
    """The contents of a file that nobody else can have written, in such a folder; no file that a link leads to."""
    _require_own(path.parent, os.stat(path.parent))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
        _require_own(path, os.fstat(file.fileno()))
        return file.read()


def make_own_folder(folder: Path) -> None:
    """Make a folder, with its parents, that is closed to others; PermissionError for one that others can write."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    _require_own(folder, os.stat(folder))


def _require_own(path: Path, found: os.stat_result) -> None:
    """Only the user, or root, can write it; where users have no numbers, all is theirs."""
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid not in (os.geteuid(), 0):
        _ignored(path, f"belongs to another user (number {found.st_uid})")
    elif stat.S_IMODE(found.st_mode) & 0o022:
        _ignored(path, "can be written by others (chmod go-w)")
    else:
        return
    raise PermissionError(f"{path}: is not only this user's")


@cache
def _ignored(path: Path, reason: str) -> None:
    _log.warning("%s is ignored: it %s; answers are computed again. BANDMF_CACHE names another folder", path, reason)


def read_limited(path: Path, most: int) -> bytes:
    """The contents of a file, if it is one, of at most so many bytes: no pipe, no device, no folder."""
    flags = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would be waited for
    with open(path, "rb", opener=lambda name, more: os.open(name, flags | more)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"path={str(path)!r}: not a file")
        if found.st_size > most:
            raise ValueError(f"path={str(path)!r}: has {found.st_size:,} bytes, and may have {most:,}")
        return file.read(found.st_size)


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
