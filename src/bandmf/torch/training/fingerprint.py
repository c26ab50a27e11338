"""A keyed fingerprint of the numbers on a GPU, made where they are: 128 bits for the ledger to hash once more.

Two sums, modulo 2^64, of all 32-bit words times odd numbers that depend on a secret and the place of the word. Not
cryptographic: it tells apart sums that differ by accident, which is all that replays need. One pass over the memory.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # words at a time where there is no fused kernel
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687  # odd, and mixing all bits


def fingerprint(words: Tensor, seeds: tuple[int, int], kernels: str | None = None) -> bytes:
    """Of int32 words; `seeds` are secret numbers below 2^62."""
    fused = words.is_cuda and find_spec("triton") is not None if kernels is None else kernels == "triton"
    totals = torch.zeros(2, dtype=torch.int64, device=words.device)
    if fused:
        _fused(words, seeds, totals)
    else:
        for begin in range(0, len(words), CHUNK):
            part = words[begin : begin + CHUNK].to(torch.int64) & 0xFFFFFFFF
            places = torch.arange(begin, begin + len(part), device=words.device)
            totals += torch.stack([(part * _weights(places + seed)).sum() for seed in seeds])
    return totals.cpu().numpy().tobytes()


def _weights(numbers: Tensor) -> Tensor:
    """Odd numbers that look random, from numbers that follow each other."""
    x = numbers * _FIRST
    x = (x ^ _shifted(x, 32)) * _SECOND
    return (x ^ _shifted(x, 29)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """Right, with zeros coming in: torch shifts signed numbers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _fused(words: Tensor, seeds: tuple[int, int], totals: Tensor) -> None:
    from bandmf.torch.training import fingerprint_kernel

    kernel, block = fingerprint_kernel.add_words, fingerprint_kernel.BLOCK
    programs = min(1024, -(-len(words) // block))
    if programs:
        stride = programs * block
        launch: Any = kernel[(programs,)]
        launch(words, totals, len(words), *seeds, stride, -(-len(words) // stride), block)
