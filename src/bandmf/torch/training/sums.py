"""The sums of clipped gradients: this rank's part of every parameter, in one stretch of memory per device.

In float32, whatever the model's: half precision would lose the small gradients among many examples, and the last digits
of a float64 sum would show through noise that has none so small.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from bandmf._types import IntArray
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Stream
from bandmf.torch.noise.shards import local

CHUNK = 1 << 22  # words at a time where there is no fused kernel
_EXPONENT = 0x7F800000  # all ones in NaN and infinity, and only there
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687  # odd, and mixing all bits


class Sums:
    """`views[name]` is where the gradients of a parameter are added up; `flats` are the same numbers in a row."""

    def __init__(self, parameters: Mapping[str, Tensor], secret: bytes) -> None:
        self._secret = secret
        first, second = (int(word) >> 2 for word in Stream(Key(secret), 0).words(2))
        self._seeds = first, second
        groups: dict[torch.device, list[str]] = {}
        for name, parameter in parameters.items():
            groups.setdefault(parameter.device, []).append(name)
        self._shapes = {
            device: {name: local(parameters[name]).shape for name in names} for device, names in groups.items()
        }
        self._allocate()
        self.clear()

    def _allocate(self) -> None:
        self.flats: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        for device, shapes in self._shapes.items():
            size = sum(shape.numel() for shape in shapes.values())
            flat = torch.empty(size, dtype=torch.float32, device=device)  # whatever the default is
            pieces = flat.split([shape.numel() for shape in shapes.values()])
            self.views |= {n: piece.view(shapes[n]) for n, piece in zip(shapes, pieces, strict=True)}
            self.flats.append(flat)
        self._lent = False

    def clear(self) -> None:
        """All zero; in new memory where the old was lent to `.grad`, which someone may still hold."""
        if self._lent:
            self._allocate()
        for flat in self.flats:
            flat.zero_()

    def divide(self, by: float) -> None:
        """Sums become means, which the parameters may have as their gradients until the next `clear`."""
        for flat in self.flats:
            flat.div_(by)
        self._lent = True

    def examine(self) -> tuple[bool, bytes]:
        """Whether all numbers are finite, and a keyed digest of every bit, for the ledger to hash once more.

        Poly1305 on the CPU, at memory speed; elsewhere of a fingerprint made where the numbers are.
        """
        digest, finite = Poly1305(self._secret), True
        for flat in self.flats:
            if flat.is_cpu:
                digest.update(flat.numpy().view(np.uint8).data)
                finite = finite and _finite(flat)
            else:
                totals = fingerprint(flat.view(torch.int32), self._seeds)
                digest.update(totals[:2].tobytes())
                finite = finite and not totals[2]
        return finite, digest.finalize()


def _finite(numbers: Tensor) -> bool:
    """Without memory of their size."""
    return not len(numbers) or bool(torch.isfinite(torch.stack(torch.aminmax(numbers))).all())


# --- the digest of sums on a GPU ------------------------------------------------------------------------


def fingerprint(words: Tensor, seeds: tuple[int, int], kernels: str | None = None) -> IntArray:
    """128 bits, as two numbers, for the ledger to hash once more, and how many words are no finite float32.

    In one pass over int32 words where they are, with one wait for the result.

    Two sums, modulo 2^64, of all words times odd numbers that depend on `seeds`, secret numbers below 2^62, and on the
    place of the word. Not cryptographic: it tells apart sums that differ by accident, which is all that replays need.
    """
    fused = words.is_cuda and find_spec("triton") is not None if kernels is None else kernels == "triton"
    totals = torch.zeros(3, dtype=torch.int64, device=words.device)
    if fused:
        _fused(words, seeds, totals)
    else:
        for begin in range(0, len(words), CHUNK):
            part = words[begin : begin + CHUNK].to(torch.int64) & 0xFFFFFFFF
            places = torch.arange(begin, begin + len(part), device=words.device)
            bad = (part & _EXPONENT) == _EXPONENT
            totals += torch.stack([*((part * _weights(places + seed)).sum() for seed in seeds), bad.sum()])
    return totals.cpu().numpy()


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
