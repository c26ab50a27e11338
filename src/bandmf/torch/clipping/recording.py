"""Records, while a model runs, what the gradients of single examples are made of.

Hooks around each layer note its input and, in the backward pass, the gradient of its output. While the layer runs,
its own parameters do not require gradients: autograd leaves their gradients out (a third of the backward pass), and
whatever still reaches `parameter.grad` came by another way, which is how such uses are found.

Inputs are saved by an autograd function, so that activation checkpointing computes them again and nothing is kept
twice. A copy of the model (of an exponential moving average, say) carries the hooks but is not recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.fallback import Call
from bandmf.torch.clipping.rules import Described, Rule, convolution, embedding, linear, transposed_linear

# Where autocast lowers the precision of the input; recorded in that precision, it takes half the memory.
_LOWERED = (linear, transposed_linear, convolution)


@dataclass(frozen=True, eq=False)
class Layer:
    """A module whose parameters are described together: by a rule, or by torch.func."""

    module: nn.Module
    path: str
    names: dict[str, str]  # of its parameters: within the module -> within the model
    batch: int  # the dimension that counts the examples
    rule: Rule | None = None  # None: by torch.func
    hooked: bool = True  # attention is not: it records its projections itself

    @cached_property
    def input_name(self) -> str:
        """Of the first argument of its `forward`."""
        return next(iter(inspect.signature(self.module.forward).parameters))

    def parameters(self) -> list[nn.Parameter]:
        """Those at hand now: FSDP2 exchanges them."""
        own = self.module._parameters
        return [own[name] if name in own else self.module.get_parameter(name) for name in self.names]  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Entry:
    """One use of a layer: its input and the gradient of its output, or gradients that torch.func found."""

    layer: Layer
    rule: Rule | None
    input: Tensor | None
    gradient: Tensor
    found: dict[str, Tensor] | None = None

    def contributions(self) -> Described:
        if self.found is not None:
            return dict(self.found)
        assert self.rule is not None
        assert self.input is not None
        a, g = self.input, self.gradient
        if self.layer.batch:
            a, g = a.movedim(self.layer.batch, 0), g.movedim(self.layer.batch, 0)
        return self.rule(self.layer.module, a, g)


class Recorder:
    """The hooks of a model, and what they have noted since the last call of `begin`."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = {layer.module: layer for layer in layers if layer.hooked}
        self._entries: list[Entry] = []
        self.rows: int | None = None  # examples of the batch that is recorded; None: nothing is
        self.failure: Exception | None = None
        self.late = False  # whether a backward pass went through an earlier batch
        self._batch = 0
        self._seen: dict[Layer, dict[Any, bool]] = {}
        self._handles: list[Any] = []
        for module in self._layers:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            # First of all hooks: FSDP2's would take the parameters away.
            after = module.register_forward_hook(
                self._after, prepend=True, with_kwargs=True, always_call=True
            )
            self._handles += [before, after]

    def begin(self, rows: int | None) -> None:
        """Forget what was noted; from now on a batch of so many examples is recorded."""
        self._entries, self.failure, self.late = [], None, False
        self.rows, self._batch = rows, self._batch + 1

    def _on_time(self) -> Callable[[], bool]:
        """Whether the batch is still the one of now: examples of an earlier one have had their turn."""
        batch = self._batch

        def on_time() -> bool:
            self.late = self.late or batch != self._batch
            return batch == self._batch

        return on_time

    def peek(self) -> list[Entry]:
        return self._entries

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """A copy of the model carries hooks, and nothing that was recorded."""
        return Recorder([])

    def __reduce__(self) -> Any:
        return Recorder, ([],)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def layer_of(self, module: nn.Module) -> Layer | None:
        """The layer to record now, if this module is one."""
        if self.rows is None or not torch.is_grad_enabled():
            return None
        return self._layers.get(module)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _outside(self._enter, module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return _outside(self._leave, module, args, kwargs, output)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = self.layer_of(module)
        if layer is None:
            return None
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        if layer.rule is None:
            return None
        return self._adapt(layer, args, kwargs)

    def _adapt(self, layer: Layer, args: Any, kwargs: Any) -> Any:
        """The input in the precision of autocast, and position numbers once for each example."""
        first = _input(layer, args, kwargs)
        if layer.rule is embedding:
            if first.ndim > 1 and len(first) == 1:
                first = first.expand(self.rows or 1, *first.shape[1:])
        elif layer.rule in _LOWERED and torch.is_autocast_enabled(first.device.type):
            first = first.to(torch.get_autocast_dtype(first.device.type))
        if args:
            return (first, *args[1:]), kwargs
        return args, {**kwargs, layer.input_name: first}

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        layer = self.layer_of(module)
        if layer is None:
            return None
        for parameter in layer.parameters():
            parameter.requires_grad_(True)
        if output is None:  # the layer failed, or checkpointing has seen enough
            return None
        if layer.rule is not None and isinstance(output, Tensor):
            return self.note(layer, layer.rule, _input(layer, args, kwargs), output)
        return self._note_unit(layer, args, kwargs, output)

    def note(self, layer: Layer, rule: Rule, given: Tensor, output: Tensor) -> Tensor:
        """The output, tied to an entry that its backward pass will make."""

        on_time = self._on_time()

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            if on_time():
                self._entries.append(Entry(layer, rule, saved[0], gradient))

        return _Note.apply(_anchor(), receive, True, output, given.detach())

    def _note_unit(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> Any:
        call = Call(layer, args, kwargs, self.rows or 0, self._seen.setdefault(layer, {}))
        leaves, shape = pytree.tree_flatten(output)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                receive = self._receive_unit(call, number)
                leaves[number] = _Note.apply(_anchor(), receive, False, leaf, *call.tensors)
        return pytree.tree_unflatten(leaves, shape)

    def _receive_unit(self, call: Any, number: int) -> Callable[[tuple[Tensor, ...], Tensor], None]:
        on_time = self._on_time()

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            if not on_time():
                return
            rows, self.rows = self.rows, None  # what torch.func runs is not recorded
            try:
                found = call.gradients(saved, gradient, number)
                self._entries.append(Entry(call.layer, None, None, gradient, found))
            except Exception as error:  # it must not pass through the user's backward pass half-way
                self.failure = self.failure or error
            finally:
                self.rows = rows

        return receive


def _input(layer: Layer, args: Any, kwargs: Any) -> Tensor:
    """What a rule is told of: the first argument, by place or by name."""
    return args[0] if args else kwargs[layer.input_name]


class _Note(torch.autograd.Function):
    """The identity, whose backward pass hands the saved tensors and the gradient over."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, receive: Any, ruled: bool, output: Tensor, *saved: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.receive = receive
        if not output._is_view():
            ctx.mark_dirty(output)  # so that operations in place may follow
            return output
        if ruled:  # the same memory, and no view: no layer with a rule needs its output in the backward pass
            return output.new_empty(0).set_(output.detach())  # type: ignore[call-overload]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing does not give them a second time
        ctx.receive(saved, gradient)
        return None, None, None, gradient, *[None] * len(saved)


def _outside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Not in compiled code: what is noted must be noted each time. The way around costs too much elsewhere."""
    if torch.compiler.is_compiling():
        return _uncompiled(function, *arguments)
    return function(*arguments)


@torch.compiler.disable
def _uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _anchor() -> Tensor:
    """Makes the output require a gradient even where neither input nor parameters do."""
    return torch.empty(0, requires_grad=True)
