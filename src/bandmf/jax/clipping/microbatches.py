"""A batch in turns, microbatch by microbatch, so that few gradients are in memory at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bandmf import _check
from bandmf.jax.clipping.devices import shares, zeros
from bandmf.jax.clipping.sums import Sums, added, together
from bandmf.jax.random_keys import as_keys_like, as_words

Array = jax.Array


def in_turns(add_up: Callable[[Any], tuple[Any, Any]], batch: Any, rows: int, size: int) -> tuple[Any, Any]:
    """`add_up` over microbatches of this size, one after the other; their sum, and what they gave, row by row."""
    turns = math.ceil(rows / size)
    cut = math.lcm(*map(shares, jax.tree.leaves(batch)))
    if size % cut:
        raise _check.fail(
            "microbatch", size, f"rows are cut over {cut} devices of an explicit mesh, and each takes its share of "
            "every turn", f"use a multiple of {cut}",
        )  # fmt: skip

    def split(leaf: Array) -> Array:
        """(turns, size, ...), so that a device which holds neighboring rows has its share of every turn."""
        filled = _filled(leaf, turns * size - rows)
        return jnp.swapaxes(filled.reshape(size, turns, *leaf.shape[1:]), 0, 1)

    def joined(leaf: Array) -> Array:
        return jnp.swapaxes(leaf, 0, 1).reshape(turns * size, *leaf.shape[2:])[:rows]

    parts = jax.tree.map(split, batch)
    shapes = jax.eval_shape(add_up, jax.tree.map(lambda leaf: leaf[0], parts))[0]
    start = jax.tree.map(zeros, shapes)

    def turn(sums: Sums, part: Any) -> tuple[Sums, Any]:
        more, seen = add_up(part)
        return added(sums, more), seen

    sums, seen = lax.scan(turn, Sums(start, start), parts)
    return together(sums), jax.tree.map(joined, seen)


def _filled(leaf: Array, more: int) -> Array:
    """The rows and so many of zeros, which in a mask do not count."""
    leaf = jnp.asarray(leaf)
    words = as_words(leaf)
    return as_keys_like(jnp.pad(words, [(0, more), *[(0, 0)] * (words.ndim - 1)]), leaf)
