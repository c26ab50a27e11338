"""Sums of clipped gradients: what one example may contribute.

Guarantees:
- an example contributes at most clip_norm, in float32 whatever the model's precision: norms are never below the true
  ones, by a bound on all rounding errors of their sums;
- norm and sum come from the same numbers: gradients are computed once, as the result of a conditional;
- what it contributes does not depend on other examples: `loss` sees one example at a time, and inside of shard_map the
  gradients of different devices are not added before they are clipped;
- rows that a mask leaves out, and examples whose gradient is not finite or longer than 10^19 clip norms, contribute
  exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bandmf import _check
from bandmf.jax.noise.digest import words

Array = jax.Array
LEAF = 128  # numbers added up one after the other; then the sums of these, and so on
ROUNDING = 2.0**-24  # the largest relative error of one operation in float32


@partial(jax.tree_util.register_dataclass, data_fields=("total",), meta_fields=("clip_norm", "shapes"))
@dataclass(frozen=True)
class Clipped:
    """The sum of clipped gradients, a pytree like the parameters, and the norm that each was clipped to.

    `bandmf.jax.privatize` takes it apart, if its noise is for this norm; it is no update of the parameters.
    `shapes` are those of the arrays that were clipped together. They stay as they are where vmap, scan or shard_map
    make larger arrays of several sums, whose norm is that of none of them: such a sum is refused.
    """

    total: Any
    clip_norm: float
    shapes: tuple[tuple[int, ...], ...] | None = None  # of `total` by default

    def __post_init__(self) -> None:
        if self.shapes is None:
            object.__setattr__(self, "shapes", _shapes(self.total))

    def check_whole(self) -> None:
        """Refuse what was put together from several sums."""
        found = _shapes(self.total)
        if found != self.shapes:
            raise _check.fail(
                "total", f"arrays of the shapes {found}", f"what was clipped together has {self.shapes}: an example "
                "would add as much to each part as to one alone",
                "clip once for all parameters: put vmap, scan or the like inside of the loss, not around "
                "clipped_gradient; inside of shard_map, let every device have the whole parameters",
            )  # fmt: skip


def _shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(tree))


class Examples(NamedTuple):
    """What single examples gave, row by row; it depends on the data and has no noise: look, but do not publish."""

    values: Array  # of the loss
    norms: Array  # of the gradients, before clipping
    aux: Any  # of the loss, with has_aux


def clipped_gradient(
    loss: Callable[..., Any],
    *,
    clip_norm: float,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    microbatch: int | None = None,
    has_aux: bool = False,
    keep_batch_dim: bool = False,
    return_examples: bool = False,
    spmd_axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """A function like jax.grad(loss), that gives the sum over a batch of the gradients clipped to `clip_norm`.

    >>> import numpy as np
    >>> def loss(weights, example):
    ...     x, y = example
    ...     return 0.5 * (x @ weights - y) ** 2
    >>> gradient = clipped_gradient(loss, clip_norm=1.0)
    >>> weights, batch = jnp.zeros(2), (jnp.array([[3.0, 4.0], [0.0, 0.5]]), jnp.array([1.0, 1.0]))
    >>> np.asarray(gradient(weights, batch).total).round(3)
    array([-0.6, -1.3], dtype=float32)
    >>> np.asarray(gradient(weights, batch, mask=jnp.array([True, False])).total).round(3)
    array([-0.6, -0.8], dtype=float32)

    `loss` takes one example: the arguments `batch_argnums` without their first dimension (with `keep_batch_dim`, with
    one of size 1). `mask` says which rows count. `microbatch` is how many gradients are in memory at once; all by
    default. With `has_aux`, where `loss` returns (value, aux), or `return_examples` the result is (sum, Examples).
    `spmd_axis_name` is the mesh axis that rows are sharded over, where `loss` contains shard_map.
    """
    clip_norm = _check.real("clip_norm", clip_norm, 1e-30, 1e30)
    if microbatch is not None:
        _check.whole("microbatch", microbatch)
    batched = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    _check_apart(chosen, batched)
    differentiated = jax.value_and_grad(loss, argnums, has_aux=has_aux)
    looked_at = has_aux or return_examples

    def one(arguments: tuple[Any, ...], places: tuple[int, ...], example: tuple[Any, ...]) -> tuple[Any, Any]:
        """The gradient of one example, and what else is wanted of it."""
        whole = list(arguments)
        for place, given in zip(places, example, strict=True):
            whole[place] = jax.tree.map(lambda leaf: leaf[None], given) if keep_batch_dim else given
        value, gradient = differentiated(*whole)
        return gradient, value if looked_at else None

    def summed(*arguments: Any, mask: Array | None = None) -> Any:
        places, weights = (_places(these, len(arguments)) for these in (batched, chosen))
        _check_apart(weights, places)
        _check_real(arguments, weights)
        rows = _rows([arguments[place] for place in places])
        kept = jnp.ones(rows, bool) if mask is None else jnp.asarray(mask, bool)
        if kept.shape != (rows,):
            raise _check.fail("mask.shape", kept.shape, f"must be ({rows},): one entry for each row")
        _check_others(arguments, places, weights, rows)
        examples = tuple(arguments[place] for place in places)
        own = _own_weights(arguments, weights, (examples, kept))
        others = tuple(None if place in places else given for place, given in enumerate(own))
        every = jax.vmap(partial(one, others, places), spmd_axis_name=spmd_axis_name)
        always = _always([own[place] for place in weights], examples)

        def add_up(part: Any) -> tuple[Any, Any]:
            given, counts = part
            gradients, more = _computed_once(every, given, always)
            gradients, norms = jax.vmap(partial(_clip, clip_norm=clip_norm))(gradients)
            total = jax.tree.map(lambda leaf: _masked_sum(leaf, counts & jnp.isfinite(norms)), gradients)
            value, aux = more if has_aux else (more, None)
            return total, Examples(value, norms, aux) if looked_at else None

        if microbatch is None or microbatch >= rows:
            total, seen = add_up((examples, kept))
        else:
            total, seen = _in_turns(add_up, (examples, kept), rows, microbatch)
        result = Clipped(total, clip_norm)
        return (result, seen) if looked_at else result

    return summed


def _check_real(arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> None:
    """Refuse to differentiate what is no real number, such as the state of an optimizer."""
    for place in chosen:
        for leaf in jax.tree.leaves(arguments[place]):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise _check.fail(
                    f"dtype in argument {place}", str(jnp.result_type(leaf)),
                    "must be a floating-point type: the gradient is taken by this argument",
                    "give the weights there, and not the state of the optimizer: run.release returns what update does, "
                    "in its order",
                )  # fmt: skip


def _computed_once(function: Callable[[Any], Any], given: Any, always: Array) -> Any:
    """What a function gives, as the result of a conditional that always holds.

    Compilers compute again what is used twice: with a fused multiply-add for the norm and without one for the sum, one
    example was seen to add 347,287 clip norms. They cannot see through a conditional, as they do, on CPUs, through a
    barrier.
    """
    shapes = jax.eval_shape(function, given)
    return lax.cond(always, function, lambda _: jax.tree.map(_zeros, shapes), given)


def _always(weights: Any, examples: Any) -> Array:
    """True, computed in a way that no compiler knows to be true: it would drop the conditional.

    From several arrays, as some may be constants of the program. Of several models or groups (vmap) it is one number
    all the same: the conditional would become a choice otherwise, of which both sides are computed.
    """
    held, seen = ([leaf for leaf in jax.tree.leaves(tree) if jnp.size(leaf)] for tree in (weights, examples))
    chosen = [*sorted(held, key=jnp.size)[:1], *seen]
    return _holds([words(lax.stop_gradient(leaf)) for leaf in chosen])


@jax.custom_batching.custom_vmap
def _holds(bits: list[Array]) -> Array:
    counts = [lax.population_count(each.max()) for each in bits]
    return sum(counts, jnp.uint32(0)) <= 32 * max(1, len(counts))


@_holds.def_vmap
def _(_size: int, _batched: Any, bits: list[Array]) -> tuple[Array, bool]:
    return _holds(bits), False


def _places(given: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Places of arguments, counted from the first."""
    if any(not -count <= place < count for place in given):
        raise _check.fail("batch_argnums or argnums", given, f"there are {count} arguments")
    return tuple(place % count for place in given)


def _check_apart(chosen: tuple[int, ...], batched: tuple[int, ...]) -> None:
    if set(batched) & set(chosen):
        given = chosen[0] if len(chosen) == 1 else chosen
        raise _check.fail(
            "argnums", given, f"may not be among batch_argnums={batched}: those are the examples"
        )


def _check_others(
    arguments: tuple[Any, ...], batched: tuple[int, ...], chosen: tuple[int, ...], rows: int
) -> None:
    """Refuse what every example would see, though it looks as if it had a row for each."""
    others = [place for place in range(len(arguments)) if place not in (*batched, *chosen)]
    # Of one row, it would be the example's own.
    alike = [place for place in others if rows > 1 and rows in _lengths(arguments[place])]
    if alike:
        raise _check.fail(
            "batch_argnums", batched, f"argument {alike[0]} has {rows} rows too, and every example would see them all",
            f"if these are rows of the examples, use batch_argnums={(*batched, *alike)}; if they are for all examples "
            "alike, such as frozen weights, bind them: functools.partial(loss, name=...)",
        )  # fmt: skip


def _lengths(tree: Any) -> set[int]:
    """Of the first dimension of every array that is longer than one."""
    shapes = [[size for size in getattr(leaf, "shape", ()) if size > 1] for leaf in jax.tree.leaves(tree)]
    return {shape[0] for shape in shapes if shape}


# --- inside of shard_map ----------------------------------------------------------------------------------


def _own_weights(arguments: tuple[Any, ...], chosen: tuple[int, ...], examples: Any) -> tuple[Any, ...]:
    """The arguments, with weights of which every device has its own copy where examples differ between devices.

    The gradient of weights that devices share is a sum over all of them, and would be clipped as one.
    """
    axes = _varying(examples)

    def own(leaf: Any) -> Any:
        if beyond := _varying(leaf) - axes:
            raise _check.fail(
                "weights", f"cut over the mesh axes {sorted(beyond)}", "a device would clip its own part of a gradient "
                "by itself", "inside of shard_map, cut examples only; weights can be cut by jit, without shard_map",
            )  # fmt: skip
        missing = tuple(sorted(axes - _varying(leaf)))
        return _made_varying(leaf, missing) if missing else leaf

    return tuple(
        jax.tree.map(own, given) if place in chosen else given for place, given in enumerate(arguments)
    )


def _varying(tree: Any) -> frozenset[str]:
    """The mesh axes of a shard_map over which arrays differ from device to device."""
    found: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        axes = getattr(kind, "vma", None)
        if axes is None and hasattr(kind, "manual_axis_type"):  # as later versions of JAX call it
            axes = getattr(kind.manual_axis_type, "varying", None) or frozenset()
        if axes is None and jax.sharding.get_abstract_mesh().manual_axes:
            raise RuntimeError(
                f"jax {jax.__version__}: does not say which arrays differ between devices; use clipped_gradient "
                "outside of shard_map"
            )
        found |= axes or frozenset()
    return found


def _made_varying(leaf: Any, axes: tuple[str, ...]) -> Any:
    cast = getattr(lax, "pcast", None)
    if cast is not None:
        return cast(leaf, axes, to="varying")
    return getattr(lax, "pvary")(leaf, axes)  # noqa: B009 (in older versions of JAX)


def _zeros(like: jax.ShapeDtypeStruct) -> Any:
    """Zeros of the same type: cut over an explicit mesh, and different between devices, where the others are."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = like.sharding if getattr(mesh, "explicit_axes", ()) else None
    made, axes = lax.full(like.shape, 0, like.dtype, sharding=sharding), tuple(sorted(_varying(like)))
    return _made_varying(made, axes) if axes else made


# --- norms and sums ---------------------------------------------------------------------------------------


def _clip(gradient: Any, clip_norm: float) -> tuple[Any, Array]:
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


def _masked_sum(rows: Array, counts: Array) -> Array:
    """The sum of the rows that count; the others may hold anything, NaN included."""
    wide = counts.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(wide, rows, 0).sum(axis=0)


def _rows(batch: list[Any]) -> int:
    """The number of rows, which all arrays of a batch share."""
    leaves = jax.tree.leaves(batch)
    if not leaves or any(not getattr(leaf, "ndim", 0) for leaf in leaves):
        raise ValueError(
            "batch: must be arrays, each with a first dimension whose entries are the examples; Python lists are trees "
            "of numbers to JAX: use np.asarray"
        )
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        raise _check.fail("batch", sorted(sizes), "its arrays must have the same number of rows")
    return int(sizes.pop())


def _in_turns(add_up: Callable[[Any], tuple[Any, Any]], batch: Any, rows: int, size: int) -> tuple[Any, Any]:
    """`add_up` over microbatches of this size, one after the other; their sum, and what they gave, row by row."""
    turns = math.ceil(rows / size)

    def split(leaf: Array) -> Array:
        """(turns, size, ...), so that a device which holds neighboring rows has its share of every turn."""
        padded = jnp.pad(leaf, [(0, turns * size - rows), *[(0, 0)] * (leaf.ndim - 1)])
        return jnp.swapaxes(padded.reshape(size, turns, *leaf.shape[1:]), 0, 1)

    def joined(leaf: Array) -> Array:
        return jnp.swapaxes(leaf, 0, 1).reshape(turns * size, *leaf.shape[2:])[:rows]

    parts = jax.tree.map(split, batch)
    shapes = jax.eval_shape(add_up, jax.tree.map(lambda leaf: leaf[0], parts))[0]
    start = jax.tree.map(_zeros, shapes)

    def turn(sums: Sums, part: Any) -> tuple[Sums, Any]:
        more, seen = add_up(part)
        return added(sums, more), seen

    sums, seen = lax.scan(turn, Sums(start, start), parts)
    return together(sums), jax.tree.map(joined, seen)


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
