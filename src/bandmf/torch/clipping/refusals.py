"""Models that cannot be trained privately as they are: found by kind, before anything runs.

Guarantee: no layer that mixes the examples of a batch, or that keeps statistics of the data, is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.rnn import PackedSequence


class UnsupportedError(ValueError):
    """Book-keeping cannot describe a layer; another way of clipping may."""


def suspects(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that mix examples, now or in another mode."""
    kinds = (_BatchNorm, _InstanceNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def refuse_mixing(modules: dict[str, nn.Module]) -> None:
    """Refuse layers whose output for one example depends on the others, or that remember examples."""
    for path, module in modules.items():
        if reason := _mixes(module):
            raise ValueError(f"model: {path or 'it'} is {type(module).__name__}, {reason}")


def _mixes(module: Any) -> str | None:
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return (
            "which mixes the examples of a batch, trainable or not: one example would change the gradients of all; "
            "use nn.GroupNorm, or, to keep fixed statistics, call .eval() on this layer and never .train()"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "which keeps statistics of the data without noise; make it with track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (
            "whose max_norm rewrites the rows of tokens that occur, without noise; make it without max_norm"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return "whose scale_grad_by_freq divides by counts over the whole batch; make it without that"
    if isinstance(module, nn.RNNBase) and any(p.requires_grad for p in module.parameters()):
        kind = f"opacus.layers.DP{type(module).__name__}"
        return f"whose gradients of single examples torch does not give; use {kind}, or freeze it"
    return None


def refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters in the same memory are one, but would be counted as two. (One parameter in two places is fine.)"""
    homes: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel() or isinstance(parameter, DTensor):
            continue
        other, identity = homes.setdefault(parameter.data_ptr(), (name, id(parameter)))
        if identity != id(parameter):
            raise ValueError(
                f"model: {name!r} and {other!r} are two parameters in the same memory; their norm would be "
                "counted wrongly; tie them as one nn.Parameter"
            )


def refuse_packed(path: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Refuse packed sequences: their rows are sorted by length, and fewer at every place of the text."""
    if any(isinstance(given, PackedSequence) for given in (*args, *kwargs.values())):
        raise ValueError(
            f"model: {path!r} is given a PackedSequence, whose rows are in another order than those of the batch, so "
            "what one example contributes could not be told; give it the padded tensor, and mask what lies behind the "
            "end of a text (its last state is output[range(len(lengths)), lengths - 1])"
        )


def wrong_rows(name: str, found: int, rows: int) -> RuntimeError:
    """The error for a layer whose gradients cannot be told apart by example."""
    return RuntimeError(
        f"{name!r} has gradients for {found} examples where the batch has {rows}: every input of the layer must "
        "have the batch as its first dimension (position_ids of a transformer too), the collate function must keep "
        "one row for each example, and a layer that some examples need must be called with all, its output masked; if "
        "you cannot change that, freeze the layer"
    )


def used_elsewhere(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name!r} has a gradient from outside the layer that owns it, where single examples cannot be told apart; "
        "call the layer itself (not F.linear or @ with its weight), put a bare nn.Parameter into a module of its "
        "own, or freeze it with requires_grad_(False)"
    )


def late_backward() -> RuntimeError:
    return RuntimeError(
        "a backward pass went through a batch of an earlier step, whose examples would count once more; call "
        "loss.backward() before the optimizer.step() of the same batch"
    )
