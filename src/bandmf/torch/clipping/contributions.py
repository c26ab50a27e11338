"""What a layer knows about the gradients of single examples, without writing them out.

A rule (rules.py) describes the gradient of one parameter, for every example of a batch, as one of

- `Outer(left, right)`: the matrix sum_t left[t] right[t]', from tensors (examples, T, p) and (examples, T, q);
- `Rows(indices, values)`: a matrix whose row indices[s] receives values[s], from (examples, S) and (examples, S, q);
- `Patches(input, gradient, layer)`: a convolution, which is an `Outer` of unfolded patches, in portions;
- a tensor (examples, *shape of the parameter): the gradients themselves.

Norm (norms.py) and sum (here) come from the same tensors, so what an example adds is bounded whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

PORTION = 1 << 24  # numbers that are written out at a time, where gradients must be


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Outer:
    """For each example the sum over t of left[t] right[t]'."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        common = torch.promote_types(self.left.dtype, self.right.dtype)
        object.__setattr__(self, "left", _three(self.left).to(common))
        object.__setattr__(self, "right", _three(self.right).to(common))

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def examples(self) -> int:
        return len(self.left)

    def of(self, examples: Tensor | slice) -> Outer:
        return Outer(self.left[examples], self.right[examples])

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        """Add scale times the sum over the examples of factor times gradient."""
        given, right = self.left, self.right
        if (
            given.dtype == torch.float16
        ):  # small factors would leave its range, and be rounded by up to 100 percent
            given, right = given.float(), right.float()
        left = torch.empty_like(given)
        torch.mul(given, factors[:, None, None], out=left)  # rounded once; `norms` allows for it
        _add_product(total.view(left.shape[2], -1), left.flatten(0, 1), right.flatten(0, 1), scale)

    def write_out(self, shape: torch.Size) -> Tensor:
        dtype = wide(self.left.dtype)
        return (self.left.to(dtype).mT @ self.right.to(dtype)).view(-1, *shape)


@dataclass(frozen=True)
class Rows:
    """For each example a matrix with values[s] added to row indices[s]."""

    indices: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def examples(self) -> int:
        return len(self.indices)

    def of(self, examples: Tensor | slice) -> Rows:
        return Rows(self.indices[examples], self.values[examples])

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        values = self.values.to(total.dtype) * (scale * factors.to(total.dtype))[:, None, None]
        total.index_add_(0, self.indices.flatten(), values.flatten(0, 1))

    def write_out(self, shape: torch.Size) -> Tensor:
        values = self.values.to(wide(self.values.dtype))
        whole = values.new_zeros(self.examples, *shape)
        return whole.scatter_add_(1, self.indices[:, :, None].expand_as(values), values)


@dataclass(frozen=True)
class Patches:
    """A convolution without groups: the gradient is an Outer of output gradients and patches of the input."""

    input: Tensor  # padded, so that the convolution itself pads nothing
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

    def outer(self) -> Outer:
        patches = unfold(self.input, self.layer, self.gradient.shape[2:])
        return Outer(self.gradient.flatten(2).mT, patches.flatten(3).flatten(1, 2).mT)

    def portions(self) -> Iterator[tuple[slice, Outer]]:
        """Some examples at a time, since patches take several times the memory of the input."""
        positions = self.gradient[0, 0].numel()
        patch = self.layer.weight[0].numel()
        at_once = max(1, PORTION // max(1, positions * patch))
        for begin in range(0, self.examples, at_once):
            part = slice(begin, begin + at_once)
            yield part, self.of(part).outer()

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        gradient = self.gradient.to(total.dtype) * (scale * factors.to(total.dtype)).view(
            -1, *[1] * (self.gradient.ndim - 1)
        )
        layer, plain = self.layer, [0] * (self.gradient.ndim - 2)
        _, weight, _ = torch.ops.aten.convolution_backward(
            gradient, self.input.to(total.dtype), total, None, layer.stride, plain, layer.dilation, False, plain,
            layer.groups, (False, True, False),
        )  # fmt: skip
        total += weight

    def write_out(self, shape: torch.Size) -> Tensor:
        return torch.cat([outer.write_out(shape) for _, outer in self.portions()])


Contribution = Outer | Rows | Patches | Tensor


def unfold(padded: Tensor, layer: nn.Module, outputs: torch.Size) -> Tensor:
    """The patches that a convolution sees, (examples, channels, places in the kernel, *outputs), as one copy."""
    padded = padded.contiguous()
    kernel, stride, dilation = (_sizes(getattr(layer, n)) for n in ("kernel_size", "stride", "dilation"))
    batch, channel, *space = padded.stride()
    inside = [step * by for step, by in zip(space, dilation, strict=True)]
    across = [step * by for step, by in zip(space, stride, strict=True)]
    shape = (*padded.shape[:2], *kernel, *outputs)
    view = padded.as_strided(shape, (batch, channel, *inside, *across))
    return view.reshape(*padded.shape[:2], -1, *outputs)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def join(contributions: list[Contribution]) -> list[Contribution]:
    """The same gradient in as few terms as possible: one of each kind."""
    kinds: dict[type, list[Any]] = {}
    for one in contributions:
        kinds.setdefault(Tensor if isinstance(one, Tensor) else type(one), []).append(one)
    joined: list[Contribution] = []
    for kind, same in kinds.items():
        if len(same) == 1:
            joined += same
        elif kind is Tensor:
            joined.append(torch.stack(same).sum(0))
        elif kind is Outer:
            joined.append(Outer(torch.cat([o.left for o in same], 1), torch.cat([o.right for o in same], 1)))
        elif kind is Rows:
            joined.append(
                Rows(torch.cat([r.indices for r in same], 1), torch.cat([r.values for r in same], 1))
            )
        else:
            joined.append(
                torch.stack([patches.write_out(patches.layer.weight.shape) for patches in same]).sum(0)
            )
    return joined


def add_tensors(totals: list[Tensor], gradients: list[Tensor], factors: Tensor, scale: float) -> None:
    """Add the sums over the examples of factor times gradient, of many small parameters at once."""
    if not totals:
        return
    flat = torch.cat([in_rows(gradient) for gradient in gradients], 1)
    added = (scale * factors.to(flat.dtype)) @ flat
    pieces = added.split([total.numel() for total in totals])
    torch._foreach_add_(totals, [p.view_as(t).to(t.dtype) for p, t in zip(pieces, totals, strict=True)])


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product in float32 or better: products of half-precision numbers are exact there."""
    dtype = wide(left.dtype)
    if left.dtype != dtype and left.is_cuda:
        return torch.bmm(left, right, out_dtype=dtype)
    if _thin(left, right):
        return torch.bmm(left.double(), right.double()).to(dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def _thin(left: Tensor, right: Tensor) -> bool:
    """Where the CPU adds one by one, and 10^4 equal numbers lose the fourth digit: long sums for few results."""
    return left.is_cpu and min(left.shape[-2], right.shape[-1]) < 16 and left.shape[-1] > 64


def in_rows(gradients: Tensor) -> Tensor:
    """(examples, numbers); a parameter that is one number has one."""
    return gradients.reshape(len(gradients), -1) if gradients.ndim < 2 else gradients.flatten(1)


def _three(tensor: Tensor) -> Tensor:
    """(examples, T, features): whatever is between the first and the last dimension counts as T."""
    if tensor.ndim == 2:
        return tensor[:, None]
    return tensor if tensor.ndim == 3 else tensor.flatten(1, -2)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale * left' right, added up in the dtype of `total`."""
    if left.dtype == torch.float64 or _thin(left.T, right):
        total.add_((left.T.double() @ right.double()).to(total.dtype), alpha=scale)
    elif left.dtype == total.dtype:
        total.addmm_(left.T, right, alpha=scale)
    elif left.is_cuda:  # exact products of half-precision numbers, added up in float32
        torch.addmm(total, left.T, right, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype), alpha=scale)
