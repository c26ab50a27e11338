"""Examples that lie outside of the others' range: they show what depends on the largest value of a batch.

Pictures that all have the same largest value hide a division by the batch's; activations that all have the same range
hide one scale for the whole batch. So examples are rehearsed at half their size too, beside whole ones and not; and
one row of a batch enters the model a thousand times as large. Halves stay where the data are, between 0 and 1 say, as
losses may check; what is only larger in the model cannot break a target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HUGE = 1e3


def halved(example: Any) -> Any:
    """A copy with all of its numbers halved that are not whole numbers, and bytes.

    >>> halved((torch.ones(2), 7, 0.5))
    (tensor([0.5000, 0.5000]), 7, 0.25)
    """
    return pytree.tree_map(_half, example)


def _half(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return value // 2 if value.dtype is torch.uint8 else value / 2 if value.is_floating_point() else value
    if isinstance(value, np.ndarray):
        return value // 2 if value.dtype == np.uint8 else value / 2 if value.dtype.kind == "f" else value
    return value / 2 if isinstance(value, float | np.floating) else value


def enlarge(model: nn.Module, row: int, rows: int) -> Any:
    """From now on this row of what the model is given is huge; returns a handle by which to end it."""

    def larger(value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or value.layout is not torch.strided
        ):
            return value
        if (
            value.is_nested or value.ndim < 2 or len(value) != rows
        ):  # one number for each example may be an index
            return value
        factors = torch.ones(rows, device=value.device, dtype=value.dtype)
        factors[row] = HUGE
        return value * factors.reshape(-1, *[1] * (value.ndim - 1))

    def before(_module: nn.Module, given: Any, named: Any) -> Any:
        return pytree.tree_map(larger, given), pytree.tree_map(larger, named)

    return model.register_forward_pre_hook(before, with_kwargs=True)
