"""Loads the native library, where it was built; says once why not, where it was not.

`BANDMF_NATIVE=0` switches it off: all engines then take the paths that they take without a compiler.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from bandmf.native.sources import FOLDER, digest

NAME = "noise.so"
logger = logging.getLogger("bandmf")


def available() -> bool:
    """Whether the native library can be used here."""
    return library() is not None


def chosen(kernels: str | None) -> bool:
    """Whether an engine with this argument uses the library; fails where it must and cannot."""
    if kernels == "native" and not available():
        raise RuntimeError("kernels='native': the native library is not there; see the log for the reason")
    return kernels == "native" or (kernels is None and available())


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it is switched off, missing, stale or broken."""
    if os.environ.get("BANDMF_NATIVE") == "0":
        return None
    try:
        return load(FOLDER / NAME)
    except OSError as error:
        logger.warning("bandmf's native library is not used, noise on the CPU takes longer: %s", error)
        return None


def load(path: Path) -> ctypes.CDLL:
    """The library at a path; OSError, with what to do, unless it was built from the sources that are here."""
    remedy = "install a C compiler (gcc or clang), then bandmf again"
    if not path.exists():
        raise FileNotFoundError(f"it was not built; {remedy}")
    made = ctypes.CDLL(str(path))
    try:
        made.bandmf_digest.restype = ctypes.c_char_p
        built = made.bandmf_digest().decode()
    except AttributeError:
        built = "nothing"
    if built != digest():
        raise OSError(f"it was built from other sources; {remedy}")
    return made


def threads() -> int:
    """Threads that this process may use: the cores it may run on, fewer where OMP_NUM_THREADS says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores
