"""Finds training examples in data to evaluate on, under whatever name: a part, a copy, other columns.

Guarantee: data of which at least half are training examples are refused, where rows can be compared: they come out
alike each time, tell examples apart, and the training data are not so many that too few of the rows looked at would
meet. Data that share less than half of their rows with the training data are not refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bandmf import _check

_MOST_TRAINED, _MOST_EVALUATED = 2000, 400  # rows that are looked at
_FEWEST = 3  # rows that must be alike, where not all of both were looked at


class HeldOut:
    """Compares data to evaluate on with the training data."""

    def __init__(self, trained: Any) -> None:
        self._trained = trained
        self._passed: list[Any] = []  # data that were compared, and are held out

    def check(self, name: str, data: Any) -> None:
        """Fail if the data are training data."""
        if self._trained is None or data is None or any(data is each for each in self._passed):
            return
        if self._is_part(data) or self._shares_rows(data):
            raise _check.fail(
                name, type(data).__name__, "at least half of its rows are in train_dataset: a loss on private examples "
                "has no noise", "hold some examples out, without duplicates of others, and evaluate on them",
            )  # fmt: skip
        self._passed.append(data)

    def _is_part(self, data: Any) -> bool:
        while isinstance(data, torch.utils.data.Subset) and data is not self._trained:
            data = data.dataset
        return data is self._trained

    def _shares_rows(self, data: Any) -> bool:
        if not (_has_rows(data) and _has_rows(self._trained)):
            return False
        looked_at = _spread(len(data), _MOST_EVALUATED)
        trained = sorted({
            *_spread(len(self._trained), _MOST_TRAINED),
            *(index for index in looked_at if index < len(self._trained)),  # where a copy has the same row
        })  # fmt: skip
        columns = _columns(self._trained[0]) & _columns(data[0])
        known = [_digest(self._trained[index], columns) for index in trained]
        if len(set(known)) < len(known) / 2:
            return False  # rows that do not tell examples apart
        alike = sum(_digest(data[index], columns) in set(known) for index in looked_at)
        share = len(trained) / len(self._trained)
        return alike >= max(share * len(looked_at) / 2, _FEWEST if share < 1 else 1)


def _has_rows(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) > 0


def _spread(length: int, most: int) -> list[int]:
    """Places all over the data."""
    return sorted({int(index) for index in np.linspace(0, length - 1, min(length, most))})


def _columns(row: Any) -> frozenset[str]:
    return frozenset(row) if isinstance(row, Mapping) else frozenset()


def _digest(row: Any, columns: frozenset[str]) -> bytes:
    chosen = {name: row[name] for name in sorted(columns)} if isinstance(row, Mapping) else row
    return hashlib.sha256(repr(_plain(chosen)).encode()).digest()


def _plain(value: Any) -> Any:
    """The same for a tensor, an array and a list of the same numbers."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tobytes"):  # an image
        return value.tobytes()
    return value
