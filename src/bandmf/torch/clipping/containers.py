"""Batches as collate functions make them: tensors in lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def each_tensor(
    value: Any, change: Callable[[Tensor], Any], sequence: Callable[[Sequence[Any]], Any] = lambda _: None
) -> Any:
    """A batch whose tensors are changed, unless `change` gives None, and lists for which `sequence` gives others.

    Containers are copied, all else is as it was.
    """
    if isinstance(value, Tensor):
        given = change(value)
        return value if given is None else given
    if isinstance(value, Mapping):
        changed = copy.copy(value)  # of its own class, which may have more than items
        for name, each in value.items():
            changed[name] = each_tensor(each, change, sequence)  # type: ignore[index]
        return changed
    if isinstance(value, list | tuple):
        if (other := sequence(value)) is not None:
            return other
        several = [each_tensor(each, change, sequence) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    if is_dataclass(value) and not isinstance(value, type):
        held = {
            f.name: each_tensor(getattr(value, f.name), change, sequence) for f in fields(value) if f.init
        }
        return replace(value, **held)
    return value


def differentiable(batch: Any) -> Any:
    """With floating tensors that require gradients, by which all that is computed from examples is known."""
    return each_tensor(batch, lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t)


def with_one_more(batch: Any, examples: int) -> Any:
    """With the last example twice."""

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[-1:]]) if _has_rows(tensor, examples) else tensor

    def sequence(value: Sequence[Any]) -> Any:
        if len(value) != examples or any(_has_rows(each, examples) for each in value):
            return None
        more = [*value, value[-1]]
        if type(value) is tuple:
            return tuple(more)
        return more if type(value) is list else None

    return each_tensor(batch, longer, sequence)


def _has_rows(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == examples
