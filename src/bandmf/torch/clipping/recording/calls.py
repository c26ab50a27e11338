"""Which tensors a layer is given with a row for each example, and which once for all of them, as positions are.

A tensor may be as long as there are examples by chance, so lengths alone decide nothing. Before the first step the
losses are computed on two and on three copies of one example, and of another one: what grew with the copies has one row
for each, and what stayed as it was belongs to all. Of a layer whose calls differ in that, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bandmf.randomness import generators
from bandmf.torch.clipping.protocol import Copies

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording.recorder import Layer

FIRST = "[0][0]"  # the path of the first argument
Seen = dict[tuple["Layer", str], list[tuple[tuple[int, ...], int]]]  # call by call: shape, and how many rows there were


def tensors_of(args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """With what tells them apart: an argument may be None in one call and a tensor in another."""
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


class Calls:
    """What is known of the tensors that the calls of a layer are given."""

    def __init__(self) -> None:
        self._seen: Seen | None = None  # while the losses are computed to see
        self._known: dict[tuple[Layer, str, int], set[bool | None]] = {}  # by the dimension as well

    @property
    def is_looking(self) -> bool:
        return self._seen is not None

    def look(self, run: Callable[[Any, int], object], one: Copies, more: Copies, device: torch.device) -> None:
        """From two batches of copies of one example; where one of them fails, nothing is known."""
        seen = [self._seen_in(lambda each=each: run(*each), device) for each in (one, more)]
        for layer, path in seen[0].keys() | seen[1].keys():
            calls, again = (each.get((layer, path), []) for each in seen)
            for dimension in range(max(len(shape) for shape, _ in (*calls, *again))):
                pairs = zip(calls, again, strict=False)
                values = {_decided(*pair, dimension) for pair in pairs} if len(calls) == len(again) else {None}
                self._known.setdefault((layer, path, dimension), set()).update(values)

    def _seen_in(self, run: Callable[[], object], device: torch.device) -> Seen:
        self._seen = {}
        try:
            with generators.lent(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                run()
            return self._seen
        except Exception:  # whatever a program says to copies
            return {}
        finally:
            self._seen = None

    def see(self, layer: Layer, args: Any, kwargs: Any, count: int) -> None:
        """A call that is not recorded."""
        if self._seen is not None:
            for path, tensor in tensors_of(args, kwargs):
                self._seen.setdefault((layer, path), []).append((tuple(tensor.shape), count))

    def has_rows(self, layer: Layer, path: str, dimension: int) -> bool | None:
        """Whether this dimension of a tensor counts the examples, or their rows, in every call; None: unknown."""
        values = self._known.get((layer, path, dimension), {None})
        return next(iter(values)) if len(values) == 1 else None


def _decided(one: tuple[tuple[int, ...], int], other: tuple[tuple[int, ...], int], dimension: int) -> bool | None:
    """A length of 1 tells nothing: it may be repeated."""
    (shape, count), (longer, more) = one, other
    here, there = (each[dimension] if len(each) > dimension else 0 for each in (shape, longer))
    if count == more:
        return None
    if (here, there) == (count, more):
        return True
    return False if here == there != 1 else None
