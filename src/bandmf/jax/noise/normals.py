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

from bandmf.jax.noise.chacha import Array, words
from bandmf.noise.normals import GROUP


def box_muller(words: Array) -> Array:
    """The words of whole groups as normals, shape (groups, GROUP)."""
    high, low, angle = words[:, 0], words[:, 1] | np.uint32(1), words[:, 2]
    u = high.astype(jnp.float32) * np.float32(2.0**-32) + low.astype(jnp.float32) * np.float32(2.0**-64)
    radius = jnp.sqrt(np.float32(-2) * jnp.log(u))
    theta = lax.bitcast_convert_type(angle, jnp.int32).astype(jnp.float32) * np.float32(math.pi * 2.0**-31)
    z = jnp.stack([radius * jnp.cos(theta), radius * jnp.sin(theta)], axis=1)
    return z.reshape(len(words), GROUP)


Coordinate = tuple[Any, Any]
"""A coordinate as (group, offset in the group), both uint32."""


def advance(coordinate: Coordinate, index: Any, stride: int) -> Coordinate:
    """The coordinate `index * stride` further on, exactly, though that product may pass 2^32."""
    quotient, remainder = divmod(stride, GROUP)
    index = jnp.uint32(index)
    high, low = index // np.uint32(GROUP), index % np.uint32(GROUP)
    offset = coordinate[1] + low * np.uint32(remainder)  # below 2^23
    group = coordinate[0] + index * np.uint32(quotient) + high * np.uint32(remainder)
    return group + offset // np.uint32(GROUP), offset % np.uint32(GROUP)


class Spans(NamedTuple):
    """Spans of `length` consecutive coordinates of one tensor, from each of `starts` on (arrays of coordinates)."""

    tensor: int
    starts: Coordinate
    length: int

    @property
    def reach(self) -> int:
        """Groups that a span can touch, wherever it begins in its first."""
        return (self.length + GROUP - 2) // GROUP + 1


def normals(key: Array, step: Array, spans: Sequence[Spans], cipher_rounds: int = 20) -> list[Array]:
    """z of the spans of many tensors, each of shape (number of spans, length).

    One call of the cipher for all: a program with one for each tensor would take minutes to compile.
    """
    if not spans:
        return []
    groups = [(r.starts[0][:, None] + jnp.arange(r.reach, dtype=jnp.uint32)).reshape(-1) for r in spans]
    tensors = [np.full(len(g), r.tensor, np.uint32) for g, r in zip(groups, spans, strict=True)]
    z = box_muller(
        words(key, step, jnp.asarray(np.concatenate(tensors)), jnp.concatenate(groups), cipher_rounds)
    )
    ends = np.cumsum([len(g) for g in groups])
    parts = [z[end - len(g) : end] for end, g in zip(ends, groups, strict=True)]
    return [_cut(part, r) for part, r in zip(parts, spans, strict=True)]


def _cut(z: Array, spans: Spans) -> Array:
    """The spans themselves out of the whole groups that hold them."""
    rows = z.reshape(-1, spans.reach * GROUP)
    cut = jax.vmap(lambda row, offset: lax.dynamic_slice(row, (offset,), (spans.length,)))
    return cut(rows, spans.starts[1])
