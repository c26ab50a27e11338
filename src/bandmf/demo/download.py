"""Data sets by their public address: announced, fetched by https, and checked against what was published."""

from __future__ import annotations

import hashlib
import http.client
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bandmf._files import cache_folder, write_whole

Tell = Callable[[str], None]
TIMEOUT = 10  # seconds without an answer
_CHUNK = 1 << 18


class File(NamedTuple):
    """A file as it was published."""

    name: str
    address: str
    bytes: int
    sha256: str


def to_stderr(text: str) -> None:
    """What announcements are made by, unless one is told otherwise."""
    print(text, file=sys.stderr)


def fetched(
    what: str, kind: str, files: Sequence[File], announce: Tell = to_stderr, progress: Tell | None = None
) -> Path:
    """The folder with these files, which are downloaded on first use; OSError in a sentence where that fails.

    It is kept in the cache (BANDMF_CACHE names another; with "off", a folder for this process alone).
    """
    folder = cache_folder(kind)
    folder = Path(tempfile.mkdtemp(prefix=f"bandmf-{kind}-")) if folder is None else folder
    missing = [file for file in files if not (folder / file.name).exists()]
    if not missing:
        return folder
    amount = f"{sum(file.bytes for file in missing) / 1e6:.1f} MB"
    announce(f"Downloading {what} ({amount}) from {missing[0].address.rpartition('/')[0]} to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            write_whole(folder / file.name, _content(file, progress))
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{what} cannot be downloaded ({_reason(error)})") from None
    return folder


def _content(file: File, progress: Tell | None) -> bytes:
    content = bytearray()
    with urllib.request.urlopen(file.address, timeout=TIMEOUT) as reply:
        while len(content) <= file.bytes and (chunk := reply.read(_CHUNK)):
            content += chunk
            if progress is not None:
                progress(f"{file.name}: {len(content) / 1e6:.1f} of {file.bytes / 1e6:.1f} MB")
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise OSError(f"{file.name} is not the file that was published: its SHA-256 is {found}")
    return bytes(content)


def _reason(error: Exception) -> str:
    """Without the wrapping of urllib."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    return str(error) or type(error).__name__
