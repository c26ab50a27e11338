"""Whether a function gives a sum over the rows that are not masked, and how much one example adds to it.

It is tried with other masks. With all rows masked, everything must be zero. With some rows masked, here and there, it
must not matter what is in them: they are tried with examples there and without. What the function gives for these rows
and for the others must add up to what it gives for all, or examples depend on each other. And a few examples are tried
alone. The examples are those of the batch, then others, and nothing of them leaves this file.

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

from bandmf._types import FloatArray
from bandmf.jax.clipping import Clipped, Examples
from bandmf.jax.training.functions import identity
from bandmf.jax.training.pieces import check_sums

Array = jax.Array
Arrays = dict[int, Any]  # by their place in a result
Mixed = Callable[[Any, bool], Any]  # data and mask, with these rows kept; in the others, examples or nothing
MASK_FORGOTTEN = (
    "mask: rows that are masked count in the sum; pass the mask on: "
    "batch.sum(lambda data, mask: gradient(weights, data, mask=mask)), or batch.sum(partial(gradient, weights)); and "
    "add what is no sum over rows, such as weight decay, after run.release"
)
NO_SUM = (
    "sum: what the function gives for two halves of a batch does not add up to what it gives for the whole, so "
    "examples depend on each other; compute nothing from several rows (means, batch norms, negatives), return the sum "
    "of clipped gradients in float32 (no mean: the planned batch size divides it later), and pass the mask on"
)
_ROUNDING = 1e-5  # of the largest number
_ADDED = {True: 1e-4, False: 0.05}  # the same for sums, in float32 or better and in less
_ALONE = 3  # examples
_AGAIN = 5  # calls that show whether a function is random
_OFTEN = 20  # trials of the same code


class Verdict(NamedTuple):
    """What trials showed of the arrays of a result, by their places."""

    wrong: dict[int, str]  # no sums, with the reason
    alone: FloatArray  # the squared norm of each array, for single examples: examples x places
    clip_norms: tuple[float | None, ...]  # of the Clipped that an array is of
    open: frozenset[int]  # always zero: nothing is known of them yet


class Trials:
    """What functions do with rows that are masked, for each kind of result."""

    def __init__(self) -> None:
        self._known: dict[Any, Verdict] = {}
        self._tries: Counter[Any] = Counter()

    def judged(
        self, gradient: Callable[..., Any], rows: int, mixed: Callable[[], Mixed], result: Any
    ) -> Verdict:
        """The verdict on what `gradient` gives; it is refused where a Clipped is no sum over the mask."""
        leaves, structure = jax.tree.flatten(result)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return Verdict({}, np.zeros((0, len(leaves))), _clip_norms(result), frozenset())
        code, switches = identity(gradient)
        kind = code, switches, structure, tuple(map(np.shape, leaves))
        known = self._known.get(kind)
        if known is None:
            check_sums(result, rows)
        elif not known.open:
            return known
        here = _nonzero(dict(enumerate(leaves)))
        if known is not None and not known.open & here:
            return known
        verdict = _tried(gradient, rows, mixed(), result)
        if known is not None:
            open_still = known.open & verdict.open
            alone = np.concatenate([known.alone, verdict.alone])
            verdict = verdict._replace(wrong=known.wrong | verdict.wrong, alone=alone, open=open_still)
        for place, reason in verdict.wrong.items():
            if verdict.clip_norms[place] is not None:
                raise ValueError(reason)
        self._known[kind] = verdict._replace(open=verdict.open - here)
        self._remark(code)
        return verdict

    def _remark(self, code: Any) -> None:
        self._tries[code] += 1
        if self._tries[code] == _OFTEN:
            warnings.warn(
                f"batch.sum has tried this function with other masks {_OFTEN} times, which takes time: a text or a "
                "switch that it was made with, or the shapes that it gives, were others each time",
                stacklevel=4,
            )


def _tried(gradient: Callable[..., Any], rows: int, mixed: Mixed, result: Any) -> Verdict:
    """Call the function with other masks; two results are held at a time, no more, as they may be large."""
    clip_norms, by_row = _clip_norms(result), _of_examples(result)
    places = [place for place in range(len(clip_norms)) if place not in by_row]

    def found(kept: Any, others: bool = True) -> Arrays:
        leaves = _called(gradient, *mixed(kept, others))
        return {place: leaves[place] for place in places if place < len(leaves)}

    some, rest = _halves(rows)
    counted = _nonzero(found(some & rest))
    suspects = _unlike(found(some), found(some, others=False)) | _unlike(
        found(rest), found(rest, others=False)
    )
    added = _added(found(some), found(rest))
    whole = found(some | rest)
    no_sums = _not_added(added, whole)
    shown = _nonzero(whole)
    del added, whole
    if suspects | no_sums:
        random = _random(found, some)
        suspects, no_sums = suspects - random, no_sums - random
    alone = [_squares(found(np.arange(rows) == row), len(clip_norms)) for row in _spread(rows)]
    wrong = dict.fromkeys(no_sums | by_row, NO_SUM) | dict.fromkeys(suspects | counted, MASK_FORGOTTEN)
    return Verdict(
        wrong, np.reshape(alone, (-1, len(clip_norms))), clip_norms, frozenset(places) - shown - wrong.keys()
    )


def _random(found: Callable[[Any], Arrays], kept: Any) -> frozenset[int]:
    """The places of what is not the same each time, of which the trials show nothing."""
    first, places = found(kept), frozenset[int]()
    for _ in range(_AGAIN):
        places |= _unlike(first, found(kept))
    return places


def _called(gradient: Callable[..., Any], data: Any, mask: Array) -> list[Any]:
    try:
        return jax.tree.leaves(gradient(data, mask=mask))
    except Exception as error:
        raise RuntimeError(
            "batch.sum called its function once more, with other rows masked, to see that these do not count, and it "
            f"failed ({type(error).__name__}: {error}); a function may be called with any mask and any number of "
            "times: do not donate weights to it, and take batches without an example for granted"
        ) from error


def _halves(rows: int) -> tuple[Any, Any]:
    """Rows to keep, without a pattern, so that a wrong part of a mask is another mask; and all others."""
    kept = np.random.default_rng(rows).permutation(rows) < rows / 2
    return kept, ~kept


def _spread(rows: int) -> list[int]:
    """A few rows, the first and the last among them."""
    return sorted({round(place) for place in np.linspace(0, rows - 1, _ALONE)})


# --- results ------------------------------------------------------------------------------------------------


def _clip_norms(result: Any) -> tuple[float | None, ...]:
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Clipped))
    return tuple(getattr(node, "clip_norm", None) for node in nodes for _ in jax.tree.leaves(node))


def _of_examples(result: Any) -> frozenset[int]:
    """The places of what has an entry for each row."""
    nodes = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, Examples))
    owners = [isinstance(node, Examples) for node in nodes for _ in jax.tree.leaves(node)]
    return frozenset(place for place, owner in enumerate(owners) if owner)


# --- arrays -------------------------------------------------------------------------------------------------


def _nonzero(arrays: Arrays) -> frozenset[int]:
    """The places of arrays that are not all zero."""
    return _where(arrays, _are_nonzero(_numbers(arrays)))


def _unlike(arrays: Arrays, others: Arrays) -> frozenset[int]:
    """The places of arrays that are not the same in both, but for rounding."""
    some, rest = _alike(arrays, others)
    return _where(some, _are_unlike(some, rest, dict.fromkeys(some, _ROUNDING)))


def _added(arrays: Arrays, others: Arrays) -> Arrays:
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


def _not_added(sums: Arrays, whole: Arrays) -> frozenset[int]:
    """The places where the sums of halves are not the whole."""
    totals, arrays = _alike({place: total for place, (total, _) in sums.items()}, whole)
    tolerances = {place: _ADDED[_is_exact(totals[place])] for place in totals}
    sizes = {place: sums[place][1] for place in totals}
    return _where(totals, _are_unlike(totals, arrays, tolerances, sizes))


def _squares(arrays: Arrays, places: int) -> FloatArray:
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
    return jnp.any(jnp.where(finite, jnp.abs(one - other) > tolerance * size, ~alike))


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
    return {place: array for place, array in arrays.items() if jnp.size(array) and not _is_key(array)}


def _is_exact(array: Any) -> bool:
    kind = jnp.result_type(array)
    return not jnp.issubdtype(kind, jnp.inexact) or jnp.finfo(kind).bits >= jnp.finfo(jnp.float32).bits


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key))
