"""What `batch.sum` makes of the results for the pieces of a batch, and whether masked rows count in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf.jax.clipping import Clipped, Examples, Sums, added, together

Array = jax.Array
MASK_FORGOTTEN = (
    "mask: rows that are masked count in the sum; pass the mask on: "
    "batch.sum(lambda data, mask: gradient(weights, data, mask=mask)), or batch.sum(partial(gradient, weights))"
)


def added_up(results: Iterator[Any]) -> Any:
    """Sums are added up, and Examples follow each other row by row; of a single piece it is the very result."""
    first = next(results)
    terms, rows, structure = _parts(first)
    sums, seen = None, [rows]
    for result in results:
        more, rows, _ = _parts(result)
        sums = _add(Sums(terms, jax.tree.map(jnp.zeros_like, terms)) if sums is None else sums, more)
        seen.append(rows)
    if sums is None:
        return first
    joined = {place: _joined([each[place] for each in seen]) for place in rows}
    totals = together(sums) | joined
    return jax.tree.unflatten(structure, [totals[place] for place in sorted(totals)])


def _joined(seen: list[Examples]) -> Any:
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *seen)


def _parts(result: Any) -> tuple[dict[int, Any], dict[int, Examples], Any]:
    """What is added up and what has rows, by place; and the structure that these places are of."""
    nodes, structure = jax.tree.flatten(result, is_leaf=lambda node: isinstance(node, Examples))
    rows = {place: node for place, node in enumerate(nodes) if isinstance(node, Examples)}
    return {place: node for place, node in enumerate(nodes) if place not in rows}, rows, structure


_add = jax.jit(added, donate_argnums=0)


class Trials:
    """What functions do with rows that are masked: tried once, with all of them masked, for each kind of result."""

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[int]] = {}

    def counted(self, gradient: Callable[..., Any], data: Any, mask: Array, result: Any) -> frozenset[int]:
        """The places of those arrays of `result` in which masked rows count; refused where that is a Clipped."""
        leaves, structure = jax.tree.flatten(result)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return frozenset()
        kind = structure, tuple(map(jnp.shape, leaves))
        if kind not in self._known:
            _check_sums(result, len(mask))
            found = gradient(data, mask=jnp.zeros_like(mask))
            nodes = jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, Clipped))
            if any(_places(node) for node in nodes if isinstance(node, Clipped)):
                raise ValueError(MASK_FORGOTTEN)
            self._known[kind] = _places(found)
        return self._known[kind]


def _places(tree: Any) -> frozenset[int]:
    """Of the arrays that are not all zero."""
    numbers = {place: leaf for place, leaf in enumerate(jax.tree.leaves(tree)) if _is_number(leaf)}
    flags = np.asarray(_nonzero(list(numbers.values())))
    return frozenset(place for place, flag in zip(numbers, flags, strict=True) if flag)


@jax.jit
def _nonzero(leaves: list[Array]) -> Array:
    return jnp.array([jnp.any(leaf != 0) for leaf in leaves], bool)


def _is_number(leaf: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _check_sums(result: Any, rows: int) -> None:
    """Refuse, whatever the size of the batch, what could not be added up over the pieces of a larger one."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, (Clipped, Examples)))
    others = [node for node in nodes if not isinstance(node, (Clipped, Examples))]
    remedy = "return sums alone; clipped_gradient(..., return_examples=True) gives what single examples gave"
    for leaf in others:
        kind, shape = jnp.result_type(leaf), jnp.shape(leaf)
        if not jnp.issubdtype(kind, jnp.number):
            raise _check.fail("dtype in the result", str(kind), "batch.sum adds up numbers only", remedy)
        # Of a plain sum, all by itself, a parameter may happen to have as many rows.
        if len(others) < len(nodes) and rows > 1 and shape[:1] == (rows,):
            raise _check.fail(
                "shape in the result", shape, f"has an entry for each of {rows} rows, and batch.sum would add up those "
                "of different examples", remedy,
            )  # fmt: skip
