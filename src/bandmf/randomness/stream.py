"""Secret random numbers other than noise: numbered ChaCha20 streams, and permutations made from them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bandmf.randomness.chacha import Keystream
from bandmf.randomness.key import Key

Indices = npt.NDArray[np.int64]


class Stream:
    """The 64-bit words of one numbered ChaCha20 stream, one after the other."""

    def __init__(self, key: Key, number: int) -> None:
        self._keystream = Keystream(key.secret)
        self._nonce = (number & 0xFFFFFFFF, number >> 32, 0)
        self._block = 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next words; what is left of the last block is dropped."""
        blocks = -(-count // 8)
        out = np.empty(16 * blocks, np.uint32)
        self._keystream.fill(out, self._nonce, self._block)
        self._block += blocks
        return out.view(np.uint64)[:count]


class Permutation:
    """A pseudorandom permutation of 0 .. size-1, applied to arrays of numbers without listing it.

    A Feistel network over pairs (row, column): in turns the row moves by a random function of the column and
    the column by one of the row. The functions are tables of about sqrt(size) entries, filled from ChaCha20.
    The grid has a few cells more than `size`; a number that lands there is mapped on. Small sets are shuffled outright.

    >>> sorted(Permutation(Stream(Key(bytes(32)), 0), 10)(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    FEISTEL_ROUNDS = 12
    SMALL = 1 << 16

    def __init__(self, stream: Stream, size: int) -> None:
        self.size = size
        self._order: Indices | None = None
        if size <= self.SMALL:
            self._order = np.argsort(stream.words(size), kind="stable").astype(np.int64)
            return
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        sizes = (self._columns, self._rows), (self._rows, self._columns)
        self._tables = [
            (stream.words(domain) % np.uint64(values)).astype(np.int64)
            for _ in range(self.FEISTEL_ROUNDS // 2)
            for domain, values in sizes
        ]

    def __call__(self, numbers: Indices) -> Indices:
        """Where these numbers go."""
        if self._order is not None:
            return self._order[numbers]
        image = self._once(np.asarray(numbers, np.int64))
        while (outside := image >= self.size).any():
            image[outside] = self._once(image[outside])
        return image

    def _once(self, numbers: Indices) -> Indices:
        row, column = np.divmod(numbers, self._columns)
        for by_column, by_row in zip(self._tables[::2], self._tables[1::2], strict=True):
            row = (row + by_column[column]) % self._rows
            column = (column + by_row[row]) % self._columns
        return row * self._columns + column
