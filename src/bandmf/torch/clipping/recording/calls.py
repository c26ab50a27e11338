"""Which tensors a layer is given with a row for each example, and which once for all of them, as positions are.

A tensor may be as long as there are examples by chance, so lengths alone decide nothing. Before the first step the
losses are computed on two and on three copies of one example, and of another one: what always has a row for each copy
has rows of examples, and what stayed as it was belongs to all. Of anything else, nothing is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bandmf.randomness import generators
from bandmf.torch.clipping.containers import tensors_in

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer

OUTPUT = "output"  # a path, as those of arguments are
Seen = dict[tuple["Layer", str], list[tuple[tuple[int, ...], int]]]  # call by call: shape, and how many rows there were


def tensors_of(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """With what tells them apart: an argument may be None in one call and a tensor in another."""
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def argument(args: Any, kwargs: Any, place: int, name: str) -> tuple[Any, str]:
    """One argument of a call, and the path that tells it apart."""
    if len(args) > place:
        return args[place], pytree.keystr((pytree.SequenceKey(0), pytree.SequenceKey(place)))
    return kwargs.get(name), pytree.keystr((pytree.SequenceKey(1), pytree.MappingKey(name)))


class Calls:
    """What is known of the tensors that the calls of a layer are given."""

    def __init__(self) -> None:
        self._seen: Seen | None = None  # while the losses are computed to see
        self._pairs: list[Seen] = []  # what was seen with two and with three copies of an example
        self._known: dict[tuple[Layer, str, int], bool | None] = {}  # by the dimension as well
        self._drawing: set[Layer] = set()

    @property
    def is_looking(self) -> bool:
        return self._seen is not None

    def has_seen(self, layer: Layer, path: str) -> bool:
        """Whether the layer was called with two and with three copies."""
        calls = (seen.get((layer, path), []) for seen in self._pairs)
        return not self._failed and any(len({count for _, count in each}) > 1 for each in calls)

    @property
    def _failed(self) -> bool:
        return any(seen is _NOTHING for seen in self._pairs)

    def look(self, run: Callable[[], object], device: torch.device) -> None:
        """While the losses of copies are computed; where that fails, nothing is known."""
        self._seen, self._known = {}, {}
        try:
            with generators.lent(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                run()
            self._pairs.append(self._seen)
        except Exception:  # whatever a program says to copies
            self._pairs.append(_NOTHING)
        finally:
            self._seen = None

    def see(self, layer: Layer, args: Any, kwargs: Any, output: Any, count: int) -> None:
        """A call that is not recorded."""
        assert self._seen is not None
        outputs = [(OUTPUT, tensor) for tensor in tensors_in(output)][:1]
        for path, tensor in (*tensors_of(args, kwargs), *outputs):
            self._seen.setdefault((layer, path), []).append((tuple(tensor.shape), count))

    @contextmanager
    def drawing(self, layer: Layer) -> Iterator[None]:
        """Around such a call."""
        before = _drawn()
        yield
        if _drawn() != before:
            self._drawing.add(layer)

    def draws(self, layer: Layer) -> bool:
        """Whether the layer has drawn random numbers from a global generator, of whatever library."""
        return layer in self._drawing

    def has_rows(self, layer: Layer, path: str, dimension: int) -> bool | None:
        """Whether this dimension of a tensor counts the examples, or their rows, in every call; None: unknown."""
        key = layer, path, dimension
        if key not in self._known:
            pairs = self._lengths(layer, path, dimension)
            self._known[key] = _decided(pairs) if pairs and not self._failed else None
        return self._known[key]

    def grows(self, layer: Layer, path: str, dimension: int) -> bool:
        """Whether a dimension was another with three copies than with two."""
        return not self._failed and not all(map(_stays, self._lengths(layer, path, dimension)))

    def _lengths(self, layer: Layer, path: str, dimension: int) -> list[list[tuple[int, int]]]:
        """Pair by pair and call by call: that of a dimension, and how many rows there were."""
        pairs = [seen[layer, path] for seen in self._pairs if (layer, path) in seen]
        return [[(s[dimension] if len(s) > dimension else 0, count) for s, count in pair] for pair in pairs]


_NOTHING: Seen = {}


def _decided(pairs: list[list[tuple[int, int]]]) -> bool | None:
    """Where all lengths are 1 they tell nothing: a row may be repeated."""
    every = [each for pair in pairs for each in pair]
    if all(length == count for length, count in every) and len(set(every)) > 1:
        return True
    return False if all(map(_stays, pairs)) and any(length != 1 for length, _ in every) else None


def _stays(pair: list[tuple[int, int]]) -> bool:
    """Whether lengths, call by call, stay what they are while the number of rows does not."""
    by_count: dict[int, list[int]] = {}
    for length, count in pair:
        by_count.setdefault(count, []).append(length)
    first, *others = by_count.values()
    return bool(others) and all(each == first for each in others)


def _drawn() -> tuple[object, ...]:
    """How far the global generators of Python, NumPy and torch are."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()
