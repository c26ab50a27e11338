"""Per-example clipping through Opacus, added up into one sum per parameter: what all ways have in common.

Guarantees: what one example adds to the sums has norm at most clip_norm, over all parameters together; rows of
padding add nothing. Where Opacus would count a norm wrongly, training is refused with a sentence.
"""

from __future__ import annotations

import warnings
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# True of every first layer, and harmless: its inputs are data.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")

Parameters = dict[str, nn.Parameter]


class Clipping(Protocol):
    """Adds the clipped gradients of the first `valid` of `rows` examples to the sums, after the backward pass."""

    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int) -> None: ...
    def clear(self) -> None: ...
    def remove(self) -> None: ...


def clip_factor(norms: Tensor, limit: float) -> Tensor:
    """What an example with this norm is multiplied by, as in Opacus."""
    return (limit / (norms + 1e-6)).clamp(max=1.0)


def refuse_wrong_norms(mode: str, model: nn.Module) -> None:
    """Tied weights: fine where whole gradients are added up, wrong where only norms are, or memory is shared."""
    homes: dict[int, str] = {}
    memory: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or not parameter.numel():
            continue
        tied = homes.setdefault(id(parameter), name)
        if tied != name and mode == "ghost":
            raise ValueError(
                f"clipping='ghost': {name!r} is tied to {tied!r}, and ghost clipping counts the norm of tied "
                "weights wrongly; untie them, freeze them, or use clipping='hooks'"
            )
        if tied != name or isinstance(parameter, DTensor):
            continue
        alias = memory.setdefault(parameter.data_ptr(), name)
        if alias != name:
            raise ValueError(
                f"model: {name!r} and {alias!r} are two parameters in the same memory; their norm would be "
                "counted wrongly; tie them as one nn.Parameter"
            )


def wrong_rows(name: str, found: int, rows: int) -> RuntimeError:
    """The error for a layer whose gradients cannot be told apart by example."""
    return RuntimeError(
        f"{name!r} has gradients for {found} examples where the batch has {rows}: every input of the layer must "
        "have the batch as its first dimension (position_ids of a transformer too), and the collate function "
        "must keep one row for each example"
    )
