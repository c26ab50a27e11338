"""nn.EmbeddingBag: sums and means of embeddings, one bag for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bandmf.torch.clipping.contributions import Rows
from bandmf.torch.clipping.products import wide
from bandmf.torch.clipping.recording.calls import argument
from bandmf.torch.clipping.recording.recorded import Recorded
from bandmf.torch.clipping.rules import Described


def describes(module: nn.Module) -> bool:
    """Whether this file knows the module: maxima are for torch.func."""
    return (
        isinstance(module, nn.EmbeddingBag) and type(module).forward is nn.EmbeddingBag.forward and module.mode != "max"
    )


class Bag(Recorded):
    """The `forward` of an nn.EmbeddingBag, which records its bags."""

    module: nn.EmbeddingBag

    def rows_at(self, args: Any, kwargs: Any) -> tuple[Tensor, str, int] | None:
        """Each offset begins a bag; without them each row of the numbers is one."""
        if self.module.include_last_offset:  # there is one more than bags
            return None
        offsets = argument(args, kwargs, 1, "offsets")
        return *(argument(args, kwargs, 0, "input") if offsets[0] is None else offsets), 0

    def record(self, args: Any, kwargs: Any) -> Tensor:
        return self._forward(*args, **kwargs)

    def _forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        output = self._run((input, offsets, per_sample_weights), {})
        places, there = _places(input, offsets, self.module.include_last_offset)
        indices = input.flatten()[places]
        shares = there.to(wide(output.dtype))
        if self.module.padding_idx is not None:
            shares = shares * (indices != self.module.padding_idx)
        if self.module.mode == "mean":
            shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
        if per_sample_weights is not None:
            shares = shares * per_sample_weights.detach().flatten()[places]

        def rule(layer: Any, a: Tensor, g: Tensor) -> Described:
            return {"weight": Rows(a, g[:, None].to(shares.dtype) * shares[:, :, None])}

        return self.recorder.note(self.layer, rule, indices, output)


def _places(input: Tensor, offsets: Tensor | None, with_end: bool) -> tuple[Tensor, Tensor]:
    """(bags, most): where the numbers of each bag are in the input, and which of these places it has."""
    if offsets is None:
        places = torch.arange(input.numel(), device=input.device).view(input.shape)
        return places, torch.ones_like(places, dtype=torch.bool)
    ends = offsets[1:] if with_end else torch.cat([offsets[1:], offsets.new_tensor([input.numel()])])
    begins = offsets[: len(ends)]
    counts = ends - begins
    steps = torch.arange(int(counts.max()) if len(counts) else 0, device=input.device)
    there = steps < counts[:, None]
    return torch.where(there, begins[:, None] + steps, 0), there
