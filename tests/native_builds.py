"""The native library built by hand, for tests: as it is, with other sources, or with a planted error."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from bandmf.native.loading import library
from bandmf.native.sources import FOLDER

COMPILER = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
needs_library = pytest.mark.skipif(library() is None, reason="the native library is not built or switched off")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def build(folder: Path, file: str = "", before: str = "", after: str = "") -> ctypes.CDLL:
    """The library for the narrowest vectors, in a new folder, with one piece of one source replaced by another."""
    folder.mkdir(parents=True)
    for path in [*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]:
        text = path.read_text()
        if path.name == file:
            assert text.count(before) == 1, f"{before!r} is not once in {file}"
            text = text.replace(before, after)
        (folder / path.name).write_text(text)
    sources = sorted(str(path) for path in folder.glob("*.c"))
    flags = ["-O1", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-fno-math-errno"]
    command = [str(COMPILER), *flags, "-DWIDTH=4", *sources, "-o", str(folder / "noise.so"), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return ctypes.CDLL(str(folder / "noise.so"))
