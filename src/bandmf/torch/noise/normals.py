"""White noise for one device, with scratch memory for one chunk.

On the CPU it comes as NumPy arrays: NumPy's logarithm and conversions are faster there than torch's, and so are
its short operations. On other devices it comes as torch tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from bandmf.noise.normals import GROUP, PAIRS, Source, chunks
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step
from bandmf.torch.noise import chacha


class Drawer:
    """Draws z on one device, at most `chunk` coordinates at a time."""

    def __init__(self, secret: bytes, cipher_rounds: int, device: torch.device) -> None:
        self._device = device
        self._source: Source | TorchSource
        if device.type == "cpu":
            self._source = Source(secret, cipher_rounds)
        else:
            self._source = TorchSource(secret, cipher_rounds, device)
        self.chunk = self._source.CHUNK

    def white(self, step: Step, tensor: int, region: Region, begin: int, end: int) -> tuple[Any, Any]:
        """The sum of the step's draws, and z itself where the step stores it: scratch, which may be overwritten."""
        (drawn, feed), *more = step.draws
        y = self._draw(drawn, tensor, region, begin, end)
        newest = y + 0 if step.stores_input else None
        if feed != 1:
            y *= feed
        if more:
            y = y + 0  # a copy, as the next draw overwrites it
        for drawn, feed in more:
            y += feed * self._draw(drawn, tensor, region, begin, end)
        return y, newest

    def _draw(self, step: int, tensor: int, region: Region, begin: int, end: int) -> Any:
        if region.contiguous:
            return self._source.chunk(step, tensor, region.start + begin, region.start + end)
        coordinates = region.coordinates(begin, end)
        # Each group that is touched is drawn once; neighboring groups are drawn together.
        groups, rank = np.unique(coordinates // GROUP, return_inverse=True)
        parts: list[Any] = []
        for span in np.split(groups, np.flatnonzero(np.diff(groups) != 1) + 1):
            for first, last in chunks(int(span[0]) * GROUP, (int(span[-1]) + 1) * GROUP, self.chunk):
                parts.append(self._source.chunk(step, tensor, first, last) + 0)
        positions = rank * GROUP + coordinates % GROUP
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)[positions]
        return torch.cat(parts)[torch.from_numpy(positions).to(self._device)]


class TorchSource:
    """The same as `Source`, in torch operations."""

    CHUNK = 128 * GROUP

    def __init__(self, secret: bytes, cipher_rounds: int, device: torch.device) -> None:
        self._key, self._cipher_rounds = chacha.key_words(secret, device), cipher_rounds
        groups = self.CHUNK // GROUP
        self._words = torch.empty(groups, 3, PAIRS, dtype=torch.int32, device=device)
        self._radius, self._theta, self._spare = torch.empty(3, groups, PAIRS, dtype=torch.float32, device=device)
        self._normals = torch.empty(groups, 2, PAIRS, dtype=torch.float32, device=device)

    def chunk(self, step: int, tensor: int, start: int, stop: int) -> torch.Tensor:
        """z for a range between two multiples of CHUNK; scratch that the next call overwrites."""
        first, last = start // GROUP, -(-stop // GROUP)
        out = self._words[: last - first]
        chacha.fill(self._key, out, step, tensor, first, self._cipher_rounds)
        return self._box_muller(out)[start - first * GROUP : stop - first * GROUP]

    def _box_muller(self, words: torch.Tensor) -> torch.Tensor:
        n = len(words)
        radius, theta, spare, normals = self._radius[:n], self._theta[:n], self._spare[:n], self._normals[:n]
        words[:, 1].bitwise_or_(1)
        unsigned = words.view(torch.uint32)
        radius.copy_(unsigned[:, 0]).mul_(2.0**-32)
        spare.copy_(unsigned[:, 1])
        radius.add_(spare, alpha=2.0**-64).log_().mul_(-2).sqrt_()
        theta.copy_(words[:, 2]).mul_(math.pi * 2.0**-31)
        torch.mul(radius, torch.cos(theta, out=spare), out=normals[:, 0])
        torch.mul(radius, torch.sin(theta, out=spare), out=normals[:, 1])
        return normals.view(-1)
