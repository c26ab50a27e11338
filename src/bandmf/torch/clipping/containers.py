"""Batches as collate functions make them: tensors in lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def exchanged(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch of which `change` gives parts anew; where it gives None, their parts. Containers are copied."""
    if (given := change(value)) is not None:
        return given
    if isinstance(value, MutableMapping):
        items = {name: exchanged(each, change) for name, each in value.items()}
        before, changed = (dict(value.items()), copy.copy(value))  # of its own class, which may have more than items
        changed.update(items)
        if all(value[name] is each for name, each in before.items()):
            return changed
        value.update(before)
        return items  # a copy would share them with the batch
    if isinstance(value, list | tuple):
        several = [exchanged(each, change) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: exchanged(getattr(value, f.name), change) for f in fields(value) if f.init}
        return replace(value, **held)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of a batch, or of what a layer gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def differentiable(batch: Any) -> Any:
    """With floating tensors that require gradients, by which all that is computed from examples is known."""

    def change(part: Any) -> Any:
        is_number = isinstance(part, Tensor) and part.is_floating_point()
        return part.detach().requires_grad_().clone() if is_number else None

    return exchanged(batch, change)


def to_device(batch: Any, device: torch.device) -> Any:
    """With everything that has a device on this one."""

    def change(part: Any) -> Any:
        return part.to(device) if hasattr(part, "to") and not isinstance(part, type) else None

    return exchanged(batch, change)
