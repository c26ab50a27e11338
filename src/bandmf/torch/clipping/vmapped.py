"""clipping="vmap": the gradient of the whole loss, one example at a time, vectorized by torch.func.

Guarantees:
- what one example adds to the sums has norm at most clip_norm; one that is not finite adds nothing;
- examples are independent by construction: the losses of an example are computed from its own rows of the batch alone.

Every gradient is written out, so it takes the memory of a model for each example; a portion of a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from bandmf import _check
from bandmf.torch.clipping.adding import Adder
from bandmf.torch.clipping.contributions import Pack
from bandmf.torch.clipping.passes import eagerly
from bandmf.torch.clipping.products import widened
from bandmf.torch.clipping.protocol import Copies, Losses, Parameters, checked_losses
from bandmf.torch.clipping.refusals import UnsupportedError
from bandmf.torch.noise.precision import plain_arithmetic

_WRITTEN = 1 << 28  # numbers of gradients that are written out at a time


class _Called(nn.Module):
    """Losses of a model, as a module: so torch.func exchanges the parameters for any use of the model."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self._losses = model, losses

    def forward(self, batch: Any) -> Tensor:
        return checked_losses(self._losses(self.model, batch), 1)[0]


class Vmapped:
    """The clipping of a model that torch.func can vectorize."""

    is_slow = False

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool) -> None:
        self._model, self._parameters = model, parameters
        self._adder = Adder(parameters, clip_norm, per_layer)
        if self._adder.sharded:
            raise _check.fail("clipping", "vmap", "with FSDP2 must be 'auto'")
        self._places = _places(model, parameters)
        size = sum(parameter.numel() for parameter in parameters.values())
        self._at_once = max(1, _WRITTEN // max(1, size))

    def learn(self, losses: Losses, batches: Callable[[], Sequence[tuple[Copies, Copies]]]) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        return f"torch.func.vmap of the whole loss, at most {self._at_once} examples at a time"

    def add_to(self, sums: dict[str, Tensor], losses: Losses, batch: Any, examples: int, valid: int) -> Tensor:
        leaves, shape = _leaves(batch, examples)
        called = _Called(self._model, losses)
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}
        left_out = []
        for begin in range(0, examples, self._at_once):
            part = [leaf[begin : begin + self._at_once] for leaf in leaves]
            found = self._gradients(called, own, part, shape)
            small = [Pack.of({name: widened(found[name])}) for name in self._parameters]
            with plain_arithmetic():
                own_valid = min(max(0, valid - begin), len(part[0]))
                left_out.append(self._adder.add(sums, small, {}, own_valid))
        return torch.stack(left_out).sum()

    def _gradients(
        self, called: nn.Module, own: dict[str, Tensor], leaves: list[Tensor], shape: Any
    ) -> dict[str, Tensor]:
        """(examples, *shape) for each parameter."""

        def loss(parameters: dict[str, Tensor], one: list[Tensor]) -> Tensor:
            batch = shape([leaf[None] for leaf in one])
            given = {place: parameters[name] for name, several in self._places.items() for place in several}
            return functional_call(called, given, (batch,), tie_weights=False)

        try:
            with eagerly(), torch.no_grad():  # the graph is torch.func's own
                return vmap(grad(loss), in_dims=(None, 0), randomness="different")(own, leaves)
        except RuntimeError as error:
            raise UnsupportedError(
                f"clipping='vmap': torch.func cannot vectorize this model ({error}); use clipping='auto', or write "
                "what it names with operations that it knows"
            ) from error


def _places(model: nn.Module, parameters: Parameters) -> dict[str, list[str]]:
    """Where each parameter is exchanged, once for each module that owns it.

    torch.func's own search for tied weights does not put a module back that is in two places.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, list[str]] = {name: [] for name in parameters}
    for path, module in model.named_modules():  # each module once
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in names:
                found[names[id(parameter)]].append(f"model.{path}.{own}" if path else f"model.{own}")
    return found


def _leaves(batch: Any, examples: int) -> tuple[list[Tensor], Any]:
    """The tensors of a batch, and the function that makes a batch of others."""
    kind = type(batch)
    mapping = isinstance(batch, Mapping) and not isinstance(batch, dict)  # transformers' BatchEncoding
    leaves, spec = pytree.tree_flatten(dict(batch) if mapping else batch)
    tensors = [leaf for leaf in leaves if leaf is not None]
    if not tensors or not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == examples for leaf in tensors):
        raise ValueError(
            "clipping='vmap': every part of a batch must be a tensor with one row for each example; give the rest to "
            "the losses by itself"
        )

    def rebuild(chosen: list[Tensor]) -> Any:
        given = iter(chosen)
        made = pytree.tree_unflatten([None if leaf is None else next(given) for leaf in leaves], spec)
        return kind(made) if mapping else made

    return tensors, rebuild
