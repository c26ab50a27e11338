"""The words of the white noise by torch's integer operations, for devices where OpenSSL cannot draw them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bandmf.noise.normals import BLOCKS, PAIRS, nonce
from bandmf.randomness import chacha


def fill(
    key: torch.Tensor, out: torch.Tensor, step: int, tensor: int, first_group: int, cipher_rounds: int = 20
) -> None:
    """Fill `out`, int32 of shape (groups, 3, PAIRS), with the words of these groups.

    `key` holds the eight key words as int32 on the same device. All of it is int32 arithmetic, which wraps
    around as ChaCha wants; torch has too little for uint32.
    """
    groups = len(out)
    words = blocks(key, nonce(step, tensor), first_group * BLOCKS, groups * BLOCKS, cipher_rounds)
    out.copy_(words.view(groups, 3, PAIRS))


def blocks(key: torch.Tensor, nonce: Sequence[int], first: int, count: int, cipher_rounds: int = 20) -> torch.Tensor:
    """The words of consecutive blocks, int32 of shape (count, 16), where the key is."""
    counters = torch.arange(count, dtype=torch.int64, device=key.device) + first
    given = [*chacha.CONSTANTS, *([0] * 9), *nonce]
    start = [torch.full_like(counters, _signed(word), dtype=torch.int32) for word in given]
    for k in range(8):
        start[4 + k] = key[k].expand(len(counters))
    start[12] = counters.to(torch.int32)
    x = [word.clone() for word in start]
    for _ in range(cipher_rounds // 2):
        for a, b, c, d in chacha.QUARTERS:
            _quarter_round(x[a], x[b], x[c], x[d])
    return torch.stack([word + initial for word, initial in zip(x, start, strict=True)], dim=-1)


def key_words(secret: bytes, device: torch.device) -> torch.Tensor:
    """The key as eight int32 numbers on a device."""
    return torch.tensor([_signed(word) for word in chacha.key_words(secret)], dtype=torch.int32, device=device)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _quarter_round(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> None:
    _rotate(d.bitwise_xor_(a.add_(b)), 16)
    _rotate(b.bitwise_xor_(c.add_(d)), 12)
    _rotate(d.bitwise_xor_(a.add_(b)), 8)
    _rotate(b.bitwise_xor_(c.add_(d)), 7)


def _rotate(x: torch.Tensor, bits: int) -> None:
    # The shift to the right copies the sign, so its copies are masked off.
    low = (x >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    x.bitwise_left_shift_(bits).bitwise_or_(low)
