"""What one example may contribute: its gradient, clipped to the clip norm, added up into one sum per parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bandmf import _check
from bandmf._deprecated import warn
from bandmf.torch.clipping.bookkeeping import Bookkeeping
from bandmf.torch.clipping.contributions import Outer, Rows
from bandmf.torch.clipping.protocol import Clipping, Parameters
from bandmf.torch.clipping.refusals import refuse_mixing, refuse_shared_memory, suspects
from bandmf.torch.clipping.rules import rule, total
from bandmf.torch.clipping.vmapped import Vmapped

__all__ = ["Bookkeeping", "Clipping", "Outer", "Parameters", "Rows", "make_clipping", "rule", "total"]

MODES = ("auto", "bookkeeping", "vmap", "hooks", "functorch")


def checked_mode(mode: str) -> str:
    """One of MODES; of an old name, with a warning for who called the function that calls this one."""
    if mode == "ghost":
        warn("clipping='ghost'", "clipping='bookkeeping'", depth=4)
        return "bookkeeping"
    return _check.choice("clipping", mode, MODES)


def make_clipping(
    mode: str, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool
) -> Clipping:
    """The clipping for a mode; "auto" is book-keeping."""
    mode = checked_mode(mode)
    refuse_mixing(suspects(model))
    refuse_shared_memory(model)
    if mode == "vmap":
        return Vmapped(model, parameters, clip_norm, per_layer)
    return Both(model, parameters, clip_norm, per_layer, mode)


class Both(Bookkeeping):
    """Until make_private is gone: the old methods too."""

    _old: Any = None

    def __init__(self, model: Any, parameters: Any, clip_norm: Any, per_layer: Any, mode: str) -> None:
        from bandmf.torch.clipping import old

        self._make_old = lambda: old.make_clipping(mode, model, parameters, clip_norm, per_layer)
        if mode in ("hooks", "functorch"):
            self._old = self._make_old()
        else:
            super().__init__(model, parameters, clip_norm, per_layer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_parameters", "_make_old"):
            raise AttributeError(name)
        if self._old is None:
            self._old = self._make_old()
        return getattr(self._old, name)

    def add_to(self, sums: Any, losses: Any, batch: Any, examples: Any, valid: Any = None) -> Tensor:
        if callable(losses):
            return super().add_to(sums, losses, batch, examples, valid)
        return self._old.add_to(sums, losses, batch, examples)
