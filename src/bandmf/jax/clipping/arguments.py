"""What clipped_gradient is given: weights, examples in rows, and what all examples see alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bandmf import _check


def check_real(arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> None:
    """Refuse to differentiate what is no real number, such as the state of an optimizer."""
    if not jax.tree.leaves([arguments[place] for place in chosen]):
        raise _check.fail("argnums", chosen, "there is no array among these arguments, and nothing to train")
    for place in chosen:
        check_no_function(arguments[place], f"argument {place}")
        for leaf in jax.tree.leaves(arguments[place]):
            kind = jnp.result_type(leaf)
            if jnp.issubdtype(kind, jnp.complexfloating):
                raise _check.fail(
                    f"dtype in argument {place}", str(kind), "must be real: gradients are clipped and noised as real "
                    "numbers", "store it as two real arrays, and combine them in the loss",
                )  # fmt: skip
            if not jnp.issubdtype(kind, jnp.floating):
                raise _check.fail(
                    f"dtype in argument {place}", str(kind),
                    "must be a floating-point type: the gradient is taken by this argument",
                    "give the weights there; with flax.nnx, split off the parameters: nnx.split(model, nnx.Param, ...)",
                )  # fmt: skip


def check_no_function(tree: Any, name: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if callable(leaf):
            raise _check.fail(
                name, type(leaf).__name__, "must be a tree of arrays, and has a function in it",
                "split it off, and bind it: functools.partial (with Equinox, eqx.partition(model, "
                "eqx.is_inexact_array), and eqx.combine in the loss)",
            )  # fmt: skip


def places(given: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Places of arguments, counted from the first."""
    if any(not -count <= place < count for place in given):
        raise _check.fail(
            "batch_argnums or argnums", given, f"there are {count} arguments",
            "give the weights, then the examples",
        )  # fmt: skip
    return tuple(place % count for place in given)


def check_apart(chosen: tuple[int, ...], batched: tuple[int, ...]) -> None:
    if set(batched) & set(chosen):
        given = chosen[0] if len(chosen) == 1 else chosen
        raise _check.fail("argnums", given, f"may not be among batch_argnums={batched}: those are the examples")


def check_others(arguments: tuple[Any, ...], batched: tuple[int, ...], chosen: tuple[int, ...], rows: int) -> None:
    """Refuse what every example would see, though it looks as if it had a row for each."""
    others = [place for place in range(len(arguments)) if place not in (*batched, *chosen)]
    # Of one row, it would be the example's own.
    alike = [place for place in others if rows > 1 and rows in _lengths(arguments[place])]
    if alike and str(getattr(arguments[alike[0]], "dtype", "")) == "bool":
        raise _check.fail(
            "batch_argnums", batched, f"argument {alike[0]} looks like a mask",
            "give it by its name: gradient(weights, rows, mask=mask)",
        )  # fmt: skip
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


def count_rows(batch: Any) -> int:
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
