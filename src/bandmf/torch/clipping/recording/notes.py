"""The identity that hands over, in the backward pass, what a layer was given and the gradient of its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ANCHOR = torch.empty(0, requires_grad=True)  # gives outputs a backward pass where no input has one


class Note(torch.autograd.Function):
    """The identity, whose backward pass hands the saved tensors and the gradient over.

    An output whose memory is its own is given on as another tensor in that memory, and not as a view: operations in
    place may follow, and are counted, so that autograd refuses them where the layer needs its output once more.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, receive: Any, alone: bool, output: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.receive = receive
        return output.detach() if alone else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing does not give them a second time
        ctx.receive(saved, gradient)
        return None, None, None, gradient, *[None] * len(saved)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory it is: itself, unless it is a view."""
    base = tensor._base
    return tensor if base is None else base
