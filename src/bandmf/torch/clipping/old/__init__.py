"""What one example may contribute: its gradient, clipped to the clip norm, added up into one sum per parameter."""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.tensor import DTensor

from bandmf import _check
from bandmf._deprecated import warn
from bandmf.torch.clipping.contributions import Outer, Rows
from bandmf.torch.clipping.old.bookkeeping import Bookkeeping
from bandmf.torch.clipping.protocol import Clipping, Parameters
from bandmf.torch.clipping.refusals import UnsupportedError, refuse_mixing, refuse_shared_memory, suspects
from bandmf.torch.clipping.rules import rule, total

__all__ = ["Bookkeeping", "Clipping", "Outer", "Parameters", "Rows", "make_clipping", "rule", "total"]

MODES = ("auto", "bookkeeping", "hooks", "functorch")


def checked_mode(mode: str) -> str:
    """One of MODES; of an old name, with a warning for who called the function that calls this one."""
    if mode == "ghost":
        warn("clipping='ghost'", "clipping='bookkeeping'", depth=4)
        return "bookkeeping"
    return _check.choice("clipping", mode, MODES)


def make_clipping(
    mode: str, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool
) -> Clipping:
    """The clipping for a mode. "auto" is book-keeping, and Opacus's hooks where a layer cannot be described."""
    mode = checked_mode(mode)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    if sharded and mode in ("hooks", "functorch"):
        raise _check.fail(
            "clipping", mode, "with FSDP2 must be 'bookkeeping': Opacus cannot clip shards in this way"
        )
    refuse_mixing(suspects(model))
    refuse_shared_memory(model)
    if mode in ("hooks", "functorch"):
        return by_hooks(model, parameters, clip_norm, per_layer, mode == "functorch")

    def otherwise(reason: Exception) -> Clipping:
        try:
            clipping = by_hooks(model, parameters, clip_norm, per_layer, instead=reason)
        except UnsupportedError as error:
            text = f"{reason}, or freeze that layer; Opacus's hooks do not describe the model either"
            raise UnsupportedError(text) from error
        warnings.warn(f"clipping='auto': Opacus's hooks clip this model, since {reason}", stacklevel=2)
        return clipping

    may_change = mode == "auto" and not sharded
    try:
        return Bookkeeping(model, parameters, clip_norm, per_layer, otherwise if may_change else None)
    except UnsupportedError as reason:
        if not may_change:
            raise
        return otherwise(reason)


def by_hooks(
    model: nn.Module,
    parameters: Parameters,
    clip_norm: float,
    per_layer: bool,
    functorch: bool = False,
    instead: Exception | None = None,
) -> Clipping:
    """Clipping through Opacus, which is imported only here; `instead` says why it is not book-keeping."""
    from bandmf.torch.clipping.old.hooks import PerExample

    return PerExample(model, parameters, clip_norm, per_layer, functorch, instead)
