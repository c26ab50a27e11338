"""Losses of a whole batch that are cut off: one bad example then takes the gradients of all others away.

`torch.nan_to_num(loss)`, `loss.clamp(max=10)` and the like do nothing to the examples of a rehearsal, so nothing that
is measured there shows them. Autograd's graph does, from the loss to where it first has a row for each example.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CUTS = ("Clamp", "NanToNum", "Where", "Maximum", "Minimum", "Relu", "Hardtanh", "Threshold", "MaskedFill")


class Guards:
    """Counts such operations in the losses whose backward pass begins, until `end`."""

    def __init__(self) -> None:
        self._usual = torch.autograd.backward
        self._counts: dict[str, int] = {}
        torch.autograd.backward = self._backward

    def _backward(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                for name in _cuts(tensor):
                    self._counts[name] = self._counts.get(name, 0) + 1
        return self._usual(tensors, *rest, **named)

    def end(self) -> None:
        torch.autograd.backward = self._usual

    def problem(self, rows: int) -> str | None:
        """What is wrong with the loss of so many examples; a loss that is cut off example by example is right."""
        for name, count in self._counts.items():
            if count < rows:
                return (
                    f"self-test: the loss of the whole batch goes through {name}, so an example with a large or "
                    "invalid loss takes the gradients of all others away; apply it to each example's own loss "
                    '(reduction="none"), or leave it out: an example whose gradient is not finite counts nothing'
                )
        return None


def _cuts(loss: Tensor) -> list[str]:
    """The operations on single numbers, from the loss on, that can cut off a gradient."""
    found, seen, rest = [], set(), [loss.grad_fn]
    while rest:
        node: Any = rest.pop()
        if node is None or node in seen or not _single(node):
            continue
        seen.add(node)
        before = [each for each, _ in node.next_functions]
        name = node.name().removeprefix("torch::autograd::")
        if name.startswith(_CUTS) and all(each is None or _single(each) for each in before):
            found.append(name.split("Backward")[0])
        rest.extend(before)
    return found


def _single(node: Any) -> bool:
    return all(size == 1 for each in node._input_metadata for size in each.shape)
