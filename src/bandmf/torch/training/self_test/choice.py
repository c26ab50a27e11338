"""Which examples are rehearsed: those that differ, since equal ones hide how they depend on each other.

A mean over the tokens of a batch is a mean over its texts where all are equally long; class weights count nothing where
all labels are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bandmf.torch.training.self_test.extremes import attributes

Trait = tuple[Hashable, ...]
_DEEPEST = 6  # parts of parts of objects


def by_difference(examples: Sequence[Any]) -> list[int]:
    """The numbers of the examples, in turn the one that has most of what none before it has."""
    traits = [set(traits_of(example)) for example in examples]
    rest, order, seen = list(range(len(examples))), [], set[Trait]()
    while rest:
        newest = max(rest, key=lambda number: len(traits[number] - seen))
        rest.remove(newest)
        order.append(newest)
        seen |= traits[newest]
    return order


def traits_of(value: Any, *place: Hashable) -> Iterator[Trait]:
    """Shapes, labels, and how much of each row of whole numbers is padding.

    >>> list(traits_of((torch.zeros(3), 7)))
    [('length', 2), (0, 'shape', (3,)), (1, 'is', 7)]
    """
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from traits_of(each, *place, name)
    elif isinstance(value, tuple) or (isinstance(value, list) and not _numbers(value)):
        yield (*place, "length", len(value))
        for number, each in enumerate(value):
            yield from traits_of(each, *place, number)
    elif isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_floating_point() and not value.is_complex():
            yield from _of_array(value.cpu().numpy(), place)
        elif not value.is_nested:
            yield (*place, "shape", tuple(value.shape))
    elif isinstance(value, np.ndarray | list):
        yield from _of_array(np.asarray(value), place)
    elif isinstance(value, bool | int | np.integer):
        yield (*place, "is", int(value))
    elif isinstance(value, str | bytes):
        yield (*place, "length", len(value))
    elif isinstance(size := getattr(value, "size", None), tuple):  # an image
        yield (*place, "shape", size)
    elif len(place) < _DEEPEST:
        for name, each in attributes(value).items():
            yield from traits_of(each, *place, name)


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(each, bool | int | float) for each in values)


def _of_array(array: np.ndarray[Any, Any], place: tuple[Hashable, ...]) -> Iterator[Trait]:
    yield (*place, "shape", array.shape)
    if array.dtype.kind not in "biu" or not array.size:
        return
    if array.size == 1:
        yield (*place, "is", int(array.item()))
        return
    flat = array.ravel()
    yield (*place, "zeros", int((flat == 0).sum()))
    yield (*place, "below zero", int((flat < 0).sum()))  # labels that are not scored
    yield (*place, "at the end", _run(flat[::-1]))
    yield (*place, "at the start", _run(flat))


def _run(flat: np.ndarray[Any, Any]) -> int:
    """How many of the first numbers are equal."""
    others = np.flatnonzero(flat != flat[0])
    return int(others[0]) if len(others) else len(flat)
