"""ChaCha (RFC 8439): the block function in NumPy, which is the oracle, and a fast keystream for 20 rounds.

One block is 16 words of 32 bits. The input state is

    words 0-3 "expand 32-byte k" | 4-11 key | 12 block counter | 13-15 nonce

and the output is that state after the rounds, plus the state itself, word by word modulo 2^32.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bandmf import _check

Words = npt.NDArray[np.uint32]
W = TypeVar("W", bound=Any)

CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")
WORDS = 16
CIPHER_ROUNDS = (8, 12, 20)
# Columns, then diagonals: one double round.
QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


def key_words(secret: bytes) -> tuple[int, ...]:
    """The key as eight little-endian words."""
    return struct.unpack("<8I", secret)


def block(key: Sequence[int], nonce: Sequence[int], counters: Words, cipher_rounds: int = 20) -> Words:
    """The blocks with these counters, shape (*counters.shape, 16): the oracle of every backend.

    >>> hex(block([0] * 8, [0] * 3, np.zeros(1, np.uint32))[0, 0])
    '0xade0b876'
    """
    _check.choice("cipher_rounds", cipher_rounds, CIPHER_ROUNDS)
    counters = np.asarray(counters, dtype=np.uint32)
    given = [*CONSTANTS, *key, 0, *nonce]
    start = [np.full(counters.shape, word, dtype=np.uint32) for word in given]
    start[12] = counters
    x = list(start)
    for _ in range(cipher_rounds // 2):
        for a, b, c, d in QUARTERS:
            x[a], x[b], x[c], x[d] = quarter_round(x[a], x[b], x[c], x[d])
    return np.stack([word + initial for word, initial in zip(x, start, strict=True)], axis=-1)


def quarter_round(a: W, b: W, c: W, d: W) -> tuple[W, W, W, W]:
    """Of uint32 arrays of any kind that wrap around: NumPy's or JAX's."""
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(x: W, bits: int) -> W:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


class Keystream:
    """The words of consecutive blocks, fast: through OpenSSL for 20 rounds, else through the oracle.

    >>> out = np.empty(16, np.uint32)
    >>> Keystream(bytes(32)).fill(out, (0, 0, 0), counter=0)
    >>> hex(out[0])
    '0xade0b876'
    """

    def __init__(self, secret: bytes, cipher_rounds: int = 20) -> None:
        self._secret = secret
        self._cipher_rounds = _check.choice("cipher_rounds", cipher_rounds, CIPHER_ROUNDS)
        self._encryptor = _encryptor(secret) if cipher_rounds == 20 else None

    def fill(self, out: Words, nonce: Sequence[int], counter: int) -> None:
        """Fill `out` (contiguous, whole blocks) with the words of blocks counter, counter + 1, ..."""
        if self._encryptor is None:
            counters = counter + np.arange(out.size // WORDS, dtype=np.uint32)
            out.reshape(-1, WORDS)[...] = block(key_words(self._secret), nonce, counters, self._cipher_rounds)
            return
        self._encryptor.reset_nonce(struct.pack("<4I", counter, *nonce))
        target = out.data.cast("B")
        for begin in range(0, len(target), len(_ZEROS)):
            part = target[begin : begin + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(part)], part)


_ZEROS = memoryview(bytes(1 << 20))  # encrypting zeros yields the keystream itself


def _encryptor(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher(algorithms.ChaCha20(secret, bytes(16)), mode=None).encryptor()
