"""The stream that encrypts noise history on its way out of a process, for every framework.

The history is the noise of the last steps: whoever has it and the weights subtracts it and has the sums of clipped
gradients. So a checkpoint holds it XOR a ChaCha20 stream. Word c of the stream with nonce (slot, tensor, plane) belongs
to coordinate c of the global tensor; plane 0 encrypts. The key derives from the run's key, the step and a salt drawn
for every checkpoint that is written, so that no stream is used for two contents.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from bandmf.noise.region import Region
from bandmf.randomness.chacha import WORDS, Keystream
from bandmf.randomness.key import Key

CHUNK = 1 << 16  # coordinates at a time


def fresh_salt() -> str:
    """One for every checkpoint."""
    return os.urandom(16).hex()


def secret_of(key: Key, step: int, salt: str) -> bytes:
    """The key of the stream."""
    return key.derive(f"history/{step}/{salt}").secret


class Where:
    """The coordinates of a stretch of a region, and the blocks of the stream that hold their words."""

    def __init__(self, region: Region, begin: int, end: int) -> None:
        if region.contiguous:
            low, high = region.start + begin, region.start + end
            self.index: Any = slice(low % WORDS, low % WORDS + end - begin)
        else:
            coordinates = region.coordinates(begin, end)
            low, high = int(coordinates[0]), int(coordinates[-1]) + 1
            self.index = coordinates - low // WORDS * WORDS
        self.first, self.count = low // WORDS, -(-high // WORDS) - low // WORDS


def words_of(keystream: Keystream, where: Where, nonce: tuple[int, int, int]) -> npt.NDArray[np.int32]:
    """The words of these coordinates."""
    out = np.empty(where.count * WORDS, np.uint32)
    keystream.fill(out, nonce, where.first)
    return out.view(np.int32)[where.index]


def encrypt(history: npt.NDArray[np.float32], region: Region, tensor: int, secret: bytes) -> None:
    """XOR the vectors of a region, in place, with the stream, which is its own inverse."""
    keystream = Keystream(secret)
    for slot, vector in enumerate(history.reshape(len(history), region.size).view(np.int32)):
        for begin in range(0, region.size, CHUNK):
            end = min(region.size, begin + CHUNK)
            vector[begin:end] ^= words_of(keystream, Where(region, begin, end), (slot, tensor, 0))
