"""Notices what must not happen between the start of a batch and its step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bandmf.torch.clipping.refusals import changed_in_a_batch, refuse_mixing, suspects
from bandmf.torch.noise.shards import local


class Turns:
    """Counts the batches, and notices a backward pass that goes through an earlier one."""

    def __init__(self) -> None:
        self.batch = 0  # the number of the one at hand
        self.late = False  # whether a backward pass went through an earlier one
        self.autocast: set[torch.dtype] = set()  # in which layers of the one at hand ran
        self._first = 0  # autograd's number of the first node that can be of the one at hand

    def next(self) -> None:
        self.batch, self.late, self.autocast = self.batch + 1, False, set()
        with torch.enable_grad():
            self._first = torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn._sequence_nr()  # type: ignore[union-attr]

    @property
    def own_batch(self) -> int:
        """The number of the batch that a call of a layer is of; -1: of an earlier one.

        In a backward pass checkpointing calls layers again, for a node that may be of an earlier batch. Such a pass is
        noted whatever becomes of the call: a checkpoint inside of the checkpoint calls the layer without gradients
        first, and its own node, for which the layer is called once more, is new.
        """
        if torch._C._is_any_autocast_enabled():
            self.autocast |= _autocast()
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() >= self._first:
            return self.batch
        self.late = True
        return -1

    def arrive(self, batch: int) -> bool:
        """In the backward pass of a call of that batch: whether it is the one at hand."""
        self.late = self.late or batch != self.batch
        return batch == self.batch


def _autocast() -> set[torch.dtype]:
    """The types of autocast, where it is enabled."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return {torch.get_autocast_dtype(device) for device in enabled}


class Written:
    """Notices which gradients a backward pass has written, and which were changed after that."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._left: dict[str, tuple[int, ...]] = {}  # by a backward pass
        # Not of shards, whose gradients FSDP2 writes by itself.
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in parameters.items()
            if not isinstance(parameter, DTensor)
        ]

    def _note(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._left[name] = _content(parameter.grad)

    def forget(self) -> None:
        self._left = {}

    def edited(self) -> list[str]:
        """The parameters whose gradients are not as a backward pass has left them."""
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
            and not isinstance(parameter, DTensor)
            and self._left.get(name) != _content(parameter.grad)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Watch:
    """Refuses buffers, parameters and modules that change while a batch is processed: changes would get no noise."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._made_of = self._children()
        self._before: list[tuple[Any, ...]] = []
        self._held: list[Any] = []
        self._suspects = suspects(model)
        self._values: dict[str, str] | None = None

    def begin(self, by_value: bool = False) -> None:
        """`by_value` finds changes that torch does not count, through `.data`, at the cost of reading everything."""
        self._before = self._state()
        # Kept, so that nothing new can have the identity of something that is gone.
        self._held = [tensor for _, tensor in self._tensors()]
        self._values = self._sketches() if by_value else None

    def check(self) -> None:
        """Fail if anything has changed since `begin`, or mixes examples by now."""
        now = self._children()
        if [(name, id(module)) for name, module in now] != [
            (name, id(module)) for name, module in self._made_of
        ]:
            raise RuntimeError(
                "model: its modules are others than at the start of the run; make it whole before make_private"
            )
        for name in self.changes():
            raise RuntimeError(f"model: {changed_in_a_batch(name)}")
        refuse_mixing(self._suspects)

    def changes(self) -> list[str]:
        """The parameters and buffers that are not what they were at `begin`."""
        changed = self._changed()
        if self._values is not None:
            changed += [name for name, value in self._sketches().items() if self._values.get(name) != value]
        return changed

    def _children(self) -> list[tuple[str, nn.Module | None]]:
        """What every module is made of, in order; the modules are kept, as identities are compared."""
        return [child for _, module in self._modules for child in module._modules.items()]

    def _tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Of every module its parameters and buffers as they are now: each may come later or be exchanged."""
        for path, module in self._modules:
            prefix = f"{path}." if path else ""
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    yield prefix + name, tensor

    def _state(self) -> list[tuple[Any, ...]]:
        return [(name, id(tensor), *_content(tensor)) for name, tensor in self._tensors()]

    def _changed(self) -> list[str]:
        now = self._state()
        if now == self._before:
            return []
        before = {name: rest for name, *rest in self._before}
        after = {name: rest for name, *rest in now}
        different = [name for name in (*after, *before) if after.get(name) != before.get(name)]
        return different or [now[0][0]]  # the same in another order

    @torch.no_grad()
    def _sketches(self) -> dict[str, str]:
        """Sums, as text, in which NaN equals NaN."""
        found = {}
        for name, tensor in self._tensors():
            if tensor is None:
                continue
            numbers = local(tensor)
            dtype = torch.complex128 if numbers.is_complex() else torch.float64
            found[name] = (
                f"{numbers.sum(dtype=dtype).item()} {torch.linalg.vector_norm(numbers.to(dtype)).item()}"
            )
        return found


def _content(tensor: Tensor | None) -> tuple[int, ...]:
    """Changes with what torch writes there; the place in memory, too, as `swap_tensors` and `.data = ` exchange it."""
    if tensor is None:
        return ()
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        return (tensor._version,)
    return tensor._version, tensor.data_ptr()
