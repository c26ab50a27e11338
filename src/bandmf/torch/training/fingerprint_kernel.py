"""The fingerprint of sums as one Triton kernel; its weights are those of sums.py."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def weights(numbers):
    x = numbers * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 32)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 29)) | 1


@triton.jit
def add_words(words, totals, size, seed0, seed1, stride, rounds, block: tl.constexpr):
    first = tl.zeros((block,), tl.uint64)
    second = tl.zeros((block,), tl.uint64)
    bad = tl.zeros((block,), tl.int32)
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block).to(tl.int64)
    for _ in range(rounds):
        word = tl.load(words + places, mask=places < size, other=0)
        bad += ((word & 0x7F800000) == 0x7F800000).to(tl.int32)  # NaN or infinity
        word = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        first += word * weights((places + seed0).to(tl.uint64))
        second += word * weights((places + seed1).to(tl.uint64))
        places += stride
    tl.atomic_add(totals, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(totals + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(totals + 2, tl.sum(bad, 0).to(tl.int64))
