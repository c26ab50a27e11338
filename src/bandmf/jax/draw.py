"""The white noise z in jax.numpy: uint32 arithmetic that XLA compiles for any device (docs/noise.md).

A coordinate is kept as two 32-bit numbers, its group and its offset in the group, so tensors past 2^31
coordinates need no 64-bit mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bandmf.noise import chacha
from bandmf.noise.normals import BLOCKS, GROUP, PAIRS

Array = jax.Array
UNROLL = 1  # double rounds per turn of the loop; all ten unrolled take long to compile


def words(key: Array, step: Array, tensors: Array, groups: Array, rounds: int = 20) -> Array:
    """The words of these groups of these tensors (both uint32, one per group), shape (groups, 3, PAIRS)."""
    inside = jnp.arange(BLOCKS, dtype=jnp.uint32)
    counter = (groups[:, None] * np.uint32(BLOCKS) + inside).reshape(-1)
    given = [jnp.uint32(word) for word in chacha.CONSTANTS] + [key[k] for k in range(8)]
    given += [counter, jnp.uint32(step), jnp.uint32(0), jnp.repeat(tensors, BLOCKS)]
    start = tuple(jnp.broadcast_to(word, counter.shape) for word in given)
    end = lax.fori_loop(0, rounds // 2, lambda _, x: _double_round(x), start, unroll=UNROLL)
    out = jnp.stack([word + initial for word, initial in zip(end, start, strict=True)], axis=-1)
    return out.reshape(len(groups), 3, PAIRS)


def _double_round(x: tuple[Array, ...]) -> tuple[Array, ...]:
    words = list(x)
    for a, b, c, d in chacha.QUARTERS:
        words[a], words[b], words[c], words[d] = _quarter_round(words[a], words[b], words[c], words[d])
    return tuple(words)


def _quarter_round(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(x: Array, bits: int) -> Array:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def box_muller(words: Array) -> Array:
    """The words of whole groups as normals, shape (groups, GROUP)."""
    high, low, angle = words[:, 0], words[:, 1] | np.uint32(1), words[:, 2]
    u = high.astype(jnp.float32) * np.float32(2.0**-32) + low.astype(jnp.float32) * np.float32(2.0**-64)
    radius = jnp.sqrt(np.float32(-2) * jnp.log(u))
    theta = lax.bitcast_convert_type(angle, jnp.int32).astype(jnp.float32) * np.float32(math.pi * 2.0**-31)
    z = jnp.stack([radius * jnp.cos(theta), radius * jnp.sin(theta)], axis=1)
    return z.reshape(len(words), GROUP)


Place = tuple[Any, Any]
"""A coordinate as (group, offset in the group), both uint32."""


def advance(place: Place, index: Any, stride: int) -> Place:
    """The coordinate `index * stride` further on, exactly, though that product may pass 2^32."""
    quotient, remainder = divmod(stride, GROUP)
    index = jnp.uint32(index)
    high, low = index // np.uint32(GROUP), index % np.uint32(GROUP)
    offset = place[1] + low * np.uint32(remainder)  # below 2^23
    group = place[0] + index * np.uint32(quotient) + high * np.uint32(remainder)
    return group + offset // np.uint32(GROUP), offset % np.uint32(GROUP)


class Runs(NamedTuple):
    """Runs of `length` consecutive coordinates of one tensor, from each of `starts` on (arrays of places)."""

    tensor: int
    starts: Place
    length: int

    @property
    def reach(self) -> int:
        """Groups that a run can touch, wherever it begins in its first."""
        return (self.length + GROUP - 2) // GROUP + 1


def normals(key: Array, step: Array, runs: Sequence[Runs], rounds: int = 20) -> list[Array]:
    """z of the runs of many tensors, each of shape (number of runs, length).

    One call of the cipher for all: a program with one for each tensor would take minutes to compile.
    """
    if not runs:
        return []
    groups = [(r.starts[0][:, None] + jnp.arange(r.reach, dtype=jnp.uint32)).reshape(-1) for r in runs]
    tensors = [np.full(len(g), r.tensor, np.uint32) for g, r in zip(groups, runs, strict=True)]
    z = box_muller(words(key, step, jnp.asarray(np.concatenate(tensors)), jnp.concatenate(groups), rounds))
    ends = np.cumsum([len(g) for g in groups])
    parts = [z[end - len(g) : end] for end, g in zip(ends, groups, strict=True)]
    return [_cut(part, r) for part, r in zip(parts, runs, strict=True)]


def _cut(z: Array, runs: Runs) -> Array:
    """The runs themselves out of the whole groups that hold them."""
    rows = z.reshape(-1, runs.reach * GROUP)
    cut = jax.vmap(lambda row, offset: lax.dynamic_slice(row, (offset,), (runs.length,)))
    return cut(rows, runs.starts[1])
