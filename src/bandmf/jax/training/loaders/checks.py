"""What a function for the data gives if it is asked for the same examples in other company.

A row must be the same beside all others of a batch, beside half of them, and where every row is that one. What is
another each time, for the same indices, can only be warned of: random changes cannot be told from statistics there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf.jax.random_keys import as_words
from bandmf.randomness.stream import Indices

if TYPE_CHECKING:
    from bandmf.jax.training.loaders import Loader

_AGAIN = 40  # times that rows are loaded again, to see whether they are random
_ALONE = 3  # examples
_HALVES = 3  # times
_FEW = 4  # rows
# Of a column's largest number: products of matrices round otherwise for other numbers of rows.
_ROUNDING = 1e-3
_DIGITS = 4  # units in the last place of a column's largest number
_SINGLE = 2.0**-22  # the same in float32, for columns that are nearly zero


def varying_arrays(load: Loader, indices: Indices) -> list[int]:
    """Refuse a function that gives other rows if others are asked for; the arrays that are another each time."""
    middle = len(indices) // 2
    # The second half first: a function that sorts indices, say for a file, puts rows in other places.
    halves = indices[middle:], indices[:middle]
    together = np.concatenate(halves)
    whole, *parts = (_loaded(load, part) for part in (together, *halves))
    kept = list(_kept(len(together)))
    in_place = [_loaded(load, np.where(some, together, together[some][0])) for some in kept]
    _check_alike(load, [whole, *parts, *in_place])
    others = _unlike(whole, [np.concatenate(leaves) for leaves in zip(*parts, strict=True)])
    if middle < _FEW:  # products of so few rows take other ways, with other roundings
        others = {place for place in others if not jnp.issubdtype(whole[place].dtype, jnp.inexact)}
    for some, found in zip(kept, in_place, strict=True):
        # In the same places among as many rows: nothing rounds otherwise then, nor is compiled again.
        others |= _unlike([leaf[some] for leaf in whole], [leaf[some] for leaf in found], in_place=True)
    varying = set[int]()
    for _ in range(_AGAIN):
        if others <= varying:
            return sorted(varying)
        varying |= _unlike(whole, _loaded(load, together), in_place=True)
    if others <= varying:
        return sorted(varying)
    raise _refused(load, "other rows", "compute each row from its own example, and keep the order of the indices")


def warn_of_varying(load: Loader, varying: list[int], names: list[str]) -> None:
    """Say what cannot be seen in arrays that are another each time; of all, that indices may be ignored."""
    every = len(varying) == len(names)
    which = "all arrays" if every else " and ".join(f"data{names[place]}" for place in varying)
    stream = (
        "; where it ignores the indices, as a stream does, examples take part in other steps than planned"
        if every
        else ""
    )
    warnings.warn(
        f"data={load.name!r}: gives other rows for the same indices each time, in {which}, and whether they depend on "
        "other examples cannot be seen there: change each example by itself, and keep no statistics of a batch or of "
        f"rows loaded before{stream}. After a restart steps can be repeated only if the changes are derived from the "
        "index, or are made in the loss, from its key",
        stacklevel=2,
    )


def of_another_shape(load: Loader) -> ValueError:
    return _refused(load, "rows of another shape", "pad rows to one length: every shape is compiled by itself")


def _refused(load: Loader, gives: str, remedy: str) -> ValueError:
    return _check.fail(
        "data", load.name,
        f"gives {gives} for an example if other examples are loaded with it (a mean or a largest number of the batch, "
        "mixed or sorted rows, the longest text), so examples would depend on each other", remedy,
    )  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------------------


def _loaded(load: Loader, indices: Indices) -> list[Any]:
    """Copies, as a function may use its memory again."""
    leaves = [native(np.array(as_words(leaf))) for leaf in jax.tree.leaves(load(indices))]
    for leaf in leaves:
        check_count(leaf, indices)
    return leaves


def check_count(leaf: Any, indices: Any) -> None:
    """Neither number is shown: how many there are in a batch is secret."""
    if len(leaf) != len(indices):
        raise ValueError("data: must give one row for each index, in every array, and gives more or fewer")


def _check_alike(load: Loader, several: list[list[Any]]) -> None:
    shapes = {tuple(leaf.shape[1:] for leaf in leaves) for leaves in several}
    if len(shapes) > 1:
        raise of_another_shape(load)


def _kept(rows: int) -> Iterator[Any]:
    """Which rows stay in their places: single ones, and halves of any kind, beside which all others are one."""
    for place in sorted({round(place) for place in np.linspace(0, rows - 1, _ALONE)}):
        yield np.arange(rows) == place
    dice = np.random.default_rng(0)  # the same each time, so that an error can be seen again
    for _ in range(_HALVES if rows > 1 else 0):
        some = dice.permutation(rows) < rows // 2
        yield from (some, ~some)


def native(leaf: Any) -> Any:
    """In this machine's order of bytes, which JAX asks for."""
    is_other = isinstance(leaf, np.ndarray) and not leaf.dtype.isnative
    return leaf.astype(leaf.dtype.newbyteorder("=")) if is_other else leaf


def _unlike(some: list[Any], others: list[Any], in_place: bool = False) -> set[int]:
    """Which arrays differ."""
    pairs = enumerate(zip(some, others, strict=True))
    return {place for place, pair in pairs if _is_other(*pair, in_place)}


def _is_other(one: Any, other: Any, in_place: bool) -> bool:
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return one.tobytes() != other.tobytes()
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        return _is_other(one.real, other.real, in_place) or _is_other(one.imag, other.imag, in_place)
    last_place = float(jnp.finfo(one.dtype).eps)
    one, other = (array.astype(np.float64) for array in (one, other))
    sizes = np.abs(np.where(np.isfinite(one), one, 0))
    # By column: one in small units would be nothing beside one in large units.
    columns = sizes.max(0, initial=0.0)
    if in_place:
        allowed = np.maximum(2 * last_place * sizes, _SINGLE * columns)
    else:
        rounding = max(_ROUNDING, _DIGITS * last_place)
        allowed = np.maximum(rounding * columns, _SINGLE * sizes.max(initial=0.0))
    return not np.isclose(one, other, rtol=0, atol=allowed, equal_nan=True).all()
