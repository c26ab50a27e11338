"""Examples at half their size: beside whole ones and among themselves, they show what depends on a batch's range.

Pictures that all have the same largest value hide a division by the batch's; activations that all have the same range
hide one scale for the whole batch. Halves stay where the data are, between 0 and 1 say, as models and losses may check.
Whole numbers stay as they are, as they may count, choose or mark something, and so do single numbers (a rating, say, of
which others make a class), probabilities and vectors of length one.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bandmf.torch.training.self_test.quiet import Hook

_DEEPEST = 4  # objects inside of each other
_IS_IT = (
    "this batch is a rehearsal of make_private's self-test, with examples at half their size: if the error is about "
    "values that are not in your data, iterate private.loader once more, which leaves such examples out, or make sure "
    "by hand that nothing is scaled by the largest value of a batch and give make_private self_test=False"
)


class Members:
    """The chosen examples, and after them the same at half their size, as long as the data bear it."""

    def __init__(self, examples: Sequence[Any], with_halves: bool) -> None:
        self._whole, self.with_halves = list(examples), with_halves
        self._halves = [halved(each) if with_halves else each for each in self._whole]

    def collated(self, members: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        """A batch of them. A collate function that does not take halves is given whole ones in their place."""
        every = [*self._whole, *self._halves]
        try:
            return collate([every[member] for member in members])
        except Exception as error:
            if not self.with_halves or max(members) < len(self._whole):
                raise
            self._halves, self.with_halves = self._whole, False
            data = self.collated(members, collate)
            warn_without(f"the collate function fails on them ({type(error).__name__}: {error})")
            return data


def warn_without(reason: str) -> None:
    warnings.warn(
        f"self-test: no examples at half their size are rehearsed, since {reason}; make sure by hand that nothing is "
        "scaled by the largest value of a batch",
        stacklevel=2,
    )


def explain_errors(model: nn.Module, at_half: Callable[[], bool]) -> Callable[[], None]:
    """Errors of the model say that the data were halved, where they were; ends by calling what is returned."""

    def explain(*_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and at_half() and _IS_IT not in getattr(error, "__notes__", ()):
            error.add_note(_IS_IT)

    return model.register_forward_hook(Hook(explain), always_call=True).remove


def halved(example: Any) -> Any:
    """A copy with all of its tensors, arrays and lists of numbers halved that are not whole.

    >>> halved((torch.tensor([0.5, 1.0]), 7, 3.5, [2.0, 4.5]))
    (tensor([0.2500, 0.5000]), 7, 3.5, [1.0, 2.25])
    """
    return _halved(example, _DEEPEST)


def _halved(value: Any, depth: int) -> Any:
    return pytree.tree_map(lambda leaf: _half(leaf, depth), value, is_leaf=_numbers)


def _half(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value if _stays(value) else value / 2
    if _numbers(value):  # boxes and probabilities are lists too: each stays one
        return value if _stays(np.asarray(value)) else (np.asarray(value) / 2).tolist()
    if isinstance(value, dict) and depth:  # of a class of its own
        return _with_parts(value, dict(value), depth, dict.__setitem__)
    if (parts := attributes(value)) and depth:
        return _with_parts(value, parts, depth, object.__setattr__)
    return value


def _with_parts(value: Any, parts: dict[str, Any], depth: int, put: Callable[[Any, str, Any], None]) -> Any:
    """A copy of an object whose parts are halved; itself where that changes nothing, or cannot be done."""
    halves = {name: _halved(part, depth - 1) for name, part in parts.items()}
    if not any(_differs(part, halves[name]) for name, part in parts.items()):
        return value
    try:
        twin = copy.copy(value)
        for name, half in halves.items() if twin is not value else ():
            put(twin, name, half)
    except Exception:  # whatever somebody's own class says to that
        return value
    return twin


def _differs(part: Any, half: Any) -> bool:
    before, after = (pytree.tree_leaves(each, is_leaf=_numbers) for each in (part, half))
    return any(a is not b for a, b in zip(before, after, strict=True))


def attributes(value: Any) -> dict[str, Any]:
    """Of an example that is an object of somebody's own class: a dataclass, a UserDict, a namespace."""
    if isinstance(value, Tensor | np.ndarray | nn.Module | type) or callable(value):
        return {}
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    return dict(getattr(value, "__dict__", {}))


def _numbers(value: Any) -> bool:
    """Whether it is a list of numbers, or of equally long ones of such, which stands for an array."""
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(each, int | float) for each in value):
        return True
    return all(map(_numbers, value)) and len({np.shape(each) for each in value}) == 1


def _stays(value: Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether it is made of whole numbers, is a single one, or must have the size that it has."""
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_nested and value.is_floating_point()
        return not plain or value.element_size() < 2 or _stays(value.detach().double().cpu().numpy())
    if value.dtype.kind != "f" or value.ndim == 0:
        return True
    return bool((value == value.round()).all()) or _distribution(value) or _unit(value)


def _distribution(array: np.ndarray[Any, Any]) -> bool:
    """Whether its rows are probabilities that add up to one."""
    return bool((array >= 0).all()) and bool(np.allclose(array.sum(-1), 1, atol=1e-3))


def _unit(array: np.ndarray[Any, Any]) -> bool:
    """Whether its rows are vectors of length one."""
    return array.shape[-1] > 1 and bool(np.allclose(np.linalg.norm(array, axis=-1), 1, atol=1e-3))
