"""What one example may contribute: its gradient, clipped to the clip norm, added up into one sum per parameter."""

from __future__ import annotations

from torch import nn

from bandmf import _check
from bandmf.torch.clipping.common import Clipping, Parameters, refuse_wrong_norms
from bandmf.torch.clipping.ghost import Ghost
from bandmf.torch.clipping.hooks import PerExample

__all__ = ["Clipping", "Ghost", "Parameters", "PerExample", "make_clipping"]


def make_clipping(
    mode: str,
    model: nn.Module,
    parameters: Parameters,
    clip_norm: float,
    per_layer: bool,
    loss_reduction: str,
    world: int | None,
) -> Clipping:
    """The clipping for a mode; `world` is the number of shards of an FSDP2 model, else None."""
    _check.choice("clipping", mode, ("hooks", "functorch", "ghost"))
    _check.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    if world is not None and mode != "ghost":
        raise _check.fail(
            "clipping", mode, "with FSDP2 must be 'ghost': Opacus has no other clipping of shards"
        )
    if per_layer and mode == "ghost":
        raise _check.fail(
            "per_layer", per_layer, "is not in Opacus's ghost clipping", "use clipping='hooks' or 'functorch'"
        )
    if loss_reduction == "sum" and mode == "ghost":
        raise _check.fail(
            "loss_reduction",
            loss_reduction,
            "has no meaning with clipping='ghost', which has one loss per example",
        )
    refuse_wrong_norms(mode, model)
    if mode == "ghost":
        return Ghost(model, parameters, clip_norm, world)
    return PerExample(model, parameters, clip_norm, per_layer, mode == "functorch", loss_reduction)
