"""What a mode of clipping cannot describe, and what it describes in another way than by a rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bandmf.torch.clipping.check.layers import trains
from bandmf.torch.clipping.recording.layers import layers_of
from bandmf.torch.clipping.recording.recorder import Bare, Layer
from bandmf.torch.clipping.refusals import Finding, UnfitError

Found = tuple[list[Finding], list[Finding]]  # problems and notes


def of_clipping(model: nn.Module, mode: str) -> Found:
    """Problems and notes of a mode."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return [], []  # which tells nothing of its layers, and is refused where it is trained
    if mode == "one-by-one":
        return [], []
    if mode == "vmap":
        return list(_not_vectorized(model)), []
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    try:
        layers, bare = layers_of(model, names)
    except UnfitError as error:
        return [error.finding], []
    return [], [*_without_rule(layers), *_without_layer(bare)]


def _not_vectorized(model: nn.Module) -> Iterator[Finding]:
    """What torch.func does not map, as far as its kind shows it."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        yield Finding("", "is sharded by FSDP2", "use clipping='auto'")
    for path, module in model.named_modules():
        if isinstance(module, nn.GRU | nn.RNN | nn.RNNCellBase):
            what = "whose states are changed in place"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and trains(module):
            what = "whose gradient is sparse"
        else:
            continue
        yield Finding(
            path, f"is {type(module).__name__}, {what}: torch.func cannot vectorize it", "use clipping='auto'"
        )


def _without_rule(layers: list[Layer]) -> Iterator[Finding]:
    for layer in layers:
        if layer.by_function:
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
