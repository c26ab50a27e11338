"""Functions from indices to rows, as data: the row of an example may not depend on what else is loaded with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf.randomness.stream import Indices

_AGAIN = 40  # times that rows are loaded again, to see whether they are random
_MANY = 32  # examples that are all the same
_ROUNDING = 1e-3  # of the largest number: products of matrices round otherwise for other numbers of rows


def check_loads_apart(load: Callable[[Indices], Any], indices: Indices) -> None:
    """Refuse a function that gives other rows, or rows in another place, if others are asked for, too."""
    middle = len(indices) // 2
    # The second half first: a function that sorts indices, say for a file, puts rows in other places.
    halves = indices[middle:], indices[:middle]
    together = np.concatenate(halves)
    whole, *parts = (_loaded(load, part) for part in (together, *halves))
    if any(len(part) != len(whole) for part in parts) or len({_shapes(part) for part in (whole, *parts)}) > 1:
        raise of_another_shape(load)
    if not _differ(whole, [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]):
        return
    if not any(_differ(whole, _loaded(load, together)) for _ in range(_AGAIN)):  # nor are they random
        raise _refused(
            load, "other rows", "compute each row from its own example, and keep the order of the indices"
        )


def warn_of_repeated(load: Callable[[Indices], Any], examples: int) -> None:
    """Indices beyond the end of an array of JAX are the last one: its example would count many times."""
    many = min(examples // 2, _MANY)
    last = _loaded(load, np.linspace(examples - 1 - examples // 8, examples - 1, many).astype(np.int64))
    first = _loaded(load, np.linspace(0, examples // 2, many).astype(np.int64))
    if many == _MANY and _is_one_row(last) and not _is_one_row(first):
        warnings.warn(
            f"data: the last examples are all the same; if there are fewer than examples={examples}, the last one "
            "counts for all that are not there: plan for the examples that there are",
            stacklevel=2,
        )


def _is_one_row(leaves: list[Any]) -> bool:
    return all(bool((leaf == leaf[:1]).all()) for leaf in leaves)


def of_another_shape(load: Callable[[Indices], Any]) -> ValueError:
    return _refused(
        load, "rows of another shape", "pad rows to one length: every shape is compiled by itself"
    )


def _loaded(load: Callable[[Indices], Any], indices: Indices) -> list[Any]:
    """Copies, as a function may use its memory again."""
    leaves = [np.array(_bits(leaf)) for leaf in jax.tree.leaves(load(indices))]
    for leaf in leaves:
        if len(leaf) != len(indices):
            raise _check.fail("data", len(leaf), f"must give one row for each of {len(indices)} indices")
    return leaves


def _shapes(leaves: list[Any]) -> tuple[Any, ...]:
    """Of single rows."""
    return tuple(leaf.shape[1:] for leaf in leaves)


def _refused(load: Callable[[Indices], Any], gives: str, remedy: str) -> ValueError:
    return _check.fail(
        "data", getattr(load, "__name__", type(load).__name__),
        f"gives {gives} for an example if other examples are asked for, too (a mean or a largest number of the batch, "
        "mixed or sorted rows, the longest text), so examples would depend on each other", remedy,
    )  # fmt: skip


def _differ(some: list[Any], others: list[Any]) -> bool:
    return any(_is_other(one, other) for one, other in zip(some, others, strict=True))


def _is_other(one: Any, other: Any) -> bool:
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return one.tobytes() != other.tobytes()
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        return _is_other(one.real, other.real) or _is_other(one.imag, other.imag)
    one, other = (array.astype(np.float64) for array in (one, other))
    largest = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    return not np.allclose(one, other, rtol=0, atol=_ROUNDING * largest, equal_nan=True)


def _bits(leaf: Any) -> Any:
    """Numbers: of random keys, their words."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
