"""What a mode of clipping cannot describe, and what it describes in another way than by a rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bandmf.torch.clipping.layers import layers_of
from bandmf.torch.clipping.recording import Bare, Layer
from bandmf.torch.clipping.refusals import Finding, UnfitError

Found = tuple[list[Finding], list[Finding]]  # problems and notes


def of_clipping(model: nn.Module, mode: str) -> Found:
    """Problems and notes of a mode."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return [], []  # which tells nothing of its layers, and is refused where it is trained
    if mode == "vmap":
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return [Finding("", "is sharded by FSDP2", "use clipping='auto'")] if sharded else [], []
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    try:
        layers, bare = layers_of(model, names)
    except UnfitError as error:
        return [error.finding], []
    return [], [*_without_rule(layers), *_without_layer(bare)]


def _without_rule(layers: list[Layer]) -> Iterator[Finding]:
    for layer in layers:
        if layer.rule is None and layer.replacement is None:
            yield Finding(
                layer.path,
                f"is {type(layer.module).__name__}, which has no rule: torch.func gives its gradients, at more cost",
                "it works as it is; bandmf.torch.clipping.rule registers a rule",
            )


def _without_layer(bare: list[Bare]) -> Iterator[Finding]:
    for owner in bare:
        for name in owner.names.values():
            yield Finding(
                name,
                "is a parameter without a layer: it is followed through the operations that use it",
                "it works as it is, where those are sums, products and the like",
                is_parameter=True,
            )
