"""Gradients that are written out, of many parameters side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bandmf.torch.clipping.products import in_rows


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
