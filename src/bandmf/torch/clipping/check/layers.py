"""Layers that every mode of clipping refuses, or has something to say of, known by what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from bandmf.torch.clipping.refusals import Finding

_QUANTIZATION = "torch.ao.quantization"  # by name: to load it takes its time
_OBSERVERS = {"ObserverBase", "FakeQuantizeBase"}


def problems(model: nn.Module) -> Iterator[Finding]:
    """Layers that cannot be trained, whatever the mode: compiled by torch.jit, observed, spectral norms, hooks."""
    for path, module in model.named_modules():
        if found := _problem(module):
            yield Finding(path, *found)


def notes(model: nn.Module) -> Iterator[Finding]:
    """Layers that work, but not as their name says: fixed statistics, quantized weights, sparse gradients."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not module.training and module.running_mean is not None:
            yield Finding(
                path,
                f"is {type(module).__name__} in evaluation mode: its statistics stay as they are",
                "keep it so: model.train() switches it back, call .eval() on this layer after it",
            )
        elif _is_quantized(module):
            yield Finding(
                path,
                f"is {type(module).__name__}, a quantized layer: no gradients pass through it",
                "to train what comes before it, quantize after training",
            )
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and trains(module):
            yield Finding(
                path,
                "is sparse, but its private gradient is dense: every row gets noise",
                "use a dense optimizer, not SparseAdam",
            )


def trains(module: nn.Module) -> bool:
    """Whether any parameter of it is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _problem(module: nn.Module) -> tuple[str, str] | None:
    if isinstance(module, torch.jit.ScriptModule):
        if not trains(module):
            return None
        return "is compiled by torch.jit, so that nothing in it can be recorded", "use torch.compile instead"
    if _observes(module):
        return (
            f"is {type(module).__name__}, which keeps statistics of the data without noise",
            "train without it, and quantize afterwards",
        )
    if parametrize.is_parametrized(module):
        return _of_parametrizations(module)
    for hook in module._forward_pre_hooks.values():
        if found := _of_hook(module, hook):
            return found
    return None


def _of_parametrizations(module: Any) -> tuple[str, str] | None:
    """Spectral norms rewrite buffers; what others do depends on the mode of clipping."""
    for name, several in module.parametrizations.items():
        spectral = any(type(each).__name__ == "_SpectralNorm" for each in several)
        if spectral and (module.training or trains(module)):
            return _spectral(f"torch.nn.utils.parametrize.remove_parametrizations(layer, {name!r})")
    return None


def _of_hook(module: nn.Module, hook: Any) -> tuple[str, str] | None:
    """Torch's older way to compute a weight from others, before each call of its layer."""
    if isinstance(hook, SpectralNorm) and (module.training or trains(module)):
        return _spectral("torch.nn.utils.remove_spectral_norm(layer)")
    if not trains(module):
        return None
    if isinstance(hook, WeightNorm):
        return (
            "has a weight_norm, which computes its weight outside of the layer, for all examples at once",
            "use torch.nn.utils.parametrizations.weight_norm, or take it off with remove_weight_norm",
        )
    if isinstance(hook, prune.BasePruningMethod):
        return (
            "is pruned: its weight is computed outside of the layer, for all examples at once",
            f"make that permanent with torch.nn.utils.prune.remove(layer, {hook._tensor_name!r})",
        )
    return None


def _spectral(remove: str) -> tuple[str, str]:
    return (
        "has a spectral_norm, which rewrites its buffers whenever the model runs, and computes its weight for all "
        "examples at once",
        f"take it off with {remove}",
    )


def _is_quantized(module: nn.Module) -> bool:
    kind = type(module)
    inside = kind.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"))
    return inside and not kind.__name__.endswith("PackedParams")


def _observes(module: nn.Module) -> bool:
    """Whether it keeps statistics for a quantization to come."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(_QUANTIZATION)}
    enabled = getattr(module, "observer_enabled", None)
    return bool(names & _OBSERVERS) and bool(list(module.buffers())) and (enabled is None or bool(enabled))
