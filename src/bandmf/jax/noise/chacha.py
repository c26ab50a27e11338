"""ChaCha in jax.numpy: uint32 arithmetic that XLA compiles for any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bandmf.noise.normals import BLOCKS, PAIRS
from bandmf.randomness import chacha

Array = jax.Array
UNROLL = 1  # double rounds per turn of the loop; all ten unrolled take long to compile


def words(key: Array, step: Array, tensors: Array, groups: Array, cipher_rounds: int = 20) -> Array:
    """The words of these groups of these tensors (both uint32, one per group), shape (groups, 3, PAIRS)."""
    inside = jnp.arange(BLOCKS, dtype=jnp.uint32)
    counter = (groups[:, None] * np.uint32(BLOCKS) + inside).reshape(-1)
    given = [jnp.uint32(word) for word in chacha.CONSTANTS] + [key[k] for k in range(8)]
    given += [counter, jnp.uint32(step), jnp.uint32(0), jnp.repeat(tensors, BLOCKS)]
    start = tuple(jnp.broadcast_to(word, counter.shape) for word in given)
    end = lax.fori_loop(0, cipher_rounds // 2, lambda _, x: _double_round(x), start, unroll=UNROLL)
    out = jnp.stack([word + initial for word, initial in zip(end, start, strict=True)], axis=-1)
    return out.reshape(len(groups), 3, PAIRS)


def _double_round(x: tuple[Array, ...]) -> tuple[Array, ...]:
    words = list(x)
    for a, b, c, d in chacha.QUARTERS:
        words[a], words[b], words[c], words[d] = chacha.quarter_round(words[a], words[b], words[c], words[d])
    return tuple(words)
