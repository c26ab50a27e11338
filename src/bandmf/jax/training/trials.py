"""Whether a function gives a sum over the rows that are not masked: it is tried with other masks.

With all rows masked, everything must be zero. With some rows masked, here and there, it must not matter what is in
them: they are tried with examples there and without. And what the function gives for these rows and for the others must
add up to what it gives for all. The examples are those of the batch, then others, and nothing of them leaves this file.

This says something of an array only if it is not always zero. So a function is tried at the first batch, and again at
one that gives an array which was zero before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bandmf.jax.clipping import Clipped
from bandmf.jax.training.functions import identity
from bandmf.jax.training.pieces import check_sums

Array = jax.Array
MASK_FORGOTTEN = (
    "mask: rows that are masked count in the sum; pass the mask on: "
    "batch.sum(lambda data, mask: gradient(weights, data, mask=mask)), or batch.sum(partial(gradient, weights))"
)
NO_SUM = (
    "sum: what the function gives for two halves of a batch does not add up to what it gives for the whole; return the "
    "sum of clipped gradients (no mean: the planned batch size divides it later), and pass the mask on"
)
_ROUNDING = 1e-5  # of the largest number
_COARSE = 0.05  # the same, where numbers are added up in another order, in any precision
Mixed = Callable[[Any, bool], Any]  # data and mask, with these rows kept; in the others, examples or nothing
_OFTEN = 20  # trials of the same code


class _Found(NamedTuple):
    """Places of arrays in a result: those that are no sums, with the reason, and those that were always zero."""

    wrong: dict[int, str]
    open: frozenset[int]  # nothing is known of them yet


class Trials:
    """What functions do with rows that are masked, for each kind of result."""

    def __init__(self) -> None:
        self._known: dict[Any, _Found] = {}
        self._tries: Counter[Any] = Counter()

    def wrong(self, gradient: Callable[..., Any], rows: int, mixed: Mixed, result: Any) -> dict[int, str]:
        """The places of those arrays of `result` that are no sums over the mask; refused where that is a Clipped."""
        leaves, structure = jax.tree.flatten(result)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return {}
        code, switches = identity(gradient)
        kind = code, switches, structure, tuple(map(np.shape, leaves))
        found = self._known.get(kind)
        if found is None:
            check_sums(result, rows)
        elif not found.open:
            return found.wrong
        here = _places(leaves)
        if found is not None and not found.open & here:
            return found.wrong
        found = found or _Found({}, _numbers(leaves))
        wrong, shown = _tried(gradient, rows, mixed)
        for place in _of_clipped(result) & wrong.keys():
            raise ValueError(wrong[place])
        self._known[kind] = _Found(found.wrong | wrong, found.open - shown - here - wrong.keys())
        self._remark(code)
        return self._known[kind].wrong

    def _remark(self, code: Any) -> None:
        self._tries[code] += 1
        if self._tries[code] == _OFTEN:
            warnings.warn(
                f"batch.sum has tried this function with other masks {_OFTEN} times, which takes time: a text or a "
                "switch that it was made with, or the shapes that it gives, were others each time",
                stacklevel=4,
            )


def _tried(gradient: Callable[..., Any], rows: int, mixed: Mixed) -> tuple[dict[int, str], frozenset[int]]:
    """The places that are no sum over the rows of the mask, with the reason; and those that show it."""

    def found(kept: Any, others: bool = True) -> list[Any]:
        return _called(gradient, *mixed(kept, others))

    some, rest = _halves(rows)
    without_rows = _places(found(some & rest))
    first = found(some)
    forgotten = _unlike(first, found(some, others=False))
    second = found(rest)
    forgotten |= _unlike(second, found(rest, others=False))
    whole = found(some | rest)
    no_sums = _unlike(_added(first, second), whole, _COARSE)
    # A function that gives something else each time shows nothing.
    random = _unlike(first, found(some)) if forgotten | no_sums else frozenset()
    forgotten = forgotten - random | without_rows
    return dict.fromkeys(no_sums - random, NO_SUM) | dict.fromkeys(forgotten, MASK_FORGOTTEN), _places(whole)


def _called(gradient: Callable[..., Any], data: Any, mask: Array) -> list[Any]:
    try:
        return jax.tree.leaves(gradient(data, mask=mask))
    except Exception as error:
        raise RuntimeError(
            "batch.sum called its function once more, with other rows masked, to see that these do not count, and it "
            f"failed ({type(error).__name__}: {error}); a function may be called with any mask and any number of "
            "times: do not donate weights to it, and take batches without an example for granted"
        ) from error


def _of_clipped(result: Any) -> frozenset[int]:
    """The places of arrays that are of a Clipped."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Clipped))
    owners = [isinstance(node, Clipped) for node in nodes for _ in jax.tree.leaves(node)]
    return frozenset(place for place, owner in enumerate(owners) if owner)


def _halves(rows: int) -> tuple[Any, Any]:
    """Rows to keep, without a pattern, so that a wrong part of a mask is another mask; and all others."""
    kept = np.random.default_rng(rows).permutation(rows) < rows / 2
    return kept, ~kept


# --- arrays -------------------------------------------------------------------------------------------------


def _places(leaves: list[Any]) -> frozenset[int]:
    """Of the arrays that are not all zero."""
    places = sorted(_numbers(leaves))
    return _where(places, _nonzero([leaves[place] for place in places]))


def _unlike(leaves: list[Any], others: list[Any], tolerance: float = _ROUNDING) -> frozenset[int]:
    """The places of arrays that are not the same in both, but for rounding."""
    places = sorted(_numbers(leaves) & _numbers(others))
    pairs = [leaves[place] for place in places], [others[place] for place in places]
    return _where(places, _unlike_flags(*pairs, tolerance))


def _added(leaves: list[Any], others: list[Any]) -> list[Any]:
    return [one if _is_key(one) else one + other for one, other in zip(leaves, others, strict=True)]


def _where(places: list[int], flags: Array) -> frozenset[int]:
    return frozenset(place for place, flag in zip(places, np.asarray(flags), strict=True) if flag)


@jax.jit
def _nonzero(leaves: list[Array]) -> Array:
    return jnp.array([jnp.any(leaf != 0) for leaf in leaves], bool)


@jax.jit
def _unlike_flags(leaves: list[Array], others: list[Array], tolerance: float) -> Array:
    return jnp.array([_unlike_arrays(*pair, tolerance) for pair in zip(leaves, others, strict=True)], bool)


def _unlike_arrays(one: Array, other: Array, tolerance: float) -> Array:
    one, other = (jnp.asarray(array, jnp.result_type(array, jnp.float32)) for array in (one, other))
    finite = jnp.isfinite(one) & jnp.isfinite(other)
    sizes = [jnp.where(finite, jnp.abs(array), 0) for array in (one, other)]
    far = jnp.abs(one - other) > tolerance * jnp.maximum(*map(jnp.max, sizes))
    alike = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    return jnp.any(jnp.where(finite, far, ~alike))


def _numbers(leaves: list[Any]) -> frozenset[int]:
    """The places of arrays that can be other than zero."""
    return frozenset(place for place, leaf in enumerate(leaves) if jnp.size(leaf) and not _is_key(leaf))


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key))
