"""Gradients of convolutions, from patches of the input that are written out some examples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bandmf.torch.clipping.contributions.outer import Outer
from bandmf.torch.clipping.products import IN_CACHE, PORTION
from bandmf.torch.noise.precision import exact


@dataclass(frozen=True)
class Patches:
    """A convolution without groups: the gradient is an Outer of output gradients and patches of the input."""

    input: Tensor
    gradient: Tensor
    layer: Any

    @property
    def device(self) -> torch.device:
        return self.input.device

    @property
    def examples(self) -> int:
        return len(self.input)

    def of(self, examples: Tensor | slice) -> Patches:
        return replace(self, input=self.input[examples], gradient=self.gradient[examples])

    def padded(self) -> Tensor:
        """The input, of which the convolution itself pads nothing more."""
        mode = self.layer.padding_mode
        mode = "constant" if mode == "zeros" else mode
        return functional.pad(self.input, self.layer._reversed_padding_repeated_twice, mode=mode)

    def outer(self) -> Outer:
        outer = Outer(self.gradient.flatten(2).mT, unfold(self).mT)
        if self.gradient.ndim > 3:  # images of a batch are of one size; texts are padded
            outer.remember(counts=[outer.left.shape[1]] * self.examples)
        return outer

    def portions(self) -> Iterator[tuple[slice, Outer]]:
        """Some examples at a time, since patches take several times the memory of the input."""
        positions = self.gradient.shape[2:].numel()
        patch = self.layer.weight.shape[1:].numel()
        at_once = max(1, (PORTION if self.input.is_cuda else IN_CACHE) // max(1, positions * patch))
        for begin in range(0, self.examples, at_once):
            part = slice(begin, begin + at_once)
            yield part, self.of(part).outer()

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        if total.is_cuda:  # where patches take less time than a convolution without TF32
            for part, outer in self.portions():
                outer.add_to(total, factors[part], scale)
            return
        factors = (scale * factors.to(total.dtype)).view(-1, *[1] * (self.gradient.ndim - 1))
        gradient = factors * self.gradient.to(total.dtype)
        layer, plain = self.layer, [0] * (self.gradient.ndim - 2)
        with exact():
            _, weight, _ = torch.ops.aten.convolution_backward(
                gradient, self.padded().to(total.dtype), total, None, layer.stride, plain, layer.dilation, False, plain,
                layer.groups, (False, True, False),
            )  # fmt: skip
        total += weight

    def write_out(self, shape: torch.Size) -> Tensor:
        return torch.cat([outer.write_out(shape) for _, outer in self.portions()])


def unfold(patches: Patches) -> Tensor:
    """What the kernel sees at each place, (examples, channels * places in the kernel, places), as one copy."""
    layer, outputs, padded = patches.layer, patches.gradient.shape[2:], patches.padded().contiguous()
    batch, channel, *space = padded.stride()
    inside = [step * by for step, by in zip(space, layer.dilation, strict=True)]
    across = [step * by for step, by in zip(space, layer.stride, strict=True)]
    shape = (*padded.shape[:2], *layer.kernel_size, *outputs)
    view = padded.as_strided(shape, (batch, channel, *inside, *across))
    return view.reshape(len(padded), -1, outputs.numel())
