"""What the white noise z is: version 1 of the specification in docs/noise.md, in NumPy.

z[step, tensor, coordinate] is a pure function of a 256-bit key. The coordinates of a tensor (flattened in C
order) fall into groups of 2048; group g uses the 192 ChaCha blocks with counters 192 g, 192 g + 1, ... and
nonce (step's low word, step's high word, tensor id). The 3072 words of a group are three planes of 1024:
the high words of the radius, its low words, and the angles. For p = 0 ... 1023,

    u = high / 2^32 + (low | 1) / 2^64,    t = angle as a signed number / 2^31      (both in float32),
    z[2048 g + p]        = sqrt(-2 ln u) cos(pi t),
    z[2048 g + 1024 + p] = sqrt(-2 ln u) sin(pi t).

Guarantees: the words do not depend on how a tensor is split; |z| reaches 9.4; every backend draws the same
words bit for bit, and the same u and t bit for bit in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bandmf.randomness import chacha
from bandmf.randomness.chacha import Words

VERSION = 1
GROUP = 2048
PAIRS = GROUP // 2
LANES = PAIRS // chacha.WORDS  # blocks per plane
BLOCKS = 3 * LANES  # blocks per group
MAX_SIZE = 2**32 // BLOCKS * GROUP  # coordinates in one tensor: 4.58e10

Float32 = npt.NDArray[np.float32]


def nonce(step: int, tensor: int) -> tuple[int, int, int]:
    """The three nonce words of a draw."""
    return step & 0xFFFFFFFF, step >> 32, tensor


def reference(
    secret: bytes, step: int, tensor: int, start: int, stop: int, cipher_rounds: int = 20
) -> npt.NDArray[np.float64]:
    """z for the coordinates start ... stop - 1, with the logarithm and so on in double precision: the oracle.

    >>> reference(bytes(32), step=0, tensor=0, start=0, stop=3).round(4)
    array([-0.2834,  0.9279,  0.0037])
    """
    first, last = start // GROUP, -(-stop // GROUP)
    counters = np.arange(first * BLOCKS, last * BLOCKS, dtype=np.uint64).astype(np.uint32)
    words = chacha.block(chacha.key_words(secret), nonce(step, tensor), counters, cipher_rounds)
    high, low, angle = np.moveaxis(words.reshape(-1, 3, PAIRS), 1, 0)
    odd = low | np.uint32(1)
    u = high.astype(np.float32) * np.float32(2.0**-32) + odd.astype(np.float32) * np.float32(2.0**-64)
    t = angle.view(np.int32).astype(np.float32) * np.float32(2.0**-31)
    radius, theta = np.sqrt(-2 * np.log(u.astype(np.float64))), np.pi * t.astype(np.float64)
    z = np.stack([radius * np.cos(theta), radius * np.sin(theta)], axis=1).reshape(-1)
    return z[start - first * GROUP : stop - first * GROUP]


class Source:
    """Draws z quickly; owns scratch memory for `CHUNK` coordinates, so use one per thread.

    >>> source = Source(bytes(32))
    >>> bool(np.allclose(source.draw(3, 1, 5, 9), reference(bytes(32), 3, 1, 5, 9), atol=1e-6))
    True
    """

    CHUNK = 32 * GROUP  # scratch of 1 MB, about the second level of cache

    def __init__(self, secret: bytes, cipher_rounds: int = 20) -> None:
        self._keystream = chacha.Keystream(secret, cipher_rounds)
        groups = self.CHUNK // GROUP
        self._words = np.empty((groups, 3, PAIRS), np.uint32)
        self._radius = np.empty((groups, PAIRS), np.float32)
        self._theta = np.empty((groups, PAIRS), np.float32)
        self._spare = np.empty((groups, PAIRS), np.float32)
        self._normals = np.empty((groups, 2, PAIRS), np.float32)

    def draw(self, step: int, tensor: int, start: int, stop: int) -> Float32:
        """z for the coordinates start ... stop - 1, in a new array."""
        out = np.empty(stop - start, np.float32)
        for begin, end in chunks(start, stop, self.CHUNK):
            out[begin - start : end - start] = self.chunk(step, tensor, begin, end)
        return out

    def chunk(self, step: int, tensor: int, start: int, stop: int) -> Float32:
        """z for a range that lies between two multiples of CHUNK; scratch that the next call overwrites."""
        first, last = start // GROUP, -(-stop // GROUP)
        words = self._words[: last - first]
        self._keystream.fill(words.reshape(-1), nonce(step, tensor), first * BLOCKS)
        z = self._box_muller(words)
        return z[start - first * GROUP : stop - first * GROUP]

    def _box_muller(self, words: Words) -> Float32:
        """The words of whole groups as normals, in place throughout: the hot loop of every step."""
        n = len(words)
        radius, theta, spare, normals = self._radius[:n], self._theta[:n], self._spare[:n], self._normals[:n]
        high, low, angle = words[:, 0], words[:, 1], words[:, 2]
        np.copyto(radius, high, casting="unsafe")
        np.multiply(radius, np.float32(2.0**-32), out=radius)
        np.bitwise_or(low, np.uint32(1), out=low)
        np.copyto(spare, low, casting="unsafe")
        np.multiply(spare, np.float32(2.0**-64), out=spare)
        np.add(radius, spare, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, np.float32(-2), out=radius)
        np.sqrt(radius, out=radius)
        np.copyto(theta, angle.view(np.int32), casting="unsafe")
        np.multiply(theta, np.float32(np.pi * 2.0**-31), out=theta)
        np.cos(theta, out=spare)
        np.multiply(radius, spare, out=normals[:, 0])
        np.sin(theta, out=spare)
        np.multiply(radius, spare, out=normals[:, 1])
        return normals.reshape(-1)


def chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at the multiples of `size`, so that no group is drawn twice."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end
