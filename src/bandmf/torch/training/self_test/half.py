"""Types of less than float32: which a model has, and which gradients pass through on their way to what is trained.

A mean loss divides by the number of examples, so gradients are rounded, or vanish, by that number wherever they pass
through such a type: in layers that are trained, and in frozen ones behind them. A frozen layer in front of all that is
trained has no gradients, but it rounds what the others are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

Types = set[torch.dtype]
_OPEN = (
    "bandmf.",
    "torch.nn.modules._functions",
)  # where functions are layers of ours, or torch's hooks of a layer


def is_half(kind: torch.dtype) -> bool:
    return (kind.is_floating_point or kind.is_complex) and torch.finfo(kind).bits < 32


class HalfPrecision:
    """What is known of a model: what its tensors are, and, after rehearsals, what gradients passed through."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.of_model: Types = {tensor.dtype for tensor in tensors if is_half(tensor.dtype)}
        self._passed: Types | None = None  # None: no graph was seen

    @property
    def passed(self) -> Types:
        """What gradients pass through; as long as no graph has shown it, all that the model has."""
        return self.of_model if self._passed is None else self._passed

    def look(self, nodes: list[Any]) -> None:
        """At the graph of a loss of a rehearsal."""
        known = self._passed or set()
        if any(map(_is_opaque, nodes)):
            known = known | self.of_model
        if nodes:
            kinds = {each.dtype for node in nodes for each in node._input_metadata}
            self._passed = known | {kind for kind in kinds if is_half(kind)}


def _is_opaque(node: Any) -> bool:
    """Whether it may hide other operations: a function of somebody's own, a compiled one, a reentrant checkpoint."""
    if not isinstance(node, BackwardCFunction):
        return False
    return not type(node)._forward_cls.__module__.startswith(_OPEN)  # type: ignore[attr-defined]
