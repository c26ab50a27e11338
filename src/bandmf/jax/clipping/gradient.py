"""clipped_gradient: like jax.grad, for a batch; every example's gradient is clipped before they are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from bandmf import _check
from bandmf.jax.clipping.arguments import check_apart, check_others, check_real, count_rows, places
from bandmf.jax.clipping.conditional import always, check_not_constant, computed_once
from bandmf.jax.clipping.devices import own_weights
from bandmf.jax.clipping.draws import check_own_draws
from bandmf.jax.clipping.microbatches import in_turns
from bandmf.jax.clipping.norms import clip
from bandmf.jax.clipping.result import Clipped, Examples
from bandmf.jax.clipping.sums import masked_sum

Array = jax.Array


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
    one of size 1). `mask` says which rows count. `microbatch` is how many gradients are in memory at once; all, unless
    told. With `has_aux`, where `loss` returns (value, aux), or `return_examples` the result is (sum, Examples).
    `spmd_axis_name` is the mesh axis that rows are sharded over, where `loss` contains shard_map.
    """
    clip_norm = _check.real("clip_norm", clip_norm, 1e-30, 1e30)
    if microbatch is not None:
        _check.whole("microbatch", microbatch)
    batched = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    check_apart(chosen, batched)
    differentiated = jax.value_and_grad(loss, argnums, has_aux=has_aux)
    looked_at = has_aux or return_examples

    def one(arguments: tuple[Any, ...], where: tuple[int, ...], example: tuple[Any, ...]) -> tuple[Any, Any]:
        """The gradient of one example, and what else is wanted of it."""
        whole = list(arguments)
        for place, given in zip(where, example, strict=True):
            whole[place] = jax.tree.map(lambda leaf: leaf[None], given) if keep_batch_dim else given
        value, gradient = differentiated(*whole)
        return gradient, value if looked_at else None

    def summed(*arguments: Any, mask: Array | None = None, holds: Array | None = None) -> Any:
        where, weights = (places(these, len(arguments)) for these in (batched, chosen))
        check_apart(weights, where)
        check_real(arguments, weights)
        examples = tuple(arguments[place] for place in where)
        rows = count_rows(examples)
        kept = jnp.ones(rows, bool) if mask is None else jnp.asarray(mask, bool)
        if kept.shape != (rows,):
            raise _check.fail("mask.shape", kept.shape, f"must be ({rows},): one entry for each row")
        check_others(arguments, where, weights, rows)
        own = own_weights(arguments, weights, (examples, kept))
        others = tuple(None if place in where else given for place, given in enumerate(own))
        single, alone = partial(one, others, where), list[Any]()

        def traced(example: Any) -> Any:
            program, shapes = jax.make_jaxpr(single, return_shape=True)(example)
            alone.append(program)
            return _again(program, shapes)(example)

        every = jax.vmap(traced, spmd_axis_name=spmd_axis_name)
        trained = [own[place] for place in weights]
        if holds is None:  # what the caller knows to be true, and the compiler does not
            holds = always((trained, examples, kept))
            check_not_constant(holds, (trained, examples, mask))

        def add_up(part: Any) -> tuple[Any, Any]:
            given, counts = part
            program, shapes = jax.make_jaxpr(every, return_shape=True)(given)
            check_own_draws(program, alone[-1])
            gradients, more = computed_once(_again(program, shapes), given, holds, shapes)
            gradients, norms = jax.vmap(partial(clip, clip_norm=clip_norm))(gradients)
            total = jax.tree.map(lambda leaf: masked_sum(leaf, counts & jnp.isfinite(norms)), gradients)
            value, aux = more if has_aux else (more, None)
            return total, Examples(value, norms, aux) if looked_at else None

        if microbatch is None or microbatch >= rows:
            total, seen = add_up((examples, kept))
        else:
            total, seen = in_turns(add_up, (examples, kept), rows, microbatch)
        result = Clipped(total, clip_norm)
        return (result, seen) if looked_at else result

    return summed


def _again(program: Any, shapes: Any) -> Callable[[Any], Any]:
    """What was traced, as a function: `loss` is called once, however often its program is used."""
    function, structure = jaxpr_as_fun(program), jax.tree.structure(shapes)
    return lambda given: jax.tree.unflatten(structure, function(*jax.tree.leaves(given)))
