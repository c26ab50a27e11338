"""Strategies on disk: one .npz file with a schema version, never a pickle."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from bandmf.strategies.banded import Banded
from bandmf.strategies.banded_inverse import BandedInverse
from bandmf.strategies.base import Strategy
from bandmf.strategies.buffered import BufferedToeplitz
from bandmf.strategies.dense import Dense
from bandmf.strategies.scaled import Scaled
from bandmf.strategies.stamping import Stamped
from bandmf.strategies.toeplitz import BandedToeplitz, Identity
from bandmf.strategies.tree import OnlineTree

_SCHEMA = 1


def save(strategy: Strategy, path: str | Path) -> Path:
    """Write a strategy; the file name gets the ending .npz if it has none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save(BandedToeplitz([1.0, 0.5], steps=3), folder + "/pair")
    ...     load(file)
    BandedToeplitz(steps=3, bands=2)
    """
    path = file_name(path)
    contents: dict[str, Any] = {"schema": _SCHEMA, **to_arrays(strategy)}
    np.savez_compressed(path, **contents)
    return path


def file_name(path: str | Path) -> Path:
    """Where `save` will write."""
    path = Path(path)
    return path if path.suffix == ".npz" else path.with_name(path.name + ".npz")


def to_arrays(strategy: Strategy) -> dict[str, np.ndarray]:
    """All that defines a strategy, as named arrays: the one form in which strategies are stored.

    Of these very families: a subclass may mean another matrix by the same arrays.
    """
    if type(strategy) is Identity:
        return {"identity": np.array(strategy.steps)}
    if type(strategy) is BandedToeplitz:
        flags = np.array([strategy.steps, strategy.normalize_columns])
        return {"toeplitz": strategy.coefficients, "flags": flags}
    if type(strategy) is Dense:
        return {"dense": strategy.matrix}
    if type(strategy) is Banded:
        return {"banded": strategy.compact}
    if type(strategy) is BufferedToeplitz:
        return {"scales": strategy.scales, "decays": strategy.decays, "buffered": np.array(strategy.steps)}
    if type(strategy) is BandedInverse:
        return {"inverse": strategy.inverse_coefficients, "steps": np.array(strategy.steps)}
    if type(strategy) is OnlineTree:
        return {"tree": np.array(strategy.steps)}
    if type(strategy) is Stamped:
        epoch = {f"epoch.{name}": value for name, value in to_arrays(strategy.epoch).items()}
        return {"epochs": np.array(strategy.epochs), **epoch}
    if type(strategy) is Scaled:
        unscaled = {f"unscaled.{name}": value for name, value in to_arrays(strategy.strategy).items()}
        return {"step_scales": strategy.scales, **unscaled}
    raise ValueError(f"strategy={strategy!r}: this family cannot be saved")


def load(path: str | Path) -> Strategy:
    """Read a strategy that `save` wrote; it is validated like a new one.

    >>> import tempfile
    >>> from bandmf.strategies import Identity
    >>> path = save(Identity(8), Path(tempfile.mkdtemp()) / "strategy.npz")
    >>> load(path)
    Identity(steps=8, bands=1)
    """
    written = Path(path).read_bytes()
    try:
        with np.load(io.BytesIO(written), allow_pickle=False) as file:
            contents = {name: file[name] for name in file.files}
        schema = contents.pop("schema", None)
        known = schema is not None and int(schema) == _SCHEMA
    except Exception:  # the readers of zip and npy have errors of a dozen kinds for damaged files
        raise ValueError(f"path={str(path)!r}: not a strategy file of bandmf, or damaged") from None
    if not known:
        raise ValueError(f"path={str(path)!r}: schema {schema} is unknown; this version reads {_SCHEMA}")
    try:
        return from_arrays(contents, path)
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"path={str(path)!r}: {error}") from None


def from_arrays(contents: dict[str, np.ndarray], path: str | Path) -> Strategy:
    """The strategy that `to_arrays` described; `path` is for the message where it did not."""
    match contents:
        case {"identity": steps}:
            return Identity(int(steps))
        case {"toeplitz": theta, "flags": flags}:
            return BandedToeplitz(theta, int(flags[0]), bool(flags[1]))
        case {"dense": matrix}:
            return Dense(matrix)
        case {"banded": columns}:
            return Banded(columns)
        case {"buffered": steps, "scales": scales, "decays": decays}:
            return BufferedToeplitz(scales, decays, int(steps))
        case {"inverse": coefficients, "steps": steps}:
            return BandedInverse(coefficients, int(steps))
        case {"tree": steps}:
            return OnlineTree(int(steps))
        case {"epochs": epochs}:
            return Stamped(from_arrays(_inner("epoch.", contents), path), int(epochs))
        case {"step_scales": scales}:
            return Scaled(from_arrays(_inner("unscaled.", contents), path), scales)
    raise ValueError(f"path={str(path)!r}: not a strategy file of bandmf, or damaged")


def _inner(prefix: str, contents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in contents.items() if name.startswith(prefix)}
