"""What training asks of a way of clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

Parameters = dict[str, nn.Parameter]


class Clipping(Protocol):
    """Clips the gradients of the examples of a batch and adds them up.

    `record(rows)` comes before the forward pass of a batch of so many examples (None: it is not to be clipped);
    after the backward pass `add_to` adds the clipped gradients of the first `valid` examples to the sums.
    """

    # What takes over, given the reason, where a layer turns out not to be described; None if nothing may.
    otherwise: Callable[[Exception], Clipping] | None

    @property
    def half_precision(self) -> set[torch.dtype]:
        """The types of less than float32 in which gradients were found, or layers were run by autocast."""

    def explain(self) -> str: ...
    def record(self, rows: int | None) -> None: ...
    def add_to(self, sums: dict[str, Tensor], rows: int, valid: int, scale: float) -> Tensor:
        """`scale` times what autograd found is the gradient of an example; returns how many were not finite."""

    def norms(self, rows: int, scale: float) -> dict[str, Tensor]:
        """Of the gradient of each parameter, for every example, as clipping sees them. For the self-test."""

    def add_example(self, sums: dict[str, Tensor], rows: int, number: int, scale: float) -> Tensor:
        """Add the gradient of one example, unclipped; returns its norm, as clipping sees it. For the self-test."""

    def clear(self) -> None:
        """Drop the gradients of the batch at hand, as `zero_grad` does; sums are kept."""

    def remove(self) -> None: ...


def clip_limit(clip_norm: float, parameters: Parameters, per_layer: bool) -> float:
    """Per layer, each parameter has an equal share; the norms of all add up to clip_norm in squares."""
    return clip_norm / math.sqrt(len(parameters)) if per_layer else clip_norm


def clip_factors(norms: Tensor, limit: float, counted: Tensor) -> Tensor:
    """What the gradients of these norms are multiplied by: at most limit / norm, and zero where not counted."""
    shrunk = limit * (1 - 4 * torch.finfo(norms.dtype).eps)  # for the rounding of this very division
    return torch.where(counted, (shrunk / norms).clamp(max=1.0), 0.0)
