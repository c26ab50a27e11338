"""Sums over the places of an example: what the gradients of biases and of normalizing layers are.

On a GPU many layers are added up together, since the launches of small operations take longer than they do; but no more
wait for it than memory should hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bandmf.torch.clipping.contributions import Contribution
from bandmf.torch.clipping.products import fuses, wide

_MOST_HELD = 1 << 28  # bytes of inputs and gradients that wait to be added up together


@dataclass(frozen=True)
class Totals:
    """Sums over an example's places: of gradients or, with an input, of gradients times the normalized input.

    They become tensors (`settle`) before anything else is done with them.
    """

    gradient: Tensor
    input: Tensor | None = None
    epsilon: float = 0.0
    centered: bool = True  # as in LayerNorm; RMSNorm is not

    @property
    def kind(self) -> Any:
        """What those have in common that are found together."""
        g, of_input = self.gradient, None if self.input is None else (self.input.dtype, self.input.shape)
        return g.shape, g.dtype, g.device, self.epsilon, self.centered, of_input

    def now(self) -> Tensor:
        dtype, g = wide(self.gradient.dtype), self.gradient
        if self.input is None:
            return g.sum(1, dtype=dtype)
        x = self.input.to(wide(self.input.dtype))
        if self.centered:
            return (g * functional.layer_norm(x, x.shape[-1:], eps=self.epsilon)).sum(1, dtype=dtype)
        return (g * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon))).sum(1, dtype=dtype)


Described = dict[str, Contribution | Totals]  # by parameter


def settle(several: Sequence[Described]) -> None:
    """All Totals become tensors, those of one kind together."""
    alike: dict[Any, list[tuple[Described, str, Totals]]] = {}
    for described in several:
        for name, term in described.items():
            if isinstance(term, Totals):
                alike.setdefault(term.kind, []).append((described, name, term))
    for same in alike.values():
        found = _together([term for _, _, term in same])
        for (described, name, _), tensor in zip(same, found, strict=True):
            described[name] = tensor


def _together(same: list[Totals]) -> Sequence[Tensor]:
    first, given = same[0].gradient, same[0].input
    broadcast = given is not None and given.shape != first.shape  # which kernels know nothing of
    if len(same) == 1 or not fuses(first) or first.dtype == torch.float64 or broadcast:
        return [each.now() for each in same]
    from bandmf.torch.clipping import fused

    inputs = None if same[0].input is None else [each.input for each in same if each.input is not None]
    return fused.totals([each.gradient for each in same], inputs, same[0].epsilon, same[0].centered).unbind()


class Unsettled:
    """Normalizing layers, whose inputs and gradients nothing else needs any more."""

    def __init__(self) -> None:
        self._several: list[Described] = []
        self._bytes = 0

    def add(self, described: Described) -> None:
        """Settle it later, with others, or now, if they have become too many."""
        held = [term for term in described.values() if isinstance(term, Totals) and term.input is not None]
        if not held:
            return
        self._several.append(described)
        self._bytes += sum(2 * term.gradient.nbytes for term in held)
        if self._bytes > _MOST_HELD or not fuses(held[0].gradient):
            settle(self._several)
            self._several, self._bytes = [], 0
