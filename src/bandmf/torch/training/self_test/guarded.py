"""Losses of a whole batch that do not simply add up the examples: one bad example then changes all gradients.

`torch.nan_to_num(loss)`, `loss.clamp(max=10)`, `(loss - b).abs() + b` and the like may do nothing to the examples of a
rehearsal, so nothing that is measured there shows them. Autograd's graph does: where numbers of different examples
meet, and from there on, only linear operations are right. `whose` tells where that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from bandmf.torch.training.self_test.whose import MIXED, Operation, Owners, operations

_LINEAR = (
    "AccumulateGrad", "Add", "Addcmul", "Addmm", "Addmv", "Addr", "Alias", "AsStrided", "Baddbmm", "Bmm", "Cat",
    "Clone", "Conj", "ConstantPadNd", "Copy", "CopySlices", "Cumsum", "Diagonal", "DiagonalScatter", "Div", "Dot",
    "Expand", "FftC2C", "FftC2R", "FftR2C", "Flip", "Gather", "Imag", "IndexAdd", "IndexSelect", "Lerp", "Linear",
    "Mean", "Mm", "Mul", "Mv", "Neg", "Permute", "Real", "Repeat", "Reshape", "ReshapeAlias", "Roll", "Rsub",
    "ScatterAdd", "Select", "SelectScatter", "Slice", "SliceScatter", "Split", "SplitWithSizes", "Squeeze", "Stack",
    "Sub", "Sum", "T", "Take", "ToCopy", "Trace", "Transpose", "Tril", "Triu", "Unbind", "Unfold", "UnsafeSplit",
    "UnsafeView", "Unsqueeze", "Vdot", "View", "ViewAsComplex", "ViewAsReal",
)  # fmt: skip
_BY_PLACE = ("Index", "IndexPut")  # linear, unless the values themselves may say which: by a mask
_SUMS = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Nansum")  # that add up examples, as losses do
_MOST = 64  # losses of a batch that are looked at


class Guards:
    """Sees the losses whose backward pass begins, until `end`."""

    _alive: ClassVar[list[Guards]] = []
    _usual = staticmethod(torch.autograd.backward)

    def __init__(self, look: Callable[[list[Any]], None] = lambda nodes: None) -> None:
        """`look` is given the nodes of each graph."""
        self._also = look
        self._losses: dict[int, list[Operation | None]] = {}  # by the number of examples
        self.begin(1)
        Guards._alive.append(self)
        torch.autograd.backward = Guards._backward

    @staticmethod
    def _backward(tensors: Any, *rest: Any, **named: Any) -> Any:
        given = tensors if isinstance(tensors, Tensor) else tuple(tensors)
        for tensor in [given] if isinstance(given, Tensor) else given:
            for guards in Guards._alive if isinstance(tensor, Tensor) else ():
                guards._look(tensor)
        return Guards._usual(given, *rest, **named)

    def end(self) -> None:
        if self in Guards._alive:
            Guards._alive.remove(self)
        if not Guards._alive:
            torch.autograd.backward = Guards._usual

    def begin(self, rows: int) -> None:
        """Losses from now on are of so many examples."""
        self._rows = rows
        self._losses[rows] = []
        self._found: str | None = None

    def _look(self, loss: Tensor) -> None:
        number = len(self._losses[self._rows])
        if number >= _MOST:  # more than a loop has: the rest is somebody else's
            return
        graph = operations(loss.grad_fn) if loss.grad_fn is not None else []
        self._losses[self._rows].append(graph[-1] if graph else None)
        if graph and self._rows > 1:
            like = (losses[number] for losses in self._losses.values() if len(losses) > number)
            others = [each for each in like if each is not None and each is not graph[-1]]
            self._found = self._found or _not_linear(graph, Owners(graph, self._rows, others))
        self._also([each.node for each in graph])
        for each in graph:
            each.node = None  # and with it the tensors that it may keep

    def problem(self) -> str | None:
        """What is wrong with the losses of this batch."""
        if self._found is None:
            return None
        return (
            f"self-test: the loss of the whole batch goes through {self._found}, so a single example can change the "
            'gradients of all others; apply it to each example\'s own loss (reduction="none"), or leave it '
            "out: an example whose gradient is not finite counts nothing"
        )


def _not_linear(graph: list[Operation], owners: Owners) -> str | None:
    """The name of an operation on numbers of several examples together that is not linear in them.

    A function of the user's own is opaque, and passed by.
    """
    for each in reversed(graph):
        if each.name in _LINEAR or isinstance(each.node, BackwardCFunction):
            continue
        if MIXED in owners.given(each):
            wrong = each.name not in _BY_PLACE or _by_mask(each.node)
        else:
            wrong = MIXED in owners.come_out(each) and not ("Loss" in each.name or each.name in _SUMS)
        if wrong:
            return each.name
    return None


def _by_mask(node: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in node._saved_indices)
