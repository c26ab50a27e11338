"""Noise history on its way out of the process: encrypted, with a tag that any number of ranks can check.

How it is encrypted: see bandmf.noise.sealing.

The tag is a keyed digest of two sums, modulo 2^64, over all coordinates, of the encrypted word times a secret 64-bit
weight (planes 1 to 4 of the stream). Sums do not depend on how coordinates are spread over ranks. Whoever changes words
without the key keeps both sums with probability 2^-66 at most.

Encryption is in place, and undone in place after the history was written: no second copy of it is ever held.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from bandmf import _check
from bandmf.noise.sealing import Where, secret_of, words_of
from bandmf.randomness.chacha import Keystream
from bandmf.randomness.key import Key
from bandmf.torch.noise import chacha
from bandmf.torch.noise.engine import State
from bandmf.torch.noise.shards import Part

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # coordinates at a time
_BY_NUMPY = ("cpu",)  # devices
_WEIGHTS = ((1, 2), (3, 4))  # planes of the low and the high words of the weights of each sum
Gather = Callable[[Any], list[Any]]  # a value of this rank -> the values of all ranks


@contextmanager
def sealed(state: State, key: Key, gather: Gather, salt: str) -> Iterator[dict[str, str]]:
    """The history is encrypted inside this context; gives what a checkpoint keeps beside it."""
    secret = secret_of(key, state.step, salt)
    _encrypt(state, secret)
    try:
        yield {"salt": salt, "tag": _tag(state, secret, gather)}
    finally:
        _encrypt(state, secret)


def unseal(state: State, kept: dict[str, str], key: Key, gather: Gather) -> None:
    """Decrypt a history that was loaded as it was written, if not a bit of it was changed."""
    secret = secret_of(key, state.step, kept.get("salt", ""))
    state.unfinished = True  # until it is decrypted, what was loaded is no noise
    if not hmac.compare_digest(_tag(state, secret, gather), kept.get("tag", "")):
        raise _check.fail(
            "noise history", kept.get("tag"), "its tag does not fit: it was changed after it was written",
            "load another checkpoint",
        )  # fmt: skip
    _encrypt(state, secret)
    state.unfinished = False


def _encrypt(state: State, secret: bytes) -> None:
    """XOR with the stream, which is its own inverse."""
    # Interrupted in the middle, it leaves part of the history encrypted: the state is lost.
    before, state.unfinished = state.unfinished, True
    for words, stream in _walk(state, secret):
        words ^= stream(0)
    state.unfinished = before


def _tag(state: State, secret: bytes, gather: Gather) -> str:
    totals = [0, 0]
    for words, stream in _walk(state, secret, once=True):
        for k, (low, high) in enumerate(_WEIGHTS):
            totals[k] += _product(words, stream(low), stream(high))
    together = [sum(each) % (1 << 64) for each in zip(*gather(totals), strict=True)]
    text = f"{state.provenance.dumps()}/{state.step}/{together}".encode()
    return hashlib.blake2b(text, key=secret, digest_size=16).hexdigest()


def _product(words: Any, low: Any, high: Any) -> int:
    """The sum of words times weights, modulo 2^64."""
    if isinstance(words, np.ndarray):
        weights = low.view(np.uint32).astype(np.int64) | (high.astype(np.int64) << 32)
        return int(np.dot(words.astype(np.int64), weights))
    weights = (low.to(torch.int64) & 0xFFFFFFFF) | (high.to(torch.int64) << 32)
    return int((words.to(torch.int64) * weights).sum())


def _walk(state: State, secret: bytes, once: bool = False) -> Iterator[tuple[Any, Callable[[int], Any]]]:
    """The history as stretches of int32 words, in place, each with its stream by plane.

    With `once`, coordinates that several ranks hold are walked on one of them only.
    """
    for name, tensor in state.provenance.tensors.items():
        part, history = state.parts[name], state.history[name]
        if not part.region.size or (once and not _counts(part)):
            continue
        source = _Stream(secret, history.device)
        for slot in range(len(history)):
            for begin in range(0, part.region.size, source.chunk):
                end = min(part.region.size, begin + source.chunk)
                words = source.memory(history[slot, begin:end])
                yield words, partial(source.words, Where(part.region, begin, end), slot, tensor)


class _Stream:
    """The words of the stream where the history is: by OpenSSL and NumPy on the CPU, else by torch."""

    def __init__(self, secret: bytes, device: torch.device) -> None:
        by_numpy = device.type in _BY_NUMPY
        self.chunk = CHUNK["cpu" if by_numpy else "cuda"]
        self._keystream = Keystream(secret) if by_numpy else None
        self._key = None if by_numpy else chacha.key_words(secret, device)

    def memory(self, vector: torch.Tensor) -> Any:
        """Float32 numbers as int32 words in the same memory, of the kind that `words` gives."""
        return vector.view(torch.int32) if self._keystream is None else vector.view(torch.int32).numpy()

    def words(self, where: Where, slot: int, tensor: int, plane: int) -> Any:
        """The words of these coordinates, int32."""
        nonce = (slot, tensor, plane)
        if self._keystream is not None:
            return words_of(self._keystream, where, nonce)
        assert self._key is not None
        stream = chacha.blocks(self._key, nonce, where.first, where.count).view(-1)
        if isinstance(where.index, slice):
            return stream[where.index]
        return stream[torch.from_numpy(where.index).to(stream.device)]


def _counts(part: Part) -> bool:
    """Whether this rank is the one, of those that hold the same coordinates, whose words are summed."""
    if part.mesh is None:
        together = dist.is_available() and dist.is_initialized()
        return not together or dist.get_rank() == 0
    mine = part.mesh.get_coordinate()
    return mine is not None and all(
        position == 0 for position, placed in zip(mine, part.placements, strict=True) if isinstance(placed, Replicate)
    )
