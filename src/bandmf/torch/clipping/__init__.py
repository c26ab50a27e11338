"""What one example may contribute: its gradient, clipped to the clip norm, added up into one sum per parameter."""

from __future__ import annotations

from torch import nn

from bandmf import _check
from bandmf.torch.clipping.bookkeeping import Bookkeeping
from bandmf.torch.clipping.contributions import Outer, Rows
from bandmf.torch.clipping.one_by_one import OneByOne
from bandmf.torch.clipping.protocol import Clipping, Losses, Parameters
from bandmf.torch.clipping.refusals import refuse_mixing, refuse_shared_memory, suspects
from bandmf.torch.clipping.rules import rule, total
from bandmf.torch.clipping.vmapped import Vmapped

__all__ = ["Clipping", "Losses", "Outer", "Parameters", "Rows", "make_clipping", "rule", "total"]

KINDS: dict[str, type[Bookkeeping] | type[Vmapped] | type[OneByOne]] = {
    "auto": Bookkeeping, "bookkeeping": Bookkeeping, "vmap": Vmapped, "one-by-one": OneByOne,
}  # fmt: skip


def checked_mode(mode: str) -> str:
    """One of KINDS."""
    return _check.choice("clipping", mode, tuple(KINDS))


def make_clipping(mode: str, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool) -> Clipping:
    """The clipping for a mode; "auto" is book-keeping, where `verify` has not found that another one is needed."""
    kind = KINDS[checked_mode(mode)]
    refuse_mixing(suspects(model))
    refuse_shared_memory(model)
    return kind(model, parameters, clip_norm, per_layer)
