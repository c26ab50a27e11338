"""Strategies on disk: one .npz file with a schema version, never a pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from bandmf.strategies.banded import Banded
from bandmf.strategies.base import Strategy
from bandmf.strategies.dense import Dense
from bandmf.strategies.toeplitz import BandedToeplitz, Identity

_SCHEMA = 1


def save(strategy: Strategy, path: str | Path) -> Path:
    """Write a strategy; the file name gets the ending .npz if it has none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save(BandedToeplitz([1.0, 0.5], steps=3), folder + "/pair")
    ...     load(file)
    BandedToeplitz(steps=3, bands=2)
    """
    path = Path(path)
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    contents: dict[str, Any] = {"schema": _SCHEMA, **_contents(strategy)}
    np.savez_compressed(path, **contents)
    return path


def _contents(strategy: Strategy) -> dict[str, np.ndarray]:
    if isinstance(strategy, Identity):
        return {"identity": np.array(strategy.steps)}
    if isinstance(strategy, BandedToeplitz):
        flags = np.array([strategy.steps, strategy.normalize_columns])
        return {"toeplitz": strategy.coefficients, "flags": flags}
    if isinstance(strategy, Dense):
        return {"dense": strategy.matrix}
    if isinstance(strategy, Banded):
        return {"banded": strategy.compact}
    raise ValueError(f"strategy={strategy!r}: this family cannot be saved")


def load(path: str | Path) -> Strategy:
    """Read a strategy that `save` wrote; it is validated like a new one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            contents = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, EOFError):
        raise ValueError(f"path={str(path)!r}: not a strategy file of bandmf, or damaged") from None
    schema = contents.pop("schema", None)
    if schema is None or int(schema) != _SCHEMA:
        raise ValueError(f"path={str(path)!r}: schema {schema} is unknown; this version reads {_SCHEMA}")
    if "identity" in contents:
        return Identity(int(contents["identity"]))
    if "toeplitz" in contents:
        steps, normalize = contents["flags"]
        return BandedToeplitz(contents["toeplitz"], int(steps), bool(normalize))
    if "dense" in contents:
        return Dense(contents["dense"])
    return Banded(contents["banded"])
