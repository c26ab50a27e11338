"""What clipped_gradient is given: weights that have a gradient, and examples in rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bandmf import _check


def check_real(weights: Any) -> None:
    """Refuse to differentiate what is no real number, such as the state of an optimizer."""
    check_no_function(weights, "weights")
    if not jax.tree.leaves(weights):
        raise _check.fail("weights", weights, "must have an array: there is nothing to train")
    for leaf in jax.tree.leaves(weights):
        kind = jnp.result_type(leaf)
        if jnp.issubdtype(kind, jnp.complexfloating):
            raise _check.fail(
                "dtype in weights", str(kind), "must be real: gradients are clipped and noised as real numbers",
                "store it as two real arrays, and combine them in the loss",
            )  # fmt: skip
        if not jnp.issubdtype(kind, jnp.floating):
            raise _check.fail(
                "dtype in weights", str(kind), "must be a floating-point type: the gradient is taken by all of them",
                "bind what is not trained: functools.partial(loss, ...); with flax.nnx, split off the parameters: "
                "nnx.split(model, nnx.Param, ...)",
            )  # fmt: skip


def check_no_function(tree: Any, name: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if callable(leaf) or isinstance(leaf, str | bytes):
            raise _check.fail(
                name, type(leaf).__name__, "must be a tree of arrays, and has a function or a text in it",
                "split it off, and bind it: functools.partial (with Equinox, eqx.partition(model, "
                "eqx.is_inexact_array), and eqx.combine in the loss)",
            )  # fmt: skip


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
