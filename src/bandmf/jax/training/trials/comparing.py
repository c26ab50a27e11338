"""Arrays of results, by their place, compared with each other: which are zero, which differ, which add up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bandmf._types import FloatArray
from bandmf.jax.random_keys import is_key

Array = jax.Array
Arrays = dict[int, Any]  # by their place in a result
_SAME = 1e-5  # of the largest number
_TINY = 1e-30  # below, numbers have fewer digits
ADDED = {True: 1e-4, False: 0.05}  # the same for sums, in float32 or better and in less


def nonzero(arrays: Arrays) -> frozenset[int]:
    """The places of arrays that are not all zero."""
    return _where(arrays, _are_nonzero(_numbers(arrays)))


def unlike(arrays: Arrays, others: Arrays) -> frozenset[int]:
    """The places of arrays that are not the same in both, but for rounding."""
    some, rest = _alike(arrays, others)
    return _where(some, _are_unlike(some, rest, dict.fromkeys(some, _SAME)))


def added(arrays: Arrays, others: Arrays) -> Arrays:
    """Their sums, and the sizes that these are to be judged by; both are emptied as it goes."""
    sums = {}
    for place in list(arrays):
        one, other = arrays.pop(place), others.pop(place, None)
        if np.shape(one) == np.shape(other) and place in _numbers({place: one}):
            sums[place] = _sum_and_size(one, other)
    return sums


@jax.jit
def _sum_and_size(one: Array, other: Array) -> tuple[Array, Array]:
    return one + other, jnp.maximum(_largest(one), _largest(other))


def not_added(sums: Arrays, whole: Arrays) -> frozenset[int]:
    """The places where the sums of halves are not the whole."""
    totals, arrays = _alike({place: total for place, (total, _) in sums.items()}, whole)
    tolerances = {place: ADDED[_is_exact(totals[place])] for place in totals}
    sizes = {place: sums[place][1] for place in totals}
    return _where(totals, _are_unlike(totals, arrays, tolerances, sizes))


def squares(arrays: Arrays, places: int) -> FloatArray:
    """The squared norm of each array, by place."""
    found = np.zeros(places)
    for place, norm in _norms(_numbers(arrays)).items():
        found[place] = float(norm) ** 2
    return found


@jax.jit
def _norms(arrays: Arrays) -> Arrays:
    def norm(array: Array) -> Array:
        wide = jnp.abs(array).astype(jnp.float32)
        largest = jnp.maximum(jnp.max(wide), 1e-30)
        return largest * jnp.sqrt(jnp.sum(jnp.square(wide / largest)))

    return jax.tree.map(norm, arrays)


@jax.jit
def _are_nonzero(arrays: Arrays) -> Arrays:
    return jax.tree.map(lambda array: jnp.any(array != 0), arrays)


@jax.jit
def _are_unlike(arrays: Arrays, others: Arrays, tolerances: Arrays, sizes: Arrays | None = None) -> Arrays:
    if sizes is None:
        sizes = jax.tree.map(lambda *pair: jnp.maximum(*map(_largest, pair)), arrays, others)
    return jax.tree.map(_is_unlike, arrays, others, tolerances, sizes)


def _is_unlike(one: Array, other: Array, tolerance: Array, size: Array) -> Array:
    one, other = (jnp.asarray(array, jnp.result_type(array, jnp.float32)) for array in (one, other))
    finite = jnp.isfinite(one) & jnp.isfinite(other)
    alike = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    return jnp.any(jnp.where(finite, jnp.abs(one - other) > tolerance * jnp.maximum(size, _TINY), ~alike))


def _largest(array: Array) -> Array:
    """Of what is finite."""
    sizes = jnp.abs(jnp.asarray(array, jnp.result_type(array, jnp.float32)))
    return jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0))


def _where(arrays: Arrays, flags: Arrays) -> frozenset[int]:
    return frozenset(place for place in arrays if place in flags and bool(flags[place]))


def _alike(arrays: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
    """Those of both that are numbers and have the same shape."""
    others = _numbers(others)
    some = {k: v for k, v in _numbers(arrays).items() if k in others and np.shape(v) == np.shape(others[k])}
    return some, {place: others[place] for place in some}


def _numbers(arrays: Arrays) -> Arrays:
    """Those that can be other than zero."""
    return {place: array for place, array in arrays.items() if jnp.size(array) and not is_key(array)}


def _is_exact(array: Any) -> bool:
    kind = jnp.result_type(array)
    return not jnp.issubdtype(kind, jnp.inexact) or jnp.finfo(kind).bits >= jnp.finfo(jnp.float32).bits
