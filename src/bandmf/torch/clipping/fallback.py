"""Layers without a rule: the gradients of single examples by torch.func, for that layer alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.products import wide
from bandmf.torch.clipping.refusals import UnsupportedError

if TYPE_CHECKING:
    from bandmf.torch.clipping.recording import Layer


class Call:
    """One call of a layer: what is needed to make it again, an example at a time.

    Of its inputs, tensors whose first dimension counts the examples are cut; everything else is shared. Which are, is
    told apart once for each layer (`seen`): a mask that is as long as a batch by chance must not be cut just then.
    """

    def __init__(self, layer: Layer, args: Any, kwargs: Any, rows: int, seen: dict[Any, bool]) -> None:
        self.layer, self._rows = layer, rows
        self._leaves, self._shape = pytree.tree_flatten((args, kwargs))
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self._leaves[n].detach() for n in self._places]
        self._cut = [self._is_cut(place, seen) for place in self._places]
        for place in self._places:
            self._leaves[place] = None  # saved by autograd, which may free or recompute it
        device = self.tensors[0].device.type if self.tensors else "cpu"
        self._autocast: tuple[str, torch.dtype, bool] = (
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device),
        )  # fmt: skip

    def _is_cut(self, place: int, seen: dict[Any, bool]) -> bool:
        tensor, batch = self._leaves[place], self.layer.batch
        now = tensor.ndim > batch and tensor.shape[batch] == self._rows
        before = seen.setdefault((len(self._leaves), place), now)
        if before and not now:
            raise UnsupportedError(
                f"{self.layer.path!r}: an input of shape {tuple(tensor.shape)} had a row for each example before, and "
                f"not now, with {self._rows} of them; register a rule for this layer"
            )
        return before

    def gradients(self, saved: tuple[Tensor, ...], gradient: Tensor, number: int) -> dict[str, Tensor]:
        """(examples, *shape) for each parameter of the layer, from the gradient of one of its outputs."""
        batch, module = self.layer.batch, self.layer.module
        cut = self._cut
        if not any(cut):  # a part of the output is no example, even if there are as many
            raise UnsupportedError(
                f"{self.layer.path!r} is given nothing that has one row for each example; weight_norm and other "
                "parametrizations are like that, leave them out"
            )
        parameters = {name: module.get_parameter(name).detach() for name in self.layer.names}

        def loss(parameters: dict[str, Tensor], inputs: list[Tensor], gradient: Tensor) -> Tensor:
            leaves = list(self._leaves)
            for place, one, single in zip(self._places, inputs, cut, strict=True):
                leaves[place] = one.unsqueeze(batch) if single else one
            args, kwargs = pytree.tree_unflatten(leaves, self._shape)
            output = functional_call(module, parameters, args, kwargs)
            output = pytree.tree_flatten(output)[0][number]
            return (output * gradient.unsqueeze(batch)).sum()

        device, dtype, enabled = self._autocast
        dims = [batch if single else None for single in cut]
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            try:
                each = vmap(grad(loss), in_dims=(None, dims, batch), randomness="same")
                found = each(parameters, list(saved), gradient)
            except RuntimeError:  # a layer whose way depends on the data, say: it takes one example at a time
                found = _one_by_one(grad(loss), parameters, saved, dims, gradient, batch)
        return {name: each.to(wide(each.dtype)) for name, each in found.items()}


def _one_by_one(
    gradient_of: Any,
    parameters: dict[str, Tensor],
    saved: tuple[Tensor, ...],
    dims: list[int | None],
    gradient: Tensor,
    batch: int,
) -> dict[str, Tensor]:
    single = []
    for number in range(gradient.shape[batch]):
        inputs = [t if dim is None else t.select(dim, number) for t, dim in zip(saved, dims, strict=True)]
        single.append(gradient_of(parameters, inputs, gradient.select(batch, number)))
    return {name: torch.stack([one[name] for one in single]) for name in parameters}
