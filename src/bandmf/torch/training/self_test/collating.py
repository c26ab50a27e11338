"""Collate functions that draw random numbers, so that an example alone is not what it is in a batch."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

AT_RANDOM = (
    "self-test: the collate function draws random numbers (masks of tokens, say), others for an example alone than in "
    "a batch, so the two cannot be compared; draw them in the data set's __getitem__, where they are of that example "
    "alone, or make sure by hand that the collate function mixes no examples (as mixup does) and give make_private "
    "self_test=False"
)


class Collating:
    """A collate function that is watched: `random` says whether it was seen to draw random numbers.

    It draws from the generators of torch, NumPy or Python, or it has one of its own: then it gives something else when
    it is given the same again.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self.random = False
        self._seen: tuple[int, Any] | None = None  # a batch of one, by the identity of its example

    def __call__(self, examples: list[Any]) -> Any:
        before = _states()
        data = self._collate(examples)
        self.random = self.random or before != _states() or self._differs(examples, data)
        return data

    def _differs(self, examples: list[Any], data: Any) -> bool:
        """Whether the same example alone has given something else before; the self-test begins with one of it twice."""
        if len(examples) != 1:
            return False
        known = self._seen
        self._seen = id(examples[0]), _copied(data)
        return known is not None and known[0] == id(examples[0]) and not _same(known[1], data)


def _states() -> tuple[bytes, ...]:
    """How far the global generators have come."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), pickle.dumps(of_python), pickle.dumps(of_numpy)


def _copied(data: Any) -> Any:
    """The tensors of a batch, which the loop may change."""
    if isinstance(data, Tensor):
        return data.clone()
    if isinstance(data, Mapping):
        return {name: _copied(value) for name, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list | tuple) else None


def _same(before: Any, now: Any) -> bool:
    """Whether all tensors are equal; NaN equals NaN."""
    if isinstance(now, Tensor):
        if now.layout is not torch.strided or now.is_nested:
            return True
        return before.shape == now.shape and bool(
            ((before == now) | ((before != before) & (now != now))).all()
        )
    if isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_same(before[name], now[name]) for name in now)
    if isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    return True
