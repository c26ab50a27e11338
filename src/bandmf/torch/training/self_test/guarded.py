"""Losses of a whole batch that do not simply add up the examples: one bad example then changes all gradients.

`torch.nan_to_num(loss)`, `loss.clamp(max=10)`, `(loss - b).abs() + b` and the like may do nothing to the examples of a
rehearsal, so nothing that is measured there shows them. Autograd's graph does: of what has no row for each example,
only linear operations are right, and those of one example alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_LINEAR = (
    "AccumulateGrad", "Add", "Addcmul", "Addmm", "Addmv", "Alias", "AsStrided", "Baddbmm", "Bmm", "Cat",
    "Clone", "ConstantPadNd", "Copy", "CopySlices", "Cumsum", "Diagonal", "Div", "Dot", "Expand", "Flip",
    "IndexAdd", "Lerp", "Mean", "Mm", "Mul", "Mv", "Neg", "Permute", "Repeat", "Reshape", "ReshapeAlias",
    "Roll", "Rsub", "ScatterAdd", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Trace", "Transpose",
    "UnsafeView", "Unsqueeze", "Vdot", "View",
)  # fmt: skip
_ONE = ("Select", "Split", "SplitWithSizes", "Unbind", "UnsafeSplit")  # picks of one row
_SOME = ("Gather", "Index", "IndexSelect", "MaskedSelect", "Narrow", "Slice", "TakeAlongDim")  # of several

_SUMS = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Nansum")  # that add up examples, as losses do
_MOST = 64  # losses of a batch that are looked at


class Guards:
    """Sees the losses whose backward pass begins, until `end`."""

    _alive: ClassVar[list[Guards]] = []
    _usual = staticmethod(torch.autograd.backward)

    def __init__(self) -> None:
        self._losses: list[Any] = []
        Guards._alive.append(self)
        torch.autograd.backward = Guards._backward

    @staticmethod
    def _backward(tensors: Any, *rest: Any, **named: Any) -> Any:
        given = tensors if isinstance(tensors, Tensor) else tuple(tensors)
        for tensor in [given] if isinstance(given, Tensor) else given:
            for guards in Guards._alive if isinstance(tensor, Tensor) else ():
                if len(guards._losses) < _MOST:  # more than a loop has: the rest is somebody else's
                    guards._losses.append(tensor.grad_fn)
        return Guards._usual(given, *rest, **named)

    def end(self) -> None:
        if self in Guards._alive:
            Guards._alive.remove(self)
        if not Guards._alive:
            torch.autograd.backward = Guards._usual

    def problem(self, rows: int, at_least: int = 2) -> str | None:
        """What is wrong with the losses, which were of so many examples; they are forgotten."""
        losses, self._losses = self._losses, []
        for loss in losses if rows >= at_least else ():
            if name := next(_not_linear(loss, rows), None):
                return (
                    f"self-test: the loss of the whole batch goes through {name}, so a single example can change the "
                    'gradients of all others; apply it to each example\'s own loss (reduction="none"), or leave it '
                    "out: an example whose gradient is not finite counts nothing"
                )
        return None


def _not_linear(loss: Any, rows: int) -> Iterator[str]:
    """The names of operations on numbers of several examples together that are not linear in them.

    A function of the user's own is opaque, and passed by.
    """
    for node in _nodes(loss):
        name = _name(node)
        if _has_rows(node, rows) or isinstance(node, BackwardCFunction) or name in _LINEAR or name in _ONE:
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        if "Loss" in name or name in _SUMS:
            wrong = not any(_has_rows(each, rows) or _is_apart(each, rows) for each in before)
        elif name in _SOME:  # from numbers that have no rows any more
            wrong = not any(_has_rows(each, rows) for each in before)
        else:
            wrong = True
        if wrong and _of_several(node, rows):
            yield name


def _is_apart(node: Any, rows: int) -> bool:
    """Whether it is of chosen places of the examples, which a loss may add up."""
    return _name(node) in _SOME or _name(node) in _ONE or not _of_several(node, rows)


def _of_several(node: Any, rows: int) -> bool:
    """Whether rows enter here other than one by one, or as some places of them that are still apart."""
    apart = set(_sizes(node))
    seen, rest = set(), [node]
    while rest:
        each = rest.pop()
        seen.add(each)
        picked = _name(each) in _ONE or (_name(each) in _SOME and next(_sizes(each), 1) in {1, *apart})
        if picked and each is not node:
            continue
        for before, _ in each.next_functions:
            if before is None or before in seen or _name(before) == "AccumulateGrad":
                continue
            if _has_rows(before, rows):
                return True
            rest.append(before)
    return False


def _nodes(begin: Any) -> Iterator[Any]:
    """All nodes from here on."""
    seen, rest = set(), [begin]
    while rest:
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            rest.extend(each for each, _ in node.next_functions)


def _has_rows(node: Any, rows: int) -> bool:
    """Whether some dimension is the batch; tokens of all examples may have become one row."""
    return any(not isinstance(size, int) or (size and size % rows == 0) for size in _sizes(node))


def _sizes(node: Any) -> Iterator[Any]:
    return (size for each in node._input_metadata for size in each.shape)


def _name(node: Any) -> str:
    return node.name().removeprefix("torch::autograd::").split("Backward")[0]
