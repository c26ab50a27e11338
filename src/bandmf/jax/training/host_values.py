"""Leaves of a checkpoint that are no arrays of JAX: numbers of Python and arrays of NumPy, kept to the last bit.

JAX would round them to 32 bits, and a restart that goes on with a rounded learning rate releases another sum.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check

_PYTHON = {kind.__name__: kind for kind in (bool, int, float, complex)}
_ZEROS = {"i": 0, "f": 0.0, "c": 0j}


class Packed(NamedTuple):
    """A value of the host: how it is written, and its bytes, if it has any."""

    description: dict[str, Any]
    content: bytes


def is_on_host(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array)


def check(leaf: Any, name: str) -> None:
    """Refuse what would not come back as it is."""
    if isinstance(leaf, np.ndarray | np.generic) and _is_plain(leaf):
        return
    if not isinstance(leaf, complex | float | int):
        raise _refused(leaf, name)


def packed(leaf: Any, name: str) -> Packed:
    """What is written of a value."""
    check(leaf, name)
    if isinstance(leaf, np.ndarray | np.generic):
        kind = "array" if isinstance(leaf, np.ndarray) else "number"
        array = np.asarray(leaf).astype(leaf.dtype.newbyteorder("="))
        return Packed({"numpy": kind, "dtype": leaf.dtype.name, "shape": list(leaf.shape)}, array.tobytes())
    base = next(kind for kind in _PYTHON.values() if isinstance(leaf, kind))
    parts = [leaf.real, leaf.imag] if base is complex else [base(leaf)]
    return Packed({"python": base.__name__, "text": [repr(part) for part in parts]}, b"")


def unpacked(description: dict[str, Any], content: bytes) -> Any:
    """The value again, of the same type."""
    if "python" in description:
        kind, texts = _PYTHON[description["python"]], description["text"]
        if kind is bool:
            return texts == ["True"]
        return complex(*map(float, texts)) if kind is complex else kind(texts[0])
    array = np.frombuffer(content, np.dtype(description["dtype"])).reshape(description["shape"])
    return array.copy() if description["numpy"] == "array" else array[()]


def size(description: dict[str, Any]) -> int:
    """How many bytes it has in the file."""
    if "python" in description:
        return 0
    return int(np.prod(description["shape"], dtype=np.int64)) * np.dtype(description["dtype"]).itemsize


def _refused(leaf: Any, name: str) -> ValueError:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _check.fail(
            f"tree{name}", "ShapeDtypeStruct", "must be an array, which says where the restored one is to lie",
            "give arrays, such as optimizer.init(weights), in place of jax.eval_shape",
        )  # fmt: skip
    return _check.fail(
        f"tree{name}", type(leaf).__name__, "must be a number or an array of numbers",
        "save it elsewhere, or keep it out of the tree",
    )  # fmt: skip


def as_given(value: Any, like: Any, name: str) -> Any:
    """A restored value of the host where the tree has this one; on its devices, where that is an array of JAX."""
    found, given = np.asarray(value), np.asarray(like) if is_on_host(like) else like
    if found.shape != given.shape:
        raise _check.fail(f"shape of {name}", given.shape, f"the checkpoint has {found.shape}")
    if is_on_host(like) and not found.ndim and _class(found) == _class(given):
        derived = isinstance(like, type(value)) and not isinstance(like, np.generic | np.ndarray)
        return type(like)(value) if derived else value  # of a class of one's own, such as an enumeration
    same = found.dtype == (given.dtype.newbyteorder("=") if is_on_host(like) else given.dtype)
    if not same or not isinstance(value, np.ndarray | np.generic):
        raise _check.fail(
            f"type of {name}", _named(like), f"the checkpoint has {_named(value)}",
            "give a tree of that type, and convert it after run.restore",
        )  # fmt: skip
    if is_on_host(like):
        return value
    return jax.device_put(value, like.sharding) if like.committed else jnp.asarray(value)


def check_weak(leaf: Any, name: str) -> None:
    """Refuse an array that takes the type of what it meets, if it could not be made again."""
    if _weak_zero(leaf) is None:
        raise _check.fail(
            f"tree{name}", f"{leaf.dtype} (weak_type)", "is not kept as it is: JAX has no such weak type by itself",
            "give it a type of its own: leaf.astype(leaf.dtype)",
        )  # fmt: skip


def weakened(leaf: Any) -> Any:
    """The same numbers, which go on to take the type of what they meet, or bfloat16 becomes float32."""
    zero = _weak_zero(leaf)
    if zero is None:  # by another setting of jax_enable_x64 than when it was saved
        return leaf
    made = jax.jit(
        lambda given: jnp.full(given.shape, zero).at[...].set(given),
        out_shardings=leaf.sharding if leaf.committed else None,
    )
    return made(leaf)


def _weak_zero(leaf: Any) -> Any:
    """The number of Python of which JAX makes this type; none, if there is none."""
    zero = _ZEROS.get(leaf.dtype.kind)
    return zero if zero is not None and jnp.asarray(zero).dtype == leaf.dtype else None


def fingerprint(leaf: Any, name: str) -> Any:
    """A value of the host, to compare another with; an array itself, where JAX has the same one."""
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        native = np.asarray(leaf).astype(leaf.dtype.newbyteorder("="))
        if jax.dtypes.canonicalize_dtype(native.dtype) == native.dtype:
            return native
    description, content = packed(leaf, name)
    return str(description), hashlib.sha256(content).digest()


def _is_plain(leaf: Any) -> bool:
    """Whether the name of its type says all of it, and its bytes no more."""
    if (
        leaf.dtype in (np.longdouble, np.clongdouble)
        or isinstance(leaf, np.ma.MaskedArray)
        or leaf.dtype.kind in "OSU"
        or leaf.dtype.names is not None
    ):
        return False
    try:
        return bool(np.dtype(leaf.dtype.name) == leaf.dtype.newbyteorder("="))
    except TypeError:
        return False


def _class(value: Any) -> str:
    """Truth, whole numbers (also those that are too large for NumPy), real or complex ones."""
    return {"u": "i", "O": "i"}.get(value.dtype.kind, value.dtype.kind)


def _named(value: Any) -> str:
    kind = getattr(value, "dtype", None)
    return f"Python's {type(value).__name__}" if kind is None else f"{kind}"
