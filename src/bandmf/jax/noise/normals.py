"""The white noise z in jax.numpy: uint32 arithmetic that XLA compiles for any device (docs/noise.md).

A coordinate is kept as two 32-bit numbers, its group and its offset in the group, so tensors past 2^31
coordinates need no 64-bit mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bandmf.jax.noise.chacha import Array, words
from bandmf.noise.normals import GROUP, PAIRS


def box_muller(words: Array) -> Array:
    """The words of whole groups as normals, shape (groups, GROUP).

    Both members of a pair come from their own copy of the pair's words: that computes a radius twice, but stays one
    operation on every element, which XLA fuses with what comes next; two halves put side by side take longer.
    """
    both = len(words), 2, PAIRS
    high, low, angle = (jnp.broadcast_to(words[:, k : k + 1], both) for k in range(3))
    low = low | np.uint32(1)
    u = high.astype(jnp.float32) * np.float32(2.0**-32) + low.astype(jnp.float32) * np.float32(2.0**-64)
    t = lax.bitcast_convert_type(angle, jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)
    cosine, sine = cosine_sine(t)
    first = lax.broadcasted_iota(jnp.int32, both, 1) == 0
    return (radius(u) * jnp.where(first, cosine, sine)).reshape(len(words), GROUP)


def radius(u: Array) -> Array:
    """sqrt(-2 ln u) by the polynomial of native/normals.h: XLA's own logarithm takes several times as long on a CPU.

    u = 2^e (1 + f), and -2 ln(1 + f) = -2 f + f^2 + f^3 P(f).
    """
    bits = lax.bitcast_convert_type(u, jnp.int32)
    e = (bits - np.int32(0x3F3504F3)) >> 23
    f = lax.bitcast_convert_type(bits - (e << 23), jnp.float32) - np.float32(1)
    P = _polynomial(
        f, (0.15269001, -0.25523164, 0.26320367, -0.28403515, 0.33246714, -0.40002454, 0.50001642, -0.66666663)
    )
    exponent, square = e.astype(jnp.float32), f * f
    small = exponent * np.float32(-1.9046542e-9) + f * square * P
    return jnp.sqrt(exponent * np.float32(-1.38629435) + (f * np.float32(-2) + (square + small)))


def cosine_sine(t: Array) -> tuple[Array, Array]:
    """cos(pi t) and sin(pi t): t = q / 2 + r with |r| <= 1/4, exactly; q turns the quadrant."""
    whole = lax.round(t * np.float32(2), lax.RoundingMethod.TO_NEAREST_EVEN)
    q, r = whole.astype(jnp.int32), t - whole * np.float32(0.5)
    s = r * r
    odd_part = s * _polynomial(s, (-0.58947964, 2.5498105, -5.1677091)) + np.float32(-8.7422777e-8)
    sine = r * odd_part + r * np.float32(3.14159274)
    cosine = s * _polynomial(s, (0.23142954, -1.33505846, 4.0587079, -4.93480217)) + np.float32(1)
    odd = (q & 1) == 1
    first, second = jnp.where(odd, sine, cosine), jnp.where(odd, cosine, sine)
    return jnp.where(((q + 1) & 2) == 2, -first, first), jnp.where((q & 2) == 2, -second, second)


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Highest power first."""
    total = x * np.float32(coefficients[0]) + np.float32(coefficients[1])
    for coefficient in coefficients[2:]:
        total = total * x + np.float32(coefficient)
    return total


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
    whole: bool = False  # one span, from coordinate 0 on

    @property
    def reach(self) -> int:
        """Groups that a span can touch, wherever it begins in its first."""
        if self.whole:
            return -(-self.length // GROUP)
        return (self.length + GROUP - 2) // GROUP + 1


def normals(key: Array, step: Array, spans: Sequence[Spans], cipher_rounds: int = 20) -> list[Array]:
    """z of the spans of many tensors, each of shape (number of spans, length).

    One call of the cipher for all: a program with one for each tensor would take minutes to compile.
    """
    if not spans:
        return []
    groups = [(r.starts[0][:, None] + jnp.arange(r.reach, dtype=jnp.uint32)).reshape(-1) for r in spans]
    tensors = [np.full(len(g), r.tensor, np.uint32) for g, r in zip(groups, spans, strict=True)]
    z = box_muller(words(key, step, jnp.asarray(np.concatenate(tensors)), jnp.concatenate(groups), cipher_rounds))
    ends = np.cumsum([len(g) for g in groups])
    parts = [z[end - len(g) : end] for end, g in zip(ends, groups, strict=True)]
    return [_cut(part, r) for part, r in zip(parts, spans, strict=True)]


def _cut(z: Array, spans: Spans) -> Array:
    """The spans themselves out of the whole groups that hold them."""
    if spans.whole:
        return z.reshape(1, -1)[:, : spans.length]  # which XLA fuses with what comes next
    rows = z.reshape(-1, spans.reach * GROUP)
    cut = jax.vmap(lambda row, offset: lax.dynamic_slice(row, (offset,), (spans.length,)))
    return cut(rows, spans.starts[1])
