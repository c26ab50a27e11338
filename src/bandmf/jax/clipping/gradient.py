"""clipped_gradient: like jax.grad, for a batch; every example's gradient is clipped before they are added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from bandmf import _check
from bandmf.jax.clipping.arguments import check_real, count_rows
from bandmf.jax.clipping.conditional import always, check_not_constant, computed_once
from bandmf.jax.clipping.devices import own_weights
from bandmf.jax.clipping.draws import check_own_draws
from bandmf.jax.clipping.norms import clip
from bandmf.jax.clipping.sums import masked_sum

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("total",), meta_fields=("clip_norm",))
@dataclass(frozen=True, repr=False)
class Clipped:
    """The sum of clipped gradients, a pytree like the weights, and the norm that each was clipped to."""

    total: Any
    clip_norm: float

    def __repr__(self) -> str:
        return f"Clipped(clip_norm={self.clip_norm})"  # the sum has no noise yet


def clipped_gradient(loss: Callable[[Any, Any], Any], *, clip_norm: float) -> Callable[..., Clipped]:
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

    `loss` takes the weights and one example, which is the batch without its first dimension, and gives one number;
    `mask` says which rows count. The gradients of all rows are in memory at once: cut a large batch into parts, and add
    up their sums with `bandmf.jax.clipping.added`, which keeps what rounding takes from them.
    """
    clip_norm = _check.real("clip_norm", clip_norm, 1e-30, 1e30)

    # By name only: labels that are given after the rows, apart from them, are no mask.
    def summed(weights: Any, batch: Any, *, mask: Array | None = None, holds: Array | None = None) -> Clipped:
        check_real(weights)
        rows = count_rows(batch)
        kept = jnp.ones(rows, bool) if mask is None else jnp.asarray(mask, bool)
        if kept.shape != (rows,):
            raise _check.fail("mask.shape", kept.shape, f"must be ({rows},): one entry for each row")
        own = own_weights(weights, (batch, kept))
        if holds is None:  # what the caller knows to be true, and the compiler does not
            holds = always((own, batch, kept))
            check_not_constant(holds, (own, batch, mask))
        gradients = _row_by_row(partial(jax.grad(loss), own), batch, holds)
        gradients, norms = jax.vmap(partial(clip, clip_norm=clip_norm))(gradients)
        total = jax.tree.map(lambda leaf: masked_sum(leaf, kept & jnp.isfinite(norms)), gradients)
        return Clipped(total, clip_norm)

    return summed


def _row_by_row(gradient: Callable[[Any], Any], batch: Any, holds: Array) -> Any:
    """The gradient of every row by itself, computed once."""
    alone = list[Any]()

    def traced(example: Any) -> Any:
        program, shapes = jax.make_jaxpr(gradient, return_shape=True)(example)
        alone.append(program)
        return _again(program, shapes)(example)

    program, shapes = jax.make_jaxpr(jax.vmap(traced), return_shape=True)(batch)
    check_own_draws(program, alone[-1])
    return computed_once(_again(program, shapes), batch, holds, shapes)


def _again(program: Any, shapes: Any) -> Callable[[Any], Any]:
    """What was traced, as a function: `loss` is called once, however often its program is used."""
    function, structure = jaxpr_as_fun(program), jax.tree.structure(shapes)
    return lambda given: jax.tree.unflatten(structure, function(*jax.tree.leaves(given)))
