"""What there is to say of the parameters of a model, whatever layers they are of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bandmf.torch.clipping.refusals import Finding


def lazy(model: nn.Module) -> Iterator[str]:
    """The layers whose parameters have no shape yet."""
    for path, module in model.named_modules():
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            yield path


def problems(model: nn.Module) -> Iterator[Finding]:
    """Parameters that cannot be trained: without a shape, complex, sparse; or that there are none."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        yield Finding("", "has no trainable parameters", "set requires_grad_(True) on what is to be trained")
    for path in lazy(model):
        kind = type(model.get_submodule(path)).__name__
        yield Finding(
            path,
            f"is {kind}, whose parameters have no shape yet",
            "run the model once on a batch, then make its optimizer",
        )
    for name, parameter in trainable.items():
        if parameter.is_complex():
            yield Finding(
                name,
                "is complex; only real parameters can be trained",
                "freeze it, or train its real and imaginary parts",
                is_parameter=True,
            )
        elif parameter.layout is not torch.strided:
            yield Finding(
                name,
                f"is a sparse tensor ({parameter.layout}), to which noise cannot be added",
                "make it dense with .to_dense()",
                is_parameter=True,
            )


def notes(model: nn.Module) -> Iterator[Finding]:
    """Parameters that are tied, frozen or in low precision."""
    yield from _tied(model)
    yield from _frozen(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < 32:
            kind = str(parameter.dtype).removeprefix("torch.")
            yield Finding(name, f"is in {kind}: gradients are added up in float32", is_parameter=True)


def _tied(model: nn.Module) -> Iterator[Finding]:
    """Parameters that are in several places."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            places.setdefault(id(parameter), []).append(name)
    for first, *others in places.values():
        owner = first.rpartition(".")[0]
        elsewhere = [name for name in others if owner and not name.startswith(f"{owner}.")]
        if elsewhere:  # else it is one layer's own affair
            also = ", ".join(others)
            yield Finding(first, f"is also {also}: tied, and clipped by the norm of the sum", is_parameter=True)


def _frozen(model: nn.Module) -> Iterator[Finding]:
    """The largest modules of which nothing is trained, and single parameters beside trained ones."""
    everything = list(model.parameters())
    if not any(parameter.requires_grad for parameter in everything):
        return
    names = list(_topmost_frozen(model, ""))
    if names:
        count = sum(not parameter.requires_grad for parameter in everything)
        yield Finding(
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            f"{count} of {len(everything)} parameters do not require grad: they stay as they are",
        )


def _topmost_frozen(module: nn.Module, path: str) -> Iterator[str]:
    own = [parameter.requires_grad for parameter in module.parameters()]
    if not own or all(own):
        return
    if not any(own):
        yield path
        return
    prefix = f"{path}." if path else ""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            yield prefix + name
    for name, child in module.named_children():
        yield from _topmost_frozen(child, prefix + name)
