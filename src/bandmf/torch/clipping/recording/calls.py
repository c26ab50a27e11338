"""Which tensors a layer is given with a row for each example, and which once for all of them, as positions are.

A tensor may be as long as there are examples by chance, so lengths alone decide nothing. Before the first step the
losses are computed twice, without gradients, on two and on three copies of one example: what became longer with them
has their rows, and what stayed as it was belongs to all. Of a layer whose calls differ in that, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bandmf.randomness import generators

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer

Seen = dict[
    tuple["Layer", str], list[tuple[tuple[int, ...], int]]
]  # shapes, call by call, and how many rows there were


def tensors_of(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """With what tells them apart: an argument may be None in one call and a tensor in another."""
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


class Calls:
    """What is known of the tensors that the calls of a layer are given."""

    def __init__(self) -> None:
        self._seen: Seen | None = None  # while the losses are computed to see
        self._known: dict[tuple[Layer, str, int], bool | None] = {}  # by the dimension as well

    def look(self, passes: Sequence[Callable[[], object]], devices: Sequence[torch.device]) -> None:
        """From two passes over different numbers of examples; one that fails shows nothing."""
        on_gpus = [device for device in devices if device.type == "cuda"]
        found: list[Seen] = []
        for run in passes:
            self._seen = {}
            try:
                with torch.no_grad(), generators.lent(), torch.random.fork_rng(on_gpus):
                    run()
            except Exception:
                return
            finally:
                seen, self._seen = self._seen, None
            found.append(seen)
        one, other = found
        for (layer, path), calls in one.items():
            again = other.get((layer, path), [])
            for dimension in range(max(len(shape) for shape, _ in calls)):
                values = {_decided(*pair, dimension) for pair in zip(calls, again, strict=False)}
                is_clear = len(values) == 1 and len(calls) == len(again)
                self._known[layer, path, dimension] = values.pop() if is_clear else None

    def see(self, layer: Layer, args: Any, kwargs: Any, count: int) -> None:
        """A call that is not recorded."""
        if self._seen is not None:
            for path, tensor in tensors_of(args, kwargs):
                self._seen.setdefault((layer, path), []).append((tuple(tensor.shape), count))

    def is_mixed(self, layer: Layer, path: str) -> bool:
        """Whether its calls were seen to differ, so that each has to be taken for both."""
        return self._known.get((layer, path, 0), True) is None

    def has_rows(self, layer: Layer, paths: Sequence[str], dimension: int) -> list[bool | None]:
        """Whether this dimension of each tensor counts the examples, or their rows; None: unknown."""
        return [self._known.get((layer, path, dimension)) for path in paths]


def _decided(one: tuple[tuple[int, ...], int], other: tuple[tuple[int, ...], int], dimension: int) -> bool | None:
    """A length of 1 tells nothing: it may be repeated."""
    (shape, count), (longer, more) = one, other
    here, there = (each[dimension] if len(each) > dimension else 0 for each in (shape, longer))
    if count == more:
        return None
    if (here, there) == (count, more):
        return True
    return False if here == there != 1 else None
