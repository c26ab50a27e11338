"""Losses of a whole batch that do not simply add up the examples: one bad example then changes all gradients.

`torch.nan_to_num(loss)`, `loss.clamp(max=10)`, `(loss - b).abs() + b` and the like may do nothing to the examples of a
rehearsal, so nothing that is measured there shows them. Autograd's graph does: between the loss and where there is a
row for each example, only linear operations are right, and those of one example alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_LINEAR = (
    "AccumulateGrad", "Add", "Alias", "AsStrided", "Cat", "Clone", "Copy", "Cumsum", "Div", "Dot", "Expand", "Mean",
    "Mul", "Mv", "Neg", "Permute", "Repeat", "Reshape", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose",
    "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_PICKS = ("Gather", "Index", "MaskedSelect", "Narrow", "Select", "Slice", "Split", "TakeAlongDim", "Unbind")


class Guards:
    """Sees the losses whose backward pass begins, until `end`."""

    def __init__(self) -> None:
        self._usual = torch.autograd.backward
        self._losses: list[Any] = []
        torch.autograd.backward = self._backward

    def _backward(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                self._losses.append(tensor.grad_fn)
        return self._usual(tensors, *rest, **named)

    def end(self) -> None:
        torch.autograd.backward = self._usual

    def problem(self, rows: int) -> str | None:
        """What is wrong with the losses, which were of so many examples; they are forgotten."""
        losses, self._losses = self._losses, []
        for loss in losses if rows > 1 else ():
            if name := next(_not_linear(loss, rows), None):
                return (
                    f"self-test: the loss of the whole batch goes through {name}, so a single example can change the "
                    'gradients of all others; apply it to each example\'s own loss (reduction="none"), or leave it '
                    "out: an example whose gradient is not finite counts nothing"
                )
        return None


def _not_linear(loss: Any, rows: int) -> Any:
    """The names of operations on numbers of the whole batch that are not linear in them.

    A function of the user's own is opaque, and passed by.
    """
    for node in _without_rows(loss, rows):
        name = _name(node)
        if isinstance(node, BackwardCFunction) or name in _LINEAR or name in _PICKS:
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        a_loss = "Loss" in name or name.startswith("BinaryCrossEntropy")
        if a_loss and any(_has_rows(each, rows) for each in before):
            continue  # a sum or a mean over the examples
        if _of_several(node, rows):
            yield name


def _of_several(node: Any, rows: int) -> bool:
    """Whether rows enter here other than one by one, as an index picks them."""
    for each in _without_rows(node, rows):
        for before, _ in each.next_functions:
            leaf = before is None or _name(before) == "AccumulateGrad"
            if not leaf and _has_rows(before, rows) and _name(each) not in _PICKS:
                return True
    return False


def _without_rows(begin: Any, rows: int) -> Any:
    """The nodes from here on, up to those that have a row for each example."""
    seen, rest = set(), [begin]
    while rest:
        node = rest.pop()
        if node is None or node in seen or _has_rows(node, rows):
            continue
        seen.add(node)
        yield node
        rest.extend(each for each, _ in node.next_functions)


def _has_rows(node: Any, rows: int) -> bool:
    """Whether some dimension is the batch; tokens of all examples may have become one row."""
    sizes = (size for each in node._input_metadata for size in each.shape)
    return any(not isinstance(size, int) or (size and size % rows == 0) for size in sizes)


def _name(node: Any) -> str:
    return node.name().removeprefix("torch::autograd::").split("Backward")[0]
