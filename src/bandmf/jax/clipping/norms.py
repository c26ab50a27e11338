"""The norm of a gradient, never below the true one, and the gradient clipped by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
LEAF = 128  # numbers added up one after the other; then the sums of these, and so on
ROUNDING = 2.0**-24  # the largest relative error of one operation in float32


def clip(gradient: Any, clip_norm: float) -> tuple[Any, Array]:
    """The gradient, shortened to the clip norm where it is longer, and its norm; both in float32."""
    gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
    # In units of the clip norm, squares neither vanish nor overflow where it matters.
    leaves = [leaf * jnp.float32(1 / clip_norm) for leaf in jax.tree.leaves(gradient)]
    squares, depth = zip(*(_sum_of_squares(leaf) for leaf in leaves), strict=True)
    norm = jnp.sqrt(sum(squares[1:], squares[0])) * jnp.float32(1 + _bound(max(depth) + len(leaves)))
    factor = jnp.minimum(1, 1 / norm)  # 1 / 0 is infinite, and the minimum is 1
    return jax.tree.map(lambda leaf: leaf * factor, gradient), norm * jnp.float32(clip_norm)


def _bound(additions: int) -> float:
    """By how much a norm, relative to itself, may be too small, if its squares went through so many additions."""
    # A root halves the errors of the additions; the rest is for squares, root, quotient and products.
    return (0.5 * additions + 16) * ROUNDING


def _sum_of_squares(leaf: Array) -> tuple[Array, int]:
    """The sum, in a tree of sums of at most LEAF numbers, and how many additions a number goes through in it."""
    flat, rest, additions = jnp.square(leaf).reshape(-1), [], LEAF
    while flat.size > LEAF:
        even = flat.size // LEAF * LEAF  # what is left is added at the end: padding would copy all of it
        rest.append(flat[even:].sum())
        # A compiler that sees through both sums makes one long one of them, whose error has no such bound.
        flat = lax.optimization_barrier(flat[:even].reshape(-1, LEAF).sum(axis=1))
        additions += LEAF + 1
    return sum(rest, flat.sum()), additions
