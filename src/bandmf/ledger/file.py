"""A file of lines that only grows, for one process at a time, and that knows where it lies.

Guarantees: it appears with its first line or not at all; a line is on the disk when `append` returns; half a line is
never followed by another; what is only read is left as it was, half a line at its end included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

from bandmf._files import sync_folder

Place = dict[str, list[int]]
_every: WeakSet[LockedLines] = WeakSet()  # of this process


class LockedLines:
    """The file at `path`; it is locked from `read` or `create` on, until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        _every.add(self)
        self._torn = 0  # bytes at the end that are no whole line
        self._seen: tuple[int, int, int] | None = None  # device, inode and size when it was read
        self.holds_more = False  # a line, perhaps, of which whoever appended it does not know yet

    def read(self) -> list[bytes]:
        """The whole lines; what a crash tore off the end is not among them, and goes with the next `append`."""
        self._lock()
        assert self._file is not None
        with os.fdopen(os.dup(self._file), "rb") as file:
            contents = file.read()
        whole = contents.rfind(b"\n") + 1
        if not whole:
            raise ValueError(f"{self.path}: has no first line, so it was damaged; restore the file")
        self._torn = len(contents) - whole
        self._seen = self._state()
        return contents[:whole].split(b"\n")[:-1]

    def take_up(self) -> None:
        """Lock again what was read and closed, if nobody has written to it meanwhile."""
        if self._seen is None or self._file is not None:
            return
        self._lock()
        if self._state() != self._seen:
            self.close()
            raise RuntimeError(f"{self.path}: another process has used this run just now; start again")

    def _lock(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = self._is_in_place()  # it may have been replaced meanwhile
        except BlockingIOError:
            mine = False
        if not mine:
            self.close()
            if self._is_open_here():
                raise RuntimeError(
                    f"{self.path}: this process has it open already (another Training, in an earlier cell of a "
                    "notebook, say); close that one first, with training.close()"
                )
            raise RuntimeError(f"{self.path}: another process is running this run; wait for it or stop it")

    def _is_open_here(self) -> bool:
        """Whether this very process has locked the file."""
        mine = os.stat(self.path)
        files = [other._file for other in _every if other._file is not None]
        return any(os.path.samestat(os.fstat(file), mine) for file in files)

    def _state(self) -> tuple[int, int, int]:
        assert self._file is not None
        found = os.fstat(self._file)
        return found.st_dev, found.st_ino, found.st_size

    def place(self) -> Place:
        """Device and inode of the folder and of the file."""
        folder, own = os.stat(self.path.parent), self._state()
        return {"folder": [folder.st_dev, folder.st_ino], "ledger": list(own[:2])}

    def create(self, first_line: Callable[[Place], bytes], keep_as: Path | None = None) -> None:
        """Let the file appear with this line; with `keep_as`, in place of the one there, which keeps that name."""
        # Complete before it has its name, so that a crash leaves all of it or nothing.
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        original, self._torn = self._file, 0
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(first_line(self.place()))
            if keep_as is None:
                os.link(draft, self.path)
            else:
                with contextlib.suppress(FileExistsError):  # of a copy that was interrupted here
                    os.link(self.path, keep_as)
                os.replace(draft, self.path)
        except (FileExistsError, FileNotFoundError):
            raise RuntimeError(
                f"{self.path}: another process, or another run of this one, began there just now; open it again"
            ) from None
        finally:
            draft.unlink(missing_ok=True)
            if original is not None:
                os.close(original)
        sync_folder(self.path.parent)

    def append(self, line: bytes) -> None:
        """Add a line and put it on the disk."""
        if self._file is None:
            raise RuntimeError(f"{self.path}: the run was closed; open it again to go on")
        if not self._is_in_place():  # what is written now would be lost, and with it what was released
            raise RuntimeError(
                f"{self.path}: was removed or moved while the run was going on; what it has released is spent: put the "
                "folder back, or begin a new run in another one"
            )
        self._write(line)

    def _is_in_place(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        before = os.fstat(self._file).st_size - self._torn
        if self._torn:
            os.ftruncate(self._file, before)
            self._torn = 0
        self.holds_more = True
        try:
            if os.write(self._file, line + b"\n") <= len(line):
                raise OSError(f"{self.path}: the disk is full")
            os.fsync(self._file)
        except BaseException:  # Ctrl-C too
            # Half a line must not come before the next: if it cannot be taken off now, it goes with the next `append`.
            self._torn = os.fstat(self._file).st_size - before
            os.ftruncate(self._file, before)
            self._torn, self.holds_more = 0, False
            raise

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound beforehand: when the interpreter exits, the names of a module may be gone before its objects.
        if getattr(self, "_file", None) is not None:
            close(self._file)  # type: ignore[arg-type]
            self._file = None
