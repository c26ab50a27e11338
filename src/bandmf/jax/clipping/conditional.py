"""Gradients that are computed once, whatever the compiler knows of what goes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bandmf.jax.clipping.devices import zeros
from bandmf.jax.noise.digest import words
from bandmf.jax.tracing import is_traced

Array = jax.Array


def computed_once(function: Callable[[Any], Any], given: Any, holds: Array, shapes: Any) -> Any:
    """What a function gives, arrays of these shapes, as the result of a conditional that always holds.

    Compilers compute again what is used twice: with a fused multiply-add for the norm and without one for the sum, one
    example was seen to add 347,287 clip norms. They cannot see through a conditional; through a
    barrier, on CPUs, they do.
    """
    return lax.cond(holds, function, lambda _: jax.tree.map(zeros, shapes), given)


def always(given: Any) -> Array:
    """True, computed in a way that no compiler knows to be true: it would drop the conditional.

    From all arrays, as any of them may be constants of the program. Of several models or groups (vmap) it is one number
    all the same: the conditional would become a choice otherwise, of which both sides are computed.
    """
    leaves = [leaf for leaf in jax.tree.leaves(given) if jnp.size(leaf)]
    return _holds([words(lax.stop_gradient(leaf)) for leaf in leaves])


@jax.custom_batching.custom_vmap
def _holds(bits: list[Array]) -> Array:
    counts = [lax.population_count(each.max()) for each in bits]
    # Where all of these are constants, hidden by jit, scan or arithmetic: compilers forget barriers on CPUs, but only
    # after they have looked for conditionals to drop.
    return lax.optimization_barrier(sum(counts, jnp.uint32(0)) <= 32 * max(1, len(counts)))


@_holds.def_vmap
def _(_size: int, _batched: Any, bits: list[Array]) -> tuple[Array, bool]:
    return _holds(bits), False


def check_not_constant(holds: Array, given: Any) -> None:
    """Refuse what is compiled with weights, rows and mask as constants: then only a barrier would be left."""
    if is_traced(holds) and not is_traced(given):
        raise ValueError(
            "weights, rows and mask: are all constants of the program that is traced (by jit, eval_shape, lax.cond or "
            "the like), and a compiler that knows them may compute gradients twice, differently; make weights or rows "
            "an argument of the function that is traced"
        )
