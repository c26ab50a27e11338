"""Layers and uses of parameters that cannot be trained privately as they are, and the sentences that say so.

Guarantee: no layer of torch that is known to mix the examples of a batch, or to keep statistics of the data, is
accepted. What other modules do is for `verify` to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Finding:
    """What is to be said of a layer or a parameter, and what to do about it."""

    layer: str  # its name in the model; empty: the model itself
    reason: str  # what it is or does: "is LSTM, whose ..."
    remedy: str = ""
    is_parameter: bool = False

    def __str__(self) -> str:
        name = repr(self.layer) if self.is_parameter else self.layer or "it"
        return f"{name} {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


class UnsupportedError(ValueError):
    """This mode of clipping cannot describe a layer; another one may."""


class UnfitError(UnsupportedError):
    """The same, known before anything runs."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"model: {finding}")
        self.finding = finding


# --- layers that mix examples, or remember them -------------------------------------------------------------


def suspects(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that mix examples, now or in another mode."""
    kinds = (_BatchNorm, _InstanceNorm, nn.Embedding, nn.EmbeddingBag)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def refuse_mixing(modules: dict[str, nn.Module]) -> None:
    """Refuse layers whose output for one example depends on the others, or that remember examples."""
    for finding in mixing(modules):
        raise ValueError(f"model: {finding}")


def mixing(modules: dict[str, nn.Module]) -> Iterator[Finding]:
    """The layers that mix examples in the mode that they are in."""
    for path, module in modules.items():
        if found := _mixes(module):
            reason, remedy = found
            yield Finding(path, f"is {type(module).__name__}, {reason}", remedy)


def _mixes(module: Any) -> tuple[str, str] | None:
    """Why a layer mixes or remembers examples, and what to use instead; None if it does not."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return (
            "which mixes the examples of a batch, trainable or not: one example would change the gradients of all",
            "use nn.GroupNorm, or, to keep fixed statistics, call .eval() on this layer and never .train()",
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "which keeps statistics of the data without noise", "make it with track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return ("whose max_norm rewrites the rows of tokens that occur, without noise", "make it without max_norm")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return "whose scale_grad_by_freq divides by counts over the whole batch", "make it without that"
    return None


def not_by_function(error: Exception) -> UnsupportedError:
    """The error for a layer without a rule whose gradients torch.func does not give."""
    found = UnsupportedError(
        f"clipping: torch.func cannot give the gradients of single examples here ({error}); register a rule with "
        "bandmf.torch.clipping.rule, or use clipping='vmap'"
    )
    found.__cause__ = error
    return found


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters in the same memory."""
    for finding in shared_memory(model):
        raise ValueError(f"model: {finding}")


def shared_memory(model: nn.Module) -> Iterator[Finding]:
    """Two parameters in the same memory are one, but would be counted as two. (One parameter in two places is fine.)"""
    homes: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or isinstance(parameter, DTensor) or parameter.layout is not torch.strided:
            continue
        if not parameter.requires_grad or not parameter.numel():
            continue
        other, identity = homes.setdefault(parameter.data_ptr(), (name, id(parameter)))
        if identity != id(parameter):
            yield Finding(
                name,
                f"and {other!r} are two parameters in the same memory; their norm would be counted wrongly",
                "tie them as one nn.Parameter",
                is_parameter=True,
            )


# --- layers that a mode of clipping cannot describe -----------------------------------------------------------


def bare_parameter(name: str) -> Finding:
    """A parameter that the model itself owns, where no layer is called."""
    return Finding(
        name,
        "is a parameter of the model itself, which no layer describes",
        "with FSDP2, put it into a module of its own, whose forward uses it, or freeze it",
        is_parameter=True,
    )


def two_dimensions(path: str, other: str) -> Finding:
    """One module in two places, of which one has the examples first and the other second."""
    return Finding(
        path,
        f"is also {other!r}, and the two places have the examples in different dimensions",
        "use two modules that have the same parameters",
        is_parameter=True,
    )


def not_shared(name: str, what: str) -> RuntimeError:
    """The error for a parameter without a layer, in an operation whose rows nobody knows."""
    return RuntimeError(
        f"model: {name!r} {what}, where single examples cannot be told apart; move that operation into a module of its "
        "own, which is given the examples and the parameter, or use clipping='vmap'"
    )


def second_order(path: str) -> RuntimeError:
    """The error for a gradient of a gradient."""
    return RuntimeError(
        f"model: the losses differentiate a gradient through {path!r} (create_graph=True), which book-keeping "
        "does not record; use clipping='vmap'"
    )


def other_rows(path: str) -> RuntimeError:
    """The error for a layer whose rows are not the examples. Sizes of batches are secret: it has no numbers."""
    return RuntimeError(
        f"model: the layer {path!r} has other rows than one for each example; call it inside bandmf.torch.rows, which "
        "says whose they are (`with rows(owner):`, rows(each=k) or rows(parts=k)), or, if its first dimension is time, "
        "give it the examples first (batch_first=True, or transpose)"
    )


def unrecorded(name: str) -> RuntimeError:
    """The error for a gradient that bypassed the recorded layers."""
    return RuntimeError(
        f"{name!r} has a gradient from outside the layer that owns it, {_ALONE}: its value was used by itself "
        "(F.linear(x, layer.weight), x @ layer.weight, a penalty on weights in the losses); call the layer, tie "
        "weights as one nn.Parameter of two layers, let the optimizer's weight_decay make weights small, or use "
        "clipping='vmap'"
    )


# --- what happens in a batch ----------------------------------------------------------------------------------


def refuse_packed(path: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Refuse packed sequences: their rows are sorted by length, and fewer at every place of the text."""
    if any(isinstance(given, PackedSequence) for given in (*args, *kwargs.values())):
        raise ValueError(
            f"model: {path!r} is given a PackedSequence, whose rows are in another order than those of the batch, so "
            "what one example contributes could not be told; give it the padded tensor, and mask what lies behind the "
            "end of a text (its last state is output[range(len(lengths)), lengths - 1])"
        )


_ALONE = "where single examples cannot be told apart"
