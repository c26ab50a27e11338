"""Batches as collate functions make them: tensors in lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A batch whose tensors are changed, unless `change` gives None; containers are copied, all else is as it was."""
    if isinstance(value, Tensor):
        given = change(value)
        return value if given is None else given
    if isinstance(value, Mapping):
        items = {name: each_tensor(each, change) for name, each in value.items()}
        before, changed = (dict(value.items()), copy.copy(value))  # of its own class, which may have more than items
        changed.update(items)  # type: ignore[attr-defined]
        if all(value[name] is each for name, each in before.items()):
            return changed
        value.update(before)  # type: ignore[attr-defined]
        return items  # a copy would share them with the batch
    if isinstance(value, list | tuple):
        several = [each_tensor(each, change) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: each_tensor(getattr(value, f.name), change) for f in fields(value) if f.init}
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
    return each_tensor(batch, lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t)
