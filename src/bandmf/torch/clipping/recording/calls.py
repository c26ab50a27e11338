"""Which tensors a layer is given with a row for each example, and which once for all of them, as positions are.

A tensor may be as long as there are examples by chance, so lengths alone decide nothing. Before the first pass the
losses are computed once, without gradients, on one example more: what became longer with the examples has their rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bandmf.randomness import generators
from bandmf.torch.clipping.refusals import not_shared

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer

Shape = tuple[int, ...]


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


class Calls:
    """What is known of the tensors of each call, by its number in the pass."""

    def __init__(self) -> None:
        self._longer: dict[Layer, list[tuple[list[Shape], int]]] | None = None  # with one example more
        self._looking = False
        self._numbers: Counter[Layer] | None = None  # of calls so far; None in the backward pass
        self._known: dict[Layer, dict[tuple[int, int, int], bool]] = {}  # by call, tensor and dimension

    @property
    def looked(self) -> bool:
        return self._longer is not None

    def look(self, with_one_more: Callable[[], bool], devices: Sequence[torch.device]) -> None:
        """`with_one_more` computes the losses of one example more, and says whether that is what they are."""
        self._longer, self._looking = {}, True
        on_gpus = [device for device in devices if device.type == "cuda"]
        try:
            with torch.no_grad(), generators.lent(), torch.random.fork_rng(on_gpus):
                useful = with_one_more()
        except Exception:  # such a batch cannot be made longer: nothing is known
            useful = False
        self._looking = False
        if not useful:
            self._longer = {}

    def begin(self) -> None:
        """A pass begins."""
        self._numbers = Counter()

    def begin_backward(self) -> None:
        """Layers that are called from now on are computed again, in an order of their own."""
        self._numbers = None

    def see(self, layer: Layer, args: Any, kwargs: Any, count: int) -> None:
        """A call that is not recorded."""
        if self._looking:
            assert self._longer is not None
            shapes = [tuple(tensor.shape) for tensor in tensors_of(args, kwargs)]
            self._longer.setdefault(layer, []).append((shapes, count))
        elif self._numbers is not None:
            self._numbers[layer] += 1

    def has_rows(
        self, layer: Layer, tensors: Sequence[Tensor], count: int, dimension: int
    ) -> list[bool | None]:
        """Whether this dimension of each tensor of a call counts the examples, or their `count` rows; None: unknown."""
        number = None if self._numbers is None else self._numbers[layer]
        return [
            self._found(layer, number, place, tuple(tensor.shape), count, dimension)
            for place, tensor in enumerate(tensors)
        ]

    def count_call(self, layer: Layer) -> None:
        if self._numbers is not None:
            self._numbers[layer] += 1

    def _found(
        self, layer: Layer, number: int | None, place: int, shape: Shape, count: int, dimension: int
    ) -> bool | None:
        known = self._known.setdefault(layer, {})
        if number is None:
            values = {value for (_, p, d), value in known.items() if (p, d) == (place, dimension)}
            if len(values) > 1 and _length(shape, dimension) == count:
                raise not_shared(layer.path, "is given both positions and numbers of the examples")
            return next(iter(values)) if len(values) == 1 else None
        key = (number, place, dimension)
        if (
            key not in known
            and (decided := self._decided(layer, number, place, shape, count, dimension)) is not None
        ):
            known[key] = decided
        return known.get(key)

    def _decided(
        self, layer: Layer, number: int, place: int, shape: Shape, count: int, dimension: int
    ) -> bool | None:
        """From two calls with different numbers of examples. A length of 1 tells nothing: it may be repeated."""
        calls = (self._longer or {}).get(layer, [])
        if number >= len(calls):
            return None
        shapes, longer_count = calls[number]
        if place >= len(shapes) or longer_count == count:
            return None
        here, there = _length(shape, dimension), _length(shapes[place], dimension)
        if here == count and there == longer_count:
            return True
        return False if here == there != 1 else None


def _length(shape: Shape, dimension: int) -> int:
    return shape[dimension] if len(shape) > dimension else 0
