"""Which mode of clipping describes which layers, and which it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import is_parametrized

from bandmf.torch.clipping.check.layers import is_for_places, trains
from bandmf.torch.clipping.layers import layers_of
from bandmf.torch.clipping.recording import Layer
from bandmf.torch.clipping.refusals import Finding, UnfitError

_OTHER_WAY = "use clipping='auto'"
_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
Found = tuple[list[Finding], list[Finding]]  # problems and notes


def of_clipping(model: nn.Module, mode: str) -> Found:
    """What a mode cannot clip, and what it clips in another way than by a rule.

    "auto" is book-keeping where that describes all layers, else Opacus's hooks where they describe all; a model that
    neither describes has the problems of both.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return [], []  # which tells nothing of its layers, and is refused where it is trained
    if mode in ("hooks", "functorch"):
        return list(_by_hooks(model, mode)), list(_functional(model, mode))
    unfit, layers = _by_bookkeeping(model)
    if not unfit:
        return list(_containers(layers)), list(_without_rule(layers))
    if mode == "bookkeeping":
        return unfit, []
    refused = list(_by_hooks(model, "hooks", "repair the other problem, and book-keeping clips it"))
    if refused:
        known = {one.layer for one in unfit}
        return [*unfit, *(one for one in refused if one.layer not in known)], []
    each = [
        Finding(one.layer, f"{one.reason}: Opacus's hooks clip the whole model", one.remedy, one.is_parameter)
        for one in unfit
    ]
    return [], each


def _by_bookkeeping(model: nn.Module) -> tuple[list[Finding], list[Layer]]:
    """What keeps book-keeping from a model, and the layers that it would record."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    unfit = [_computed(path, module) for path, module in model.named_modules() if _computes(module)]
    try:
        return unfit, layers_of(model, names)[0]
    except UnfitError as error:
        return [error.finding, *unfit], []


def _computes(module: nn.Module) -> bool:
    """Whether it has parametrizations that are trained."""
    computed: Any = getattr(module, "parametrizations", None)
    return is_parametrized(module) and any(trains(several) for several in computed.values())


def _computed(path: str, module: Any) -> Finding:
    name, kind = next((name, type(several[0]).__name__) for name, several in module.parametrizations.items())
    return Finding(
        path,
        f"has a {name} that a parametrization ({kind.strip('_')}) computes for all examples at once",
        f"take it off with torch.nn.utils.parametrize.remove_parametrizations(layer, {name!r})",
    )


def _without_rule(layers: list[Layer]) -> Iterator[Finding]:
    for layer in layers:
        described = layer.rule is not None or layer.replacement is not None
        if not described and _has_forward(layer.module) and not is_for_places(layer.path, layer.module):
            yield Finding(
                layer.path,
                f"is {type(layer.module).__name__}, which has no rule: torch.func gives its gradients, at more cost",
                "it works as it is; bandmf.torch.clipping.rule registers a rule",
            )


def _containers(layers: list[Layer]) -> Iterator[Finding]:
    for layer in layers:
        if not _has_forward(layer.module):
            yield _container(layer.path, layer.module)


def _container(path: str, module: nn.Module) -> Finding:
    return Finding(
        path,
        f"is {type(module).__name__}, which has no forward: its parameters are used where nothing is recorded",
        "assign each nn.Parameter to the module whose forward uses it",
    )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _by_hooks(model: nn.Module, mode: str, remedy: str = _OTHER_WAY) -> Iterator[Finding]:
    """What Opacus's hooks cannot describe."""
    from bandmf.torch.clipping.old.hooks import DPRNNBase, hooked

    for path, module, by_rule in hooked(model, mode == "functorch"):
        kind = type(module).__name__
        if not _has_forward(module):
            yield _container(path, module)
        elif isinstance(module, nn.MultiheadAttention):
            yield Finding(
                path,
                f"is {kind}, which has three inputs and projections inside of one function: Opacus's hooks see "
                "neither",
                f"{remedy}, or use opacus.layers.DPMultiheadAttention",
            )
        elif not by_rule and not isinstance(module, DPRNNBase) and (drawing := _draws(module)):
            yield Finding(
                path,
                f"is {kind}, which Opacus has no rule for, and draws random numbers ({drawing}), which torch.func does "
                "not repeat for one example",
                remedy,
            )
        elif isinstance(module, _CELLS) or (isinstance(module, nn.EmbeddingBag) and mode == "functorch"):
            yield Finding(path, f"is {kind}, which Opacus's hooks cannot take one example at a time", remedy)
        elif isinstance(module, nn.Embedding) and module.sparse and mode == "functorch":
            yield Finding(path, f"is {kind} with sparse=True, which torch.func does not describe", remedy)
        elif _computes(module) and list(module.buffers()):
            yield _computed(path, module)
        elif buffers := [name for name, _ in module.named_buffers()]:
            yield Finding(
                path,
                f"is {kind}, which has trainable parameters and the buffer {buffers[0]!r}: Opacus's hooks refuse both "
                "together",
                remedy,
            )


def _draws(module: nn.Module) -> str | None:
    """The name of a part that draws random numbers in the mode that it is in."""
    for path, part in module.named_modules():
        rate = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0.0)
        draws = isinstance(part, _DropoutNd | nn.MultiheadAttention) and rate > 0
        if part.training and (draws or isinstance(part, nn.RReLU)):
            return path or type(part).__name__
    return None


def _functional(model: nn.Module, mode: str) -> Iterator[Finding]:
    from bandmf.torch.clipping.old.hooks import hooked

    for path, module, by_rule in hooked(model, mode == "functorch"):
        if not by_rule and mode == "hooks":
            yield Finding(
                path,
                f"is {type(module).__name__}, for which Opacus has no rule: torch.func gives its gradients, at more "
                "cost",
            )
