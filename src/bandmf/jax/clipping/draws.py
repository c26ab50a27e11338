"""What a loss calls for all examples at once, and must not: random draws from one key, and functions of the host.

Under `jax.vmap`, keys of the implementations "rbg" and "unsafe_rbg" draw the numbers of all rows from the first row's
key, and a callback may be given all rows in one call. Both show in the program of a batch: there they have a dimension
more than in the program of one example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bandmf.jax.tracing import inside

_NO_DRAWS = ("random_unwrap", "random_clone")
_CALLBACKS = ("pure_callback", "io_callback")
_ROW_BY_ROW = "key<fry>"  # threefry2x32: what JAX draws with, unless told otherwise


def check_own_draws(batch: Any, one: Callable[[Any], Any], examples: Any) -> None:
    """Refuse a jaxpr of a batch in which examples draw, or call, together; `one` is the function of a single one."""
    every = Counter(_shared(batch.jaxpr))
    if not any(every):
        return
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), examples)
    together = {name for name, _ in every - Counter(_shared(jax.make_jaxpr(one)(first).jaxpr))}
    if together & set(_CALLBACKS):
        raise ValueError(
            "loss: calls a function of the host (jax.pure_callback) that is given all examples at once, so examples "
            "could depend on each other; use vmap_method='sequential', which calls it for each"
        )
    if together:
        raise ValueError(
            "random keys: under jax.vmap, those of another implementation than threefry2x32 (rbg, unsafe_rbg) draw the "
            "numbers of all examples from the key of the first one, so examples would depend on each other; make keys "
            "with jax.random.key(seed, impl='threefry2x32'), or jax.config.update('jax_default_prng_impl', "
            "'threefry2x32') before"
        )


def _shared(program: Any) -> Iterator[tuple[str, Any]]:
    """What draws random numbers, or calls the host, in a way that may not go row by row: its name and dimensions."""
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name == "rng_bit_generator":
            yield name, tuple(var.aval.shape for var in eqn.outvars)
        elif name.startswith("random_") and name not in _NO_DRAWS and _may_mix(eqn.invars[0].aval):
            yield name, eqn.invars[0].aval.shape
        elif name in _CALLBACKS:
            yield name, tuple(var.aval.shape for var in eqn.invars)
        for part in inside(eqn):
            yield from _shared(part)


def _may_mix(kind: Any) -> bool:
    is_key = jax.numpy.issubdtype(kind.dtype, jax.dtypes.prng_key)
    return bool(is_key) and kind.dtype.name != _ROW_BY_ROW
