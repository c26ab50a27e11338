"""Examples at half their size: beside whole ones and among themselves, they show what depends on a batch's range.

Pictures that all have the same largest value hide a division by the batch's; activations that all have the same range
hide one scale for the whole batch. Halves stay where the data are, between 0 and 1 say, as models and losses may check;
whole numbers stay as they are, as they may count, choose or mark something, and so do probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def halved(example: Any) -> Any:
    """A copy with all of its tensors, arrays and numbers halved that are not whole.

    >>> halved((torch.tensor([0.5, 1.0]), 7, 3.0))
    (tensor([0.2500, 0.5000]), 7, 3.0)
    """
    return pytree.tree_map(lambda value: value if _whole(value) else value / 2, example)


def _whole(value: Any) -> bool:
    """Whether it is made of whole numbers, or of something else than numbers."""
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_nested and value.is_floating_point()
        return not plain or value.element_size() < 2 or _whole(value.detach().double().cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool((value == value.round()).all()) or _distribution(value)
    return not isinstance(value, float | np.floating) or value == np.round(value)


def _distribution(array: np.ndarray[Any, Any]) -> bool:
    """Whether its rows are probabilities that add up to one."""
    return array.ndim > 0 and bool((array >= 0).all()) and bool(np.allclose(array.sum(-1), 1, atol=1e-3))
