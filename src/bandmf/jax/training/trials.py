"""Whether masked rows count in what a function gives for a piece of a batch: it is tried with all rows masked.

That a sum is zero then says something only where it is not zero with the mask of the batch: a mask that is forgotten
gives the same in both. So an array is known once it was not zero, and is tried when it first is. A function is tried at
most once more than its result has arrays; it is known by its code, and that of the functions it was made with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bandmf.jax.clipping import Clipped
from bandmf.jax.training.pieces import check_sums

Array = jax.Array
MASK_FORGOTTEN = (
    "mask: rows that are masked count in the sum; pass the mask on: "
    "batch.sum(lambda data, mask: gradient(weights, data, mask=mask)), or batch.sum(partial(gradient, weights))"
)


class _Found(NamedTuple):
    """Places of arrays in a result: those where masked rows count, and those of which it is not known yet."""

    counted: frozenset[int]
    open: frozenset[int]


class Trials:
    """What functions do with rows that are masked, for each kind of result."""

    def __init__(self) -> None:
        self._known: dict[Any, _Found] = {}

    def counted(
        self, gradient: Callable[..., Any], capacity: int, rows: Callable[[], Any], result: Any
    ) -> frozenset[int]:
        """The places of those arrays of `result` in which masked rows count; refused where that is a Clipped.

        `rows` gives the data and the mask, of `capacity` rows, that `result` is of.
        """
        leaves, structure = jax.tree.flatten(result)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return frozenset()
        kind = tuple(_parts(gradient, set())), structure, tuple(map(np.shape, leaves))
        found = self._known.get(kind)
        if found is not None and not found.open:
            return found.counted
        if found is None:
            check_sums(result, capacity)
        shown = _places(leaves)
        if found is None or shown & found.open:
            before = found or _Found(frozenset(), _numbers(leaves))
            counted = before.counted | _tried(gradient, *rows())
            found = self._known[kind] = _Found(counted, before.open - shown - counted)
        return found.counted


def _tried(gradient: Callable[..., Any], data: Any, mask: Array) -> frozenset[int]:
    """The places of what is not zero with all rows masked."""
    result = gradient(data, mask=jnp.zeros_like(mask))
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Clipped))
    if any(_places(jax.tree.leaves(node)) for node in nodes if isinstance(node, Clipped)):
        raise ValueError(MASK_FORGOTTEN)
    return _places(jax.tree.leaves(result))


# --- arrays -------------------------------------------------------------------------------------------------


def _places(leaves: list[Any]) -> frozenset[int]:
    """Of the arrays that are not all zero."""
    places = sorted(_numbers(leaves))
    flags = np.asarray(_nonzero([leaves[place] for place in places]))
    return frozenset(place for place, flag in zip(places, flags, strict=True) if flag)


@jax.jit
def _nonzero(leaves: list[Array]) -> Array:
    return jnp.array([jnp.any(leaf != 0) for leaf in leaves], bool)


def _numbers(leaves: list[Any]) -> frozenset[int]:
    """The places of arrays that can be other than zero."""
    return frozenset(place for place, leaf in enumerate(leaves) if jnp.size(leaf) and not _is_key(leaf))


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key))


# --- functions ----------------------------------------------------------------------------------------------


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """What tells functions apart that are made anew for every batch: code and switches, not weights and numbers."""
    if isinstance(value, (bool, str)):
        yield value
    if not callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, MethodType):
        inner = value.__func__, value.__self__
    elif isinstance(value, FunctionType):
        yield value.__code__
        kept = [content for cell in value.__closure__ or () for content in _contents(cell)]
        inner = *kept, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    else:
        yield value if isinstance(value, type) else type(value)
        inner = (getattr(value, "__wrapped__", None),)  # of jax.jit
    for part in inner:
        yield from _parts(part, seen)


def _contents(cell: Any) -> tuple[Any, ...]:
    """One thing, or nothing where a name is not bound yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
