"""Which embeddings are given numbers once for all examples, as positions are, and which one row for each.

Where there are as many numbers as examples, their meaning is not guessed from that: the losses are computed once more,
without gradients, on one example fewer, and it is seen whether the numbers became fewer too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.refusals import not_shared

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording import Layer


class Calls:
    """What is known of the calls of embeddings."""

    def __init__(self) -> None:
        self._for_all: dict[Layer, bool] = {}
        self._again: Callable[[], object] | None = None
        self._lengths: dict[Layer, list[int]] | None = None  # while the losses are computed once more

    def begin(self, again: Callable[[], object]) -> None:
        """`again` computes the losses of one example fewer."""
        self._again = again

    def is_for_all(self, layer: Layer, indices: Tensor, examples: int) -> bool:
        """Whether these indices belong to all examples."""
        if indices.ndim == 0 or len(indices) != examples:
            return (
                indices.ndim < 2 or indices.shape[1] != examples
            )  # tokens with time first, which are refused
        doubtful = indices.ndim == 1 or (indices.ndim == 2 and indices.shape[0] == indices.shape[1])
        if not doubtful or examples == 1:  # of one example all is its own
            return False
        if layer not in self._for_all:
            self._look(layer, examples)
        return self._for_all[layer]

    def see(self, layer: Layer, args: Any, kwargs: Any) -> None:
        """A call without gradients."""
        if self._lengths is not None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(first, Tensor) and first.ndim:
                self._lengths.setdefault(layer, []).append(len(first))

    def _look(self, layer: Layer, examples: int) -> None:
        assert self._again is not None
        self._lengths = {}
        try:
            with torch.no_grad(), torch.random.fork_rng():
                self._again()
        except Exception:  # a batch that cannot be made smaller: rows, as verify then checks
            pass
        found, self._lengths = self._lengths.get(layer, []), None
        for_all = [length == examples for length in found]
        if any(for_all) and not all(for_all):
            raise not_shared(layer.path, "is given both positions and numbers of the examples")
        self._for_all[layer] = any(for_all)


def fewer_rows(batch: Any, examples: int) -> Any:
    """Without the last example."""
    return _mapped(batch, lambda t: t[:-1] if t.ndim and len(t) == examples else t)


def differentiable(batch: Any) -> Any:
    """With floating tensors that require gradients, by which all that is computed from examples is known."""
    return _mapped(batch, lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def one(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(one, batch)
