"""Files that a command will write, checked before its work begins: minutes of work must not end in a wrong path."""

from __future__ import annotations

import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def check(pictures: dict[str, Path | None], files: dict[str, Path | None] | None = None) -> None:
    """Fail if one of these, by option, could not be written, or two are the same file."""
    seen: dict[Path, str] = {}
    for name, path in {**pictures, **(files or {})}.items():
        if path is None:
            continue
        _check_file(name, path)
        if name in pictures and path.suffix.lower() not in PICTURES:
            raise ValueError(f"{name}={str(path)!r}: must end in {' or '.join(PICTURES)}")
        if (other := seen.setdefault(path.resolve(), name)) != name:
            raise ValueError(f"{name}={str(path)!r}: is the file of --{other} as well; give another name")


def _check_file(name: str, path: Path) -> None:
    given = f"{name}={str(path)!r}"
    if path.is_dir():
        raise ValueError(f"{given}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{given}: there is no folder {str(path.parent)!r}; make it first")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{given}: may not be written; give another name")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{given}: nothing may be written to {str(path.parent)!r}; give another folder")


def check_folder(name: str, folder: Path) -> None:
    """Fail unless there is such a folder, or one can be made, and files can be written to it."""
    given = f"{name}={str(folder)!r}"
    there = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{given}: {str(there)!r} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{given}: nothing may be written to {str(there)!r}; give another folder")
