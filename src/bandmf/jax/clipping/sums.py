"""Sums of rows that count, and running sums that lose nothing to rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def masked_sum(rows: Array, counts: Array) -> Array:
    """The sum of the rows that count; the others may hold anything, NaN included."""
    wide = counts.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(wide, rows, 0).sum(axis=0)


class Sums(NamedTuple):
    """A running sum, and what rounding has taken from it so far: else one term more could move it by many roundings."""

    total: Any
    lost: Any


def added(sums: Sums, more: Any) -> Sums:
    """One term more; the error of every addition is computed exactly, and kept."""
    total = jax.tree.map(jnp.add, *lax.optimization_barrier((sums.total, more)))

    def error(before: Array, term: Array, after: Array) -> Array:
        back = after - before
        return (before - (after - back)) + (term - back)

    lost = jax.tree.map(error, sums.total, more, lax.optimization_barrier(total))
    return Sums(total, jax.tree.map(jnp.add, sums.lost, lost))


def together(sums: Sums) -> Any:
    """The sum, rounded once."""
    return jax.tree.map(jnp.add, sums.total, sums.lost)
