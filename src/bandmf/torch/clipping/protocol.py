"""What training asks of a way of clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Parameters = dict[str, nn.Parameter]
Copies = tuple[Any, int]  # a batch of copies of one example, and how many they are
Losses = Callable[[nn.Module, Any], Tensor]  # one loss for each example of a batch


class Clipping(Protocol):
    """Clips the gradients of the examples of a batch and adds them up."""

    is_slow: bool  # for these losses, as far as they were computed

    def explain(self) -> str: ...
    def learn(self, losses: Losses, batches: Callable[[], Sequence[tuple[Copies, Copies]]]) -> None:
        """Learn what it needs to know of layers, from fewer and more copies of examples; before all sums."""

    def add_to(self, sums: dict[str, Tensor], losses: Losses, batch: Any, examples: int, valid: int) -> Tensor:
        """Add the clipped gradients of the first `valid` of so many examples to the float32 sums.

        Returns, as a tensor of no dimensions, how many examples were not finite and count nothing.
        """


def checked_losses(losses: Any, examples: int) -> Tensor:
    """A vector with one loss for each example. Sizes of batches are secret: errors do not name them."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses: must return a tensor, not {type(losses).__name__}")
    if losses.ndim != 1 or len(losses) != examples:
        raise ValueError(
            "losses: must return a vector with one loss for each example of the batch, of shape (examples,), "
            f"not {'another number of them' if losses.ndim == 1 else f'a tensor of {losses.ndim} dimensions'}; "
            "take reduction='none', then squeeze(1), or the mean over all dimensions but the first"
        )
    if not losses.is_floating_point() or not losses.requires_grad:
        raise ValueError("losses: must be differentiable; leave torch.no_grad() and .detach() out")
    return losses


def clip_limit(clip_norm: float, parameters: Parameters, per_layer: bool) -> float:
    """Per layer, each parameter has an equal share; the norms of all add up to clip_norm in squares."""
    return clip_norm / math.sqrt(len(parameters)) if per_layer else clip_norm


def clip_factors(norms: Tensor, limit: float, counted: Tensor) -> Tensor:
    """What the gradients of these norms are multiplied by: at most limit / norm, and zero where not counted."""
    shrunk = limit * (1 - 4 * torch.finfo(norms.dtype).eps)  # for the rounding of this very division
    return torch.where(counted, (shrunk / norms).clamp(max=1.0), 0.0)
