"""What a loss calls for all examples at once, and must not: random draws from one key, and functions outside of JAX.

Under `jax.vmap`, keys of the implementations "rbg" and "unsafe_rbg" draw the numbers of all rows from the first row's
key; a callback or a foreign function may be given all rows in one call. This shows where the program of a batch is
compared with that of one example: there are more dimensions. A rule of `custom_vmap` is not used for one example, but
stays in its program.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from bandmf.jax.tracing import inside

log = logging.getLogger("bandmf")
_NO_DRAWS = ("random_unwrap", "random_clone")
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call")
_RULE = "custom_vmap_call"
_ROW_BY_ROW = "key<fry>"  # threefry2x32: what JAX draws with, unless told otherwise


def check_own_draws(batch: Any, one: Any) -> None:
    """Refuse the jaxpr of a batch in which examples draw, or call, together; `one` is that of a single one."""
    if Counter(_keys(batch.jaxpr)) & Counter(_keys(one.jaxpr)):
        log.warning(
            "loss: draws the same random numbers for all examples, from a key that is not theirs; for dropout and the "
            "like, draw from its third argument, key, which is each example's own, and another one at each step (with "
            "flax.nnx: nnx.reseed(model, dropout=key), of a model that has a stream of that name)"
        )
    every, alone = (Counter(_shared(program.jaxpr)) for program in (batch, one))
    together = {name for name, _ in every - alone}
    if any(name == _RULE for name, _ in alone):
        raise ValueError(
            "loss: has a rule of its own for batches (jax.custom_batching), which is given all examples at once, so "
            "examples could depend on each other; leave custom_vmap out: the loss sees one example"
        )
    if together & set(_OUTSIDE):
        raise ValueError(
            "loss: calls a function outside of JAX (jax.pure_callback, jax.ffi) that is given all examples at once, so "
            "examples could depend on each other; use vmap_method='sequential', which calls it for each"
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
        elif name in _OUTSIDE:
            yield name, tuple(var.aval.shape for var in eqn.invars)
        elif name == _RULE:
            yield name, ()
        for part in inside(eqn):
            yield from _shared(part)


def _keys(program: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of all keys that something is drawn from."""
    for eqn in program.eqns:
        if eqn.primitive.name == "random_bits":
            yield eqn.invars[0].aval.shape
        for part in inside(eqn):
            yield from _keys(part)


def _may_mix(kind: Any) -> bool:
    is_key = jax.numpy.issubdtype(kind.dtype, jax.dtypes.prng_key)
    return bool(is_key) and kind.dtype.name != _ROW_BY_ROW
