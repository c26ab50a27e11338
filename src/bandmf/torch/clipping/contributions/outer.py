"""Gradients that are sums of outer products, one for each place: those of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bandmf.torch.clipping.products import add_product, in_places, live_places, product, times, wide
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
        few = self.few
        short = [n for n, count in enumerate(self.counts) if count <= few]
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
