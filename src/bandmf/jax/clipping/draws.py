"""Random numbers in a loss: every example must draw from its own key, or all would follow the key of the first one.

Under `jax.vmap`, keys of the implementations "rbg" and "unsafe_rbg" draw the numbers of all rows from the first row's
key. That shows in the program of a batch: a draw has a dimension more than in the program of one example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bandmf.jax.tracing import inside

_NO_DRAWS = ("random_unwrap", "random_clone")
_ROW_BY_ROW = "key<fry>"  # threefry2x32: what JAX draws with, unless told otherwise


def check_own_draws(batch: Any, one: Callable[[Any], Any], examples: Any) -> None:
    """Refuse a jaxpr of a batch in which examples draw together; `one` is the function of a single example."""
    together = Counter(_draws(batch.jaxpr))
    if not any(together):
        return
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), examples)
    if together - Counter(_draws(jax.make_jaxpr(one)(first).jaxpr)):
        raise ValueError(
            "random keys: under jax.vmap, those of another implementation than threefry2x32 (rbg, unsafe_rbg) draw the "
            "numbers of all examples from the key of the first one, so examples would depend on each other; make keys "
            "with jax.random.key(seed, impl='threefry2x32'), or jax.config.update('jax_default_prng_impl', "
            "'threefry2x32') before"
        )


def _draws(program: Any) -> Iterator[tuple[Any, ...]]:
    """What draws random numbers in a way that may not go row by row: by its name, with its dimensions."""
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name == "rng_bit_generator":
            yield name, tuple(eqn.params["shape"])
        elif name.startswith("random_") and name not in _NO_DRAWS and _may_mix(eqn.invars[0].aval):
            yield name, eqn.invars[0].aval.shape
        for part in inside(eqn):
            yield from _draws(part)


def _may_mix(kind: Any) -> bool:
    is_key = jax.numpy.issubdtype(kind.dtype, jax.dtypes.prng_key)
    return bool(is_key) and kind.dtype.name != _ROW_BY_ROW
