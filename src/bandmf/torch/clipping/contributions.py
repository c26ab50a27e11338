"""What a layer knows about the gradients of single examples, without writing them out.

A rule (rules.py) describes the gradient of one parameter, for every example of a batch, as one of

- `Outer(left, right)`: the matrix sum_t left[t] right[t]', from tensors (examples, T, p) and (examples, T, q);
- `Rows(indices, values)`: a matrix whose row indices[s] receives values[s], from (examples, S) and (examples, S, q);
- `Patches(input, gradient, layer)`: a convolution, which is an `Outer` of unfolded patches, in portions;
- a tensor (examples, *shape of the parameter): the gradients themselves.

Norm (norms/) and sum (here) come from the same tensors, so what an example adds is bounded whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bandmf.torch.clipping.products import (
    IN_CACHE,
    PORTION,
    add_product,
    fuses,
    in_places,
    in_rows,
    live_places,
    product,
    times,
    unfold,
    wide,
)
from bandmf.torch.noise.precision import exact


@dataclass(frozen=True)
class Group:
    """Some examples of an Outer, whose norms are found in one way."""

    examples: Tensor | slice
    outer: Outer
    by_gram: bool  # from inner products of all pairs of places; otherwise by writing the matrix out


@dataclass(frozen=True)
class Outer:
    """For each example the sum over t of left[t] right[t]'."""

    left: Tensor
    right: Tensor
    is_thin: bool = False  # has many places and small matrices, which are better written out at once

    def __post_init__(self) -> None:
        if self.left.ndim == self.right.ndim == 3 and self.left.dtype == self.right.dtype:
            return
        common = torch.promote_types(self.left.dtype, self.right.dtype)
        object.__setattr__(self, "left", in_places(self.left).to(common))
        object.__setattr__(self, "right", in_places(self.right).to(common))

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def examples(self) -> int:
        return len(self.left)

    def of(self, examples: Tensor | slice) -> Outer:
        return Outer(self.left[examples], self.right[examples])

    @cached_property
    def live(self) -> Tensor:
        """(examples, T): the places that add anything."""
        return live_places(self.left, self.right)

    @cached_property
    def counts(self) -> list[int]:
        """How many places of each example are live."""
        return self.live.sum(1).tolist()

    def remember(self, **known: Any) -> None:
        """`live` or `counts`, which somebody knows already."""
        vars(self).update(known)

    @property
    def few(self) -> int:
        """For as many places, inner products of all pairs take no more operations than the matrix."""
        p, q = self.left.shape[2], self.right.shape[2]
        return p * q // (p + q)

    @property
    def is_short(self) -> bool:
        """Whether no example can have more than few places."""
        return self.left.shape[1] <= self.few

    def groups(self) -> list[Group]:
        """The examples by the number of their own live places, which decides how they are counted and added.

        In low precision the two ways differ by percents. Were T to decide, one long text in the batch would change what
        all others contribute.
        """
        everybody = slice(None)
        if self.is_short:
            return [Group(everybody, self, True)]
        short = [n for n, count in enumerate(self.counts) if count <= self.few]
        if not short:
            return [Group(everybody, self, False)]
        which = torch.tensor(short, device=self.device)
        # One place would be counted more exactly than several are with TF32: by nobody's padding.
        compact = self._compact(which, max(2, *(self.counts[n] for n in short)))
        if len(short) == self.examples:
            return [Group(everybody, compact, True)]
        rest = torch.tensor(sorted(set(range(self.examples)) - set(short)), device=self.device)
        return [Group(which, compact, True), Group(rest, self.of(rest), False)]

    def _compact(self, examples: Tensor, most: int) -> Outer:
        """These examples, with all of their live places and as many dead ones as must fill up."""
        order = self.live[examples].byte().argsort(dim=1, descending=True, stable=True)
        rows = (examples[:, None] * self.left.shape[1] + order[:, :most]).flatten()
        left, right = (x.flatten(0, 1)[rows] for x in (self.left, self.right))
        return Outer(left.unflatten(0, (len(examples), -1)), right.unflatten(0, (len(examples), -1)))

    def add_to(self, total: Tensor, factors: Tensor, scale: float) -> None:
        """Add scale times the sum over the examples of factor times gradient."""
        total = total.view(self.left.shape[2], -1)
        for group in self.groups():
            add = group.outer._add_rounded if group.by_gram else group.outer._add_exactly
            add(total, factors[group.examples], scale)

    def _add_rounded(self, total: Tensor, factors: Tensor, scale: float) -> None:
        left, right = self.left, self.right
        if left.dtype == torch.float16:  # small factors would leave its range
            left, right = left.float(), right.float()
        if self.scales_left:
            left = times(left, factors)
        else:
            right = times(right, factors)
        add_product(total, left.flatten(0, 1), right.flatten(0, 1), scale)

    @property
    def smaller(self) -> Tensor:
        """What is multiplied by the factors."""
        return self.left if self.scales_left else self.right

    def add_scaled(self, total: Tensor, scaled: Tensor, scale: float) -> None:
        """The same as `add_to`, given factors times `smaller`."""
        total = total.view(self.left.shape[2], -1)
        if self.scales_left:
            add_product(total, scaled, self.right.flatten(0, 1), scale)
        else:
            add_product(total, self.left.flatten(0, 1), scaled, scale)

    def _add_exactly(self, total: Tensor, factors: Tensor, scale: float) -> None:
        """For sums over many places, whose rounding errors cannot be bounded well: they are made small instead."""
        left = times(self.left.to(wide(self.left.dtype)), factors).flatten(0, 1)
        right = self.right.flatten(0, 1)
        with exact():
            if right.dtype == torch.bfloat16 and right.is_cuda:  # in two parts, both for the fast units
                high = left.to(right.dtype)
                add_product(total, high, right, scale)
                add_product(total, (left - high).to(right.dtype), right, scale)
            else:
                add_product(total, left, right.to(left.dtype), scale)

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
        outer = Outer(self.gradient.flatten(2).mT, patches.flatten(3).flatten(1, 2).mT)
        if self.gradient.ndim > 3:  # images of a batch are of one size; texts are padded
            outer.remember(counts=[outer.left.shape[1]] * self.examples)
        return outer

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
        factors = (scale * factors.to(total.dtype)).view(-1, *[1] * (self.gradient.ndim - 1))
        gradient = factors * self.gradient.to(total.dtype)
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
        g, of_input = self.gradient, None if self.input is None else self.input.dtype
        return g.shape, g.dtype, g.device, self.epsilon, self.centered, of_input

    def now(self) -> Tensor:
        dtype, g = wide(self.gradient.dtype), self.gradient
        if self.input is None:
            return g.sum(1, dtype=dtype)
        x = self.input.to(wide(self.input.dtype))
        if self.centered:
            return (g * functional.layer_norm(x, x.shape[-1:], eps=self.epsilon)).sum(1, dtype=dtype)
        return (g * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon))).sum(1, dtype=dtype)


Contribution = Outer | Rows | Patches | Tensor


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
            left, right = torch.cat([o.left for o in same], 1), torch.cat([o.right for o in same], 1)
            joined.append(Outer(left, right, is_thin=same[0].is_thin))
        elif kind is Rows:
            joined.append(
                Rows(torch.cat([r.indices for r in same], 1), torch.cat([r.values for r in same], 1))
            )
        else:
            joined.append(
                torch.stack([patches.write_out(patches.layer.weight.shape) for patches in same]).sum(0)
            )
    return joined


def write_out_thin(terms: dict[str, list[Contribution]]) -> dict[str, list[Contribution]]:
    """With tensors for thin Outers, as LoRA has dozens of: together they cost less than each by itself."""
    with exact():
        return {name: _thin_written(several) for name, several in terms.items()}


def _thin_written(terms: list[Contribution]) -> list[Contribution]:
    first = terms[0]
    if len(terms) > 1 or not isinstance(first, Outer) or not first.is_thin:
        return terms
    return [product(first.left.mT, first.right)]


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
