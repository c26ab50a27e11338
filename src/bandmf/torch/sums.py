"""The sums of clipped gradients: this rank's part of every parameter, in one stretch of memory per dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from bandmf.torch.shards import local

_CHUNK = 1 << 22
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64


class Sums:
    """`views[name]` is where the gradients of a parameter are added up; `flats` are the same numbers in a row."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in parameters.items():
            # Half precision would lose the small ones among many examples.
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            groups.setdefault((parameter.device, dtype), []).append(name)
        self.flats: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        for (device, dtype), names in groups.items():
            shapes = {name: local(parameters[name]).shape for name in names}
            flat = torch.zeros(sum(shape.numel() for shape in shapes.values()), device=device, dtype=dtype)
            pieces = flat.split([shape.numel() for shape in shapes.values()])
            self.views |= {name: piece.view(shapes[name]) for name, piece in zip(names, pieces, strict=True)}
            self.flats.append(flat)

    def clear(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def finite(self) -> bool:
        """Whether all numbers are; without memory of their size."""
        filled = [flat for flat in self.flats if len(flat)]
        return all(bool(torch.isfinite(torch.stack(torch.aminmax(flat))).all()) for flat in filled)

    def digest(self, secret: bytes) -> bytes:
        """A keyed digest of every bit, for the ledger to hash once more.

        Poly1305 on the CPU, at memory speed; elsewhere of a fingerprint made where the numbers are.
        """
        found = Poly1305(secret)
        for flat in self.flats:
            words = flat.view(torch.int32)
            found.update(words.numpy().view(np.uint8).data if words.is_cpu else fingerprint(words, secret))
        return found.finalize()


def fingerprint(words: Tensor, secret: bytes) -> bytes:
    """128 bits: two sums, modulo 2^64, of all words times secret odd numbers that depend on their place.

    Not cryptographic: it tells apart sums that differ by accident, which is all that replays need.
    """
    totals = torch.zeros(2, dtype=torch.int64, device=words.device)
    for half in range(2):
        seed = int.from_bytes(secret[8 * half : 8 * half + 8], "little", signed=True)
        for begin in range(0, len(words), _CHUNK):
            part = words[begin : begin + _CHUNK].to(torch.int64)
            weight = torch.arange(begin, begin + len(part), device=words.device).mul_(_MIX[0]).add_(seed)
            weight.bitwise_xor_(weight >> 30).mul_(_MIX[1])
            weight.bitwise_xor_(weight >> 27).mul_(_MIX[2])
            weight.bitwise_or_(1)
            totals[half] += part.mul_(weight).sum()
    return totals.cpu().numpy().tobytes()
