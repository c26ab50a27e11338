"""Strategies on disk: one .npz file with a schema version, never a pickle."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from bandmf import _check
from bandmf._files import read_limited
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
MOST_BYTES = 2**32  # of a file, and of its arrays together
_ZIPPED = 2**24  # of these, what zip may add to arrays that it cannot make smaller
_MOST_ARRAYS = 8
_DEEPEST = 4  # strategies in strategies
_NUMBERS = "biuf"
_DIMENSIONS = {
    "identity": 0, "toeplitz": 1, "flags": 1, "dense": 2, "banded": 2, "scales": 1, "decays": 1, "buffered": 0,
    "inverse": 1, "steps": 0, "tree": 0, "epochs": 0, "step_scales": 1,
}  # fmt: skip


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
    if sum(np.asarray(array).nbytes for array in contents.values()) > MOST_BYTES - _ZIPPED:
        raise ValueError(f"strategy={strategy!r}: takes more than the {MOST_BYTES:,} bytes that a file may have")
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
    written = read_limited(Path(path), MOST_BYTES)
    try:
        contents = _arrays(written)
        schema = contents.pop("schema", None)
        known = schema is not None and int(schema) == _SCHEMA
    except Exception:  # the readers of zip and npy have errors of a dozen kinds for damaged files
        raise ValueError(f"path={str(path)!r}: not a strategy file of bandmf, or damaged") from None
    if not known:
        raise ValueError(f"path={str(path)!r}: schema {schema} is unknown; this version reads {_SCHEMA}")
    return from_arrays(contents, path)


def _arrays(written: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, none larger than what is there: a file of a kilobyte can claim to hold terabytes."""
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        parts = archive.infolist()
        plain = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the others unpack all at once
        if len(parts) > _MOST_ARRAYS or any(part.compress_type not in plain for part in parts):
            raise ValueError("not written by np.savez")
        if sum(part.file_size for part in parts) > MOST_BYTES:
            raise ValueError("too large")
        arrays = {part.filename.removesuffix(".npy"): _array(archive.read(part)) for part in parts}
    if len(arrays) < len(parts):
        raise ValueError("two arrays of one name")
    return arrays


def _array(written: bytes) -> np.ndarray:
    file = io.BytesIO(written)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(file)
    if dtype.kind not in _NUMBERS or any(length < 1 for length in shape):
        raise ValueError("not numbers")
    numbers = np.frombuffer(written, dtype, offset=file.tell())
    return numbers.reshape(shape, order="F" if by_columns else "C")


def from_arrays(contents: dict[str, np.ndarray], path: str | Path) -> Strategy:
    """The strategy that `to_arrays` described, with these arrays and no others; errors name `path`."""
    try:
        return _strategy({name: _checked(name, array) for name, array in contents.items()}, 0)
    except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
        found = str(error) or type(error).__name__
        raise ValueError(f"path={str(path)!r}: {found}") from None


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    """An array of real numbers, with as many dimensions as the one of this name has."""
    last = name.rpartition(".")[2]
    if last not in _DIMENSIONS:
        raise _check.fail("array", name, f"must be one of {', '.join(_DIMENSIONS)}")
    if array.dtype.kind not in _NUMBERS or array.ndim != _DIMENSIONS[last]:
        raise ValueError(f"array {name!r}: must have real numbers and {_DIMENSIONS[last]} dimensions")
    return array


def _strategy(contents: dict[str, np.ndarray], depth: int) -> Strategy:
    if depth > _DEEPEST:
        raise ValueError(f"strategies in strategies: must be at most {_DEEPEST}")
    match contents:
        case {"identity": steps, **rest} if not rest:
            return Identity(steps.item())
        case {"toeplitz": theta, "flags": flags, **rest} if not rest:
            steps, normalize = flags.tolist()
            return BandedToeplitz(theta, steps, bool(_check.whole("flags[1]", normalize, 0, 1)))
        case {"dense": matrix, **rest} if not rest:
            return Dense(matrix)
        case {"banded": columns, **rest} if not rest:
            return Banded(columns)
        case {"buffered": steps, "scales": scales, "decays": decays, **rest} if not rest:
            return BufferedToeplitz(scales, decays, steps.item())
        case {"inverse": coefficients, "steps": steps, **rest} if not rest:
            return BandedInverse(coefficients, steps.item())
        case {"tree": steps, **rest} if not rest:
            return OnlineTree(steps.item())
        case {"epochs": epochs, **rest} if inner := _inner("epoch.", rest):
            return Stamped(_strategy(inner, depth + 1), epochs.item())
        case {"step_scales": scales, **rest} if inner := _inner("unscaled.", rest):
            return Scaled(_strategy(inner, depth + 1), scales)
    raise ValueError("not a strategy of bandmf, or damaged")


def _inner(prefix: str, contents: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The arrays of a strategy in another, if these are all of them."""
    alike = all(name.startswith(prefix) for name in contents)
    return {name.removeprefix(prefix): value for name, value in contents.items()} if alike else None
