"""Gradients of which few rows are not zero: those of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bandmf.torch.clipping.products import wide


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
