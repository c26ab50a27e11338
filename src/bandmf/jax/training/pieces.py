"""What `batch.sum` makes of the results for the pieces of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf import _check
from bandmf.jax.clipping import Clipped, Examples, Sums, added, together


def added_up(results: Iterator[Any]) -> Any:
    """Sums are added up, and Examples follow each other row by row; of a single piece it is the very result."""
    first = next(results)
    terms, rows, structure = _parts(first)
    sums, seen = None, [rows]
    for result in results:
        more, rows, _ = _parts(result)
        # The first terms are the caller's arrays, who may have them elsewhere too; later sums are nobody else's.
        sums = _begin(terms, more) if sums is None else _add(sums, more)
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


@jax.jit
def _begin(terms: Any, more: Any) -> Sums:
    return added(Sums(terms, jax.tree.map(jnp.zeros_like, terms)), more)


_add = jax.jit(added, donate_argnums=0)


def check_sums(result: Any, rows: int) -> None:
    """Refuse, whatever the size of the batch, what could not be added up over the pieces of a larger one."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, (Clipped, Examples)))
    others = [node for node in nodes if not isinstance(node, (Clipped, Examples))]
    remedy = "return sums alone; clipped_gradient(..., return_examples=True) gives what single examples gave"
    for leaf in others:
        kind, shape = _kind(leaf), np.shape(leaf)
        if kind is None or not jnp.issubdtype(kind, jnp.number):
            raise _check.fail(
                "dtype in the result",
                str(kind or type(leaf).__name__),
                "batch.sum adds up numbers only",
                remedy,
            )
        # Of a plain sum, all by itself, a parameter may happen to have as many rows.
        if len(others) < len(nodes) and rows > 1 and shape[:1] == (rows,):
            raise _check.fail(
                "shape in the result", shape, f"has an entry for each of {rows} rows, and batch.sum would add up those "
                "of different examples", remedy,
            )  # fmt: skip


def _kind(leaf: Any) -> Any:
    """The dtype, or None of what JAX has none for, such as a text or a whole number of more than 32 bits."""
    try:
        return jnp.result_type(leaf) if isinstance(leaf, jax.Array) else jnp.asarray(leaf).dtype
    except (TypeError, OverflowError):
        return None
