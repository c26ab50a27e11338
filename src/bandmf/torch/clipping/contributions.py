"""What a layer knows about the gradients of single examples, without writing them out.

A rule (rules.py) describes the gradient of one parameter, for every example of a batch, as one of

- `Outer(left, right)`: the matrix sum_t left[t] right[t]', from tensors (examples, T, p) and (examples, T, q);
- `Rows(indices, values)`: a matrix whose row indices[s] receives values[s], from (examples, S) and (examples, S, q);
- `Patches(input, gradient, layer)`: a convolution, which is an `Outer` of unfolded patches, in portions;
- a tensor (examples, *shape of the parameter): the gradients themselves.

Norm (norms.py) and sum (here) come from the same tensors, so what an example adds is bounded whatever they hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PORTION = 1 << 25  # numbers that are written out at a time, where gradients must be
IN_CACHE = 1 << 20  # the same where they pass through the cache of a CPU


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are added up."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Outer:
    """For each example the sum over t of left[t] right[t]'."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.ndim == self.right.ndim == 3 and self.left.dtype == self.right.dtype:
            return
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
        total = total.view(self.left.shape[2], -1)
        if not by_gram(self):
            self._add_exactly(total, factors, scale)
            return
        left, right = self.left, self.right
        if left.dtype == torch.float16:  # small factors would leave its range
            left, right = left.float(), right.float()
        if self.scales_left:
            left = _times(left, factors)
        else:
            right = _times(right, factors)
        _add_product(total, left.flatten(0, 1), right.flatten(0, 1), scale)

    @property
    def smaller(self) -> Tensor:
        """What is multiplied by the factors."""
        return self.left if self.scales_left else self.right

    def add_scaled(self, total: Tensor, scaled: Tensor, scale: float) -> None:
        """The same as `add_to`, given factors times `smaller`."""
        total = total.view(self.left.shape[2], -1)
        if self.scales_left:
            _add_product(total, scaled, self.right.flatten(0, 1), scale)
        else:
            _add_product(total, self.left.flatten(0, 1), scaled, scale)

    def _add_exactly(self, total: Tensor, factors: Tensor, scale: float) -> None:
        """For sums over many places, whose rounding errors cannot be bounded well: they are made small instead."""
        left = _times(self.left.to(wide(self.left.dtype)), factors).flatten(0, 1)
        right = self.right.flatten(0, 1)
        with exact():
            if right.dtype == torch.bfloat16 and right.is_cuda:  # in two parts, both for the fast units
                high = left.to(right.dtype)
                _add_product(total, high, right, scale)
                _add_product(total, (left - high).to(right.dtype), right, scale)
            else:
                _add_product(total, left, right.to(left.dtype), scale)

    @property
    def scales_left(self) -> bool:
        """Which of the two is multiplied by the factors: the smaller."""
        return self.left.shape[2] <= self.right.shape[2]

    def write_out(self, shape: torch.Size) -> Tensor:
        dtype = wide(self.left.dtype)
        with exact():
            if self.left.is_cuda:
                return product(self.left.mT, self.right).view(-1, *shape)
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
        at_once = max(1, (PORTION if self.input.is_cuda else IN_CACHE) // max(1, positions * patch))
        for begin in range(0, self.examples, at_once):
            part = slice(begin, begin + at_once)
            yield part, self.of(part).outer()

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        if total.is_cuda:  # where patches take less time than a convolution without TF32
            for part, outer in self.portions():
                outer.add_to(total, factors[part], scale)
            return
        gradient = self.gradient.to(total.dtype) * (scale * factors.to(total.dtype)).view(
            -1, *[1] * (self.gradient.ndim - 1)
        )
        layer, plain = self.layer, [0] * (self.gradient.ndim - 2)
        with exact():
            _, weight, _ = torch.ops.aten.convolution_backward(
                gradient, self.input.to(total.dtype), total, None, layer.stride, plain, layer.dilation, False, plain,
                layer.groups, (False, True, False),
            )  # fmt: skip
        total += weight

    def write_out(self, shape: torch.Size) -> Tensor:
        return torch.cat([outer.write_out(shape) for _, outer in self.portions()])


@dataclass(frozen=True)
class Totals:
    """Sums over an example's places: of gradients or, with an input, of gradients times the normalized input.

    They become tensors before anything else is done with them, those of one shape together (`settle`).
    """

    gradient: Tensor
    input: Tensor | None = None
    epsilon: float = 0.0
    centered: bool = True  # as in LayerNorm; RMSNorm is not

    @property
    def kind(self) -> Any:
        """What those have in common that are found together."""
        return (
            self.gradient.shape,
            self.gradient.dtype,
            self.gradient.device,
            self.epsilon,
            self.centered,
            (None if self.input is None else self.input.dtype),
        )

    def now(self) -> Tensor:
        dtype, g = wide(self.gradient.dtype), self.gradient
        if self.input is None:
            return g.sum(1, dtype=dtype)
        x = self.input.to(wide(self.input.dtype))
        if self.centered:
            return (g * functional.layer_norm(x, x.shape[-1:], eps=self.epsilon)).sum(1, dtype=dtype)
        return (g * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon))).sum(1, dtype=dtype)


Contribution = Outer | Rows | Patches | Tensor


def unfold(padded: Tensor, layer: nn.Module, outputs: torch.Size) -> Tensor:
    """The patches that a convolution sees, (examples, channels, places in the kernel, *outputs), as one copy."""
    padded = padded.contiguous()
    kernel, stride, dilation = (getattr(layer, name) for name in ("kernel_size", "stride", "dilation"))
    batch, channel, *space = padded.stride()
    inside = [step * by for step, by in zip(space, dilation, strict=True)]
    across = [step * by for step, by in zip(space, stride, strict=True)]
    shape = (*padded.shape[:2], *kernel, *outputs)
    view = padded.as_strided(shape, (batch, channel, *inside, *across))
    return view.reshape(*padded.shape[:2], -1, *outputs)


def settle(terms: dict[str, list[Contribution | Totals]]) -> dict[str, list[Contribution]]:
    """All Totals as tensors."""
    alike: dict[Any, list[Totals]] = {}
    for term in (term for several in terms.values() for term in several):
        if isinstance(term, Totals):
            alike.setdefault(term.kind, []).append(term)
    found = {id(t): tensor for same in alike.values() for t, tensor in zip(same, _totals(same), strict=True)}
    return {
        name: [found[id(term)] if isinstance(term, Totals) else term for term in several]
        for name, several in terms.items()
    }


def _totals(same: list[Totals]) -> Sequence[Tensor]:
    first = same[0].gradient
    if len(same) == 1 or not fuses(first) or first.dtype == torch.float64:
        return [each.now() for each in same]
    from bandmf.torch.clipping import fused

    inputs = None if same[0].input is None else [each.input for each in same if each.input is not None]
    return fused.totals([each.gradient for each in same], inputs, same[0].epsilon, same[0].centered).unbind()


def fuses(tensor: Tensor) -> bool:
    """Whether many layers are served by one Triton kernel."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def join(contributions: list[Contribution]) -> list[Contribution]:
    """The same gradient in as few terms as possible: one of each kind."""
    if len(contributions) == 1:
        return contributions
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


@dataclass(frozen=True)
class Pack:
    """The gradients of many small parameters side by side, so that one operation serves them all."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    flat: Tensor

    @staticmethod
    def of(gradients: dict[str, Tensor]) -> Pack:
        flat = [in_rows(gradient) for gradient in gradients.values()]
        together = torch.cat(flat, 1) if len(flat) > 1 else flat[0]
        return Pack(tuple(gradients), tuple(each.shape[1] for each in flat), together)

    def keep(self, examples: Tensor) -> Pack:
        return replace(self, flat=self.flat[examples.to(self.flat.device)])

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.flat.split(self.sizes, 1), strict=True)

    def add_to(self, sums: dict[str, Tensor], factors: dict[str, Tensor], scale: float) -> None:
        """`factors` are of each parameter, and mostly the same for all."""
        alike = {id(factors[name]): factors[name].to(self.flat) for name in self.names}
        if len(alike) == 1:
            (factor,) = alike.values()
            pieces = (scale * factor @ self.flat).split(self.sizes)
        else:
            pieces = tuple(scale * alike[id(factors[name])] @ part for name, part in self.parts())
        totals = [sums[name] for name in self.names]
        added = [piece.view_as(t).to(t.dtype) for piece, t in zip(pieces, totals, strict=True)]
        torch._foreach_add_(totals, added)


def by_gram(outer: Outer) -> bool:
    """Whether the norm is found from inner products of all pairs; otherwise by writing the matrix out."""
    times, p, q = outer.left.shape[1], outer.left.shape[2], outer.right.shape[2]
    return times * (p + q) <= p * q


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Float32 products without TF32: for what is added up over many places, where its error would count."""
    before = torch.get_float32_matmul_precision()
    if before == "highest" and not (torch.backends.cudnn.allow_tf32 and torch.cuda.is_available()):
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def _times(vectors: Tensor, factors: Tensor) -> Tensor:
    """In the dtype of the vectors, rounded once; `norms` allows for it."""
    return torch.mul(vectors, factors[:, None, None], out=torch.empty_like(vectors))


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
