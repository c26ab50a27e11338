"""Records, while a model runs, what the gradients of single examples are made of.

While a run lasts, `Recorded` takes the place of each layer's `forward`: it notes the input and, in the backward pass,
the gradient of the output. The layer's own parameters do not require gradients meanwhile: autograd leaves their
gradients out (a third of the backward pass), and whatever still reaches `parameter.grad` came by another way, which is
how such uses are found.

Inputs are saved by an autograd function, so that activation checkpointing computes them again and nothing is kept
twice. A copy of the model (of an exponential moving average, say) is an ordinary model.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.contributions.totals import Described, Unsettled, settle
from bandmf.torch.clipping.old.fallback import Call, Seen, changed
from bandmf.torch.clipping.refusals import not_by_function, refuse_packed
from bandmf.torch.clipping.rules import Rule, convolution, embedding, linear
from bandmf.torch.clipping.watch import Turns
from bandmf.torch.noise.precision import plain_arithmetic

_ANCHOR = torch.empty(0, requires_grad=True)  # gives outputs a backward pass where no input has one


@dataclass(frozen=True, eq=False)
class Layer:
    """A module whose parameters are described together: by a rule, or by torch.func."""

    module: nn.Module
    path: str
    names: dict[str, str]  # of its parameters: within the module -> within the model
    batch: int  # the dimension that counts the examples
    rule: Rule | None = None  # None: by torch.func
    replacement: type[Recorded] | None = None  # of its `forward`; None: Recorded

    @cached_property
    def input_name(self) -> str:
        """Of the first argument of its `forward`."""
        return list(inspect.signature(type(self.module).forward).parameters)[1]

    def parameters(self) -> list[nn.Parameter]:
        """Those at hand now: FSDP2 exchanges them."""
        own = self.module._parameters
        return [own[name] if name in own else self.module.get_parameter(name) for name in self.names]  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Entry:
    """One use of a layer, and what it makes the gradients of its parameters of."""

    layer: Layer
    rows: int
    dtype: torch.dtype  # of the gradient of its output
    described: Described  # those that are trained; empty where that failed


class Recorder(Turns):
    """What the layers of a model have noted since the last call of `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._unsettled = Unsettled()
        self._rows: int | None = None
        self.failure: Exception | None = None
        self._seen: dict[Layer, Seen] = {}
        self._lock = threading.RLock()  # every GPU has a thread of its own in the backward pass
        self._thread = threading.local()

    @property
    def rows(self) -> int | None:
        """Examples of the batch that is recorded; None: nothing is."""
        return None if getattr(self._thread, "silent", False) else self._rows

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing that this thread runs is recorded."""
        before = getattr(self._thread, "silent", False)
        self._thread.silent = True
        try:
            yield
        finally:
            self._thread.silent = before

    def begin(self, rows: int | None) -> None:
        """Forget what was noted; from now on a batch of so many examples is recorded."""
        self.next()
        self._rows = rows
        self.drop()

    def drop(self) -> None:
        """Forget the backward passes so far, as `zero_grad` does; one that is still to come is recorded."""
        self._entries, self._unsettled, self.failure = [], Unsettled(), None

    def peek(self) -> list[Entry]:
        return self._entries

    def settle(self) -> list[Entry]:
        """All entries, with sums over places added up."""
        settle([entry.described for entry in self._entries])
        self._unsettled = Unsettled()
        return self._entries

    def receive(self, batch: int, layer: Layer, rule: Rule, given: Tensor, gradient: Tensor) -> None:
        """In the backward pass. Examples of an earlier batch have had their turn.

        What is small is computed at once, so that inputs and gradients of convolutions and of normalizing layers do not
        wait in memory for the end of the pass.
        """
        if batch != self.batch:
            self.late = True
            return
        described: Described = {}
        with self._lock, self.silent(), plain_arithmetic():
            try:
                described = _describe(layer, rule, given, gradient)
                self._unsettled.add(described)
            except Exception as error:  # it must not pass through the user's backward pass half-way
                self.failure = self.failure or error
            self._add(layer, gradient, described)

    def _add(self, layer: Layer, gradient: Tensor, described: Described) -> None:
        rows = gradient.shape[layer.batch] if gradient.ndim > layer.batch else 0
        self._entries.append(Entry(layer, rows, gradient.dtype, described))

    def note(self, layer: Layer, rule: Rule, given: Tensor, output: Tensor) -> Tensor:
        """The output, tied to an entry that its backward pass will make."""
        batch = self.own_batch

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            self.receive(batch, layer, rule, saved[0], gradient)

        alone = _memory(output) is not _memory(given)
        return _Note.apply(_ANCHOR, receive, alone, output, given.detach())

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Call:
        """What torch.func needs to repeat a call of a layer without a rule; made before the layer runs."""
        return Call(layer, args, kwargs, self.rows or 0, self._seen.setdefault(layer, {}))

    def note_unit(self, call: Call, output: Any) -> Any:
        """The same as `note` for such a layer."""
        leaves, shape = pytree.tree_flatten(output)
        memory = [id(_memory(leaf)) for leaf in (*leaves, *call.given) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                receive = self._receive_unit(call, number)
                alone = not leaf._is_view() and memory.count(id(leaf)) == 1
                leaves[number] = _Note.apply(_ANCHOR, receive, alone, leaf, *call.tensors)
        return pytree.tree_unflatten(leaves, shape)

    def _receive_unit(self, call: Call, number: int) -> Callable[[tuple[Tensor, ...], Tensor], None]:
        batch = self.own_batch

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            if not self.arrive(batch):
                return
            with self._lock, self.silent():
                try:
                    self._add(call.layer, gradient, dict(call.gradients(saved, gradient, number)))
                except Exception as error:  # it must not pass through the user's backward pass half-way
                    self.failure = self.failure or not_by_function(error)

        return receive


class Recorded:
    """Takes the place of a layer's `forward` while the run lasts; where nothing is recorded, it is the layer's own."""

    def __init__(self, layer: Layer, recorder: Recorder) -> None:
        self.layer, self.recorder, self.module = layer, recorder, layer.module
        self.own = layer.module.forward
        self.before = vars(layer.module).get("forward")  # None: that of its class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is noted must be noted each time
            return _uncompiled(self, args, kwargs)
        if self.recorder.rows is None:
            return self.own(*args, **kwargs)
        if not torch.is_grad_enabled():
            _ = self.recorder.own_batch  # which notes a late backward pass
            return self.own(*args, **kwargs)
        return self.record(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self.module)) or copy.deepcopy(self.module, memo)
        return plain(twin) if self.before is None else copy.deepcopy(self.before, memo)

    def __reduce__(self) -> Any:
        return _unrecorded, (self.module, self.before)

    def record(self, args: Any, kwargs: Any) -> Any:
        layer = self.layer
        if layer.rule is None:
            return self._record_unit(args, kwargs)
        args, kwargs = self._adapt(args, kwargs)
        given = self._input(args, kwargs)
        version = given._version
        output = self._run(args, kwargs)
        if given._version != version:
            raise changed(layer)
        if isinstance(output, Tensor):
            return self.recorder.note(layer, layer.rule, given, output)
        return self.recorder.note_unit(self.recorder.call(layer, args, kwargs), output)

    def _record_unit(self, args: Any, kwargs: Any) -> Any:
        """Whatever runs inside is part of the layer, even a module that is also used, and recorded, elsewhere."""
        refuse_packed(self.layer.path, args, kwargs)
        call = self.recorder.call(self.layer, args, kwargs)
        with self.recorder.silent():
            output = self._run(args, kwargs)
        call.check_unchanged()
        return self.recorder.note_unit(call, output)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """The layer's own `forward`, whose parameters get no gradients."""
        parameters = self.layer.parameters()
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            return self.own(*args, **kwargs)
        finally:  # also where checkpointing has seen enough, and stops by an exception
            for parameter in parameters:
                parameter.requires_grad_(True)

    def _input(self, args: Any, kwargs: Any) -> Tensor:
        """What a rule is told of: the first argument, by place or by name."""
        return args[0] if args else kwargs[self.layer.input_name]

    def _adapt(self, args: Any, kwargs: Any) -> Any:
        """Position numbers once for each example; the input of a convolution in the precision of autocast."""
        first = self._input(args, kwargs)
        if self.layer.rule is embedding and first.ndim > 1 and len(first) == 1:
            first = first.expand(self.recorder.rows or 1, *first.shape[1:])
        elif self.layer.rule is convolution:
            first = _lowered(first)
        else:
            return args, kwargs
        return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, self.layer.input_name: first})


class RecordedLinear(Recorded):
    """A linear map and its note in one: most layers of a transformer are such, and each call costs."""

    def record(self, args: Any, kwargs: Any) -> Tensor:
        if not self._describes("weight") or not self._describes("bias"):
            return super().record(args, kwargs)
        return _Linear.apply(self._input(args, kwargs), self, self.recorder.own_batch, _ANCHOR)

    def _describes(self, name: str) -> bool:
        """Whether no gradient is lost: a weight that is computed from others, or trained since, has one elsewhere."""
        own = self.module._parameters.get(name)
        if own is None:
            return name == "bias" and getattr(self.module, name) is None
        return not own.requires_grad or (own.is_leaf and name in self.layer.names)

    @property
    def weight(self) -> Tensor:
        """(out, in), as torch has it; transformers' Conv1D has (in, out)."""
        weight: Any = self.module.weight
        return weight if self.layer.rule is linear else weight.T


def replace_forward(layer: Layer, recorder: Recorder) -> None:
    """Record a layer from now on."""
    layer.module.forward = (layer.replacement or Recorded)(layer, recorder)


def restore_forward(layer: Layer) -> None:
    """As it was before."""
    recorded = vars(layer.module).pop("forward", None)
    if isinstance(recorded, Recorded) and recorded.before is not None:
        layer.module.forward = recorded.before


def plain(module: nn.Module) -> Any:
    """The `forward` of the module's class."""
    return MethodType(type(module).forward, module)


def _unrecorded(module: nn.Module, before: Any) -> Any:
    return plain(module) if before is None else before


class _Linear(torch.autograd.Function):
    """x weight' + bias, whose backward pass hands x and the gradient over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorded: RecordedLinear, batch: int, anchor: Tensor) -> Tensor:
        weight, bias, given = recorded.weight, recorded.module.bias, _lowered(x)
        if given.dtype != weight.dtype and torch.is_autocast_enabled(x.device.type):
            weight = weight.to(given.dtype)
            bias = None if bias is None else bias.to(given.dtype)
        ctx.save_for_backward(given, weight if x.requires_grad else None)
        ctx.recorded, ctx.batch = recorded, batch
        return _no_view(functional.linear(given, weight, bias))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, weight = ctx.saved_tensors  # once: checkpointing does not give them a second time
        layer = ctx.recorded.layer
        ctx.recorded.recorder.receive(ctx.batch, layer, layer.rule, given, gradient)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _Note(torch.autograd.Function):
    """The identity, whose backward pass hands the saved tensors and the gradient over.

    An output whose memory is its own is given on as another tensor in that memory, and not as a view: operations in
    place may follow, and are counted, so that autograd refuses them where the layer needs its output once more.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, receive: Any, alone: bool, output: Tensor, *saved: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.receive = receive
        return output.detach() if alone else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing does not give them a second time
        ctx.receive(saved, gradient)
        return None, None, None, gradient, *[None] * len(saved)


def _describe(layer: Layer, rule: Rule, a: Tensor, g: Tensor) -> Described:
    """What its rule says of the parameters that are trained."""
    if layer.batch:
        a, g = a.movedim(layer.batch, 0), g.movedim(layer.batch, 0)
    versions = a._version, g._version
    described = rule(layer.module, a, g)
    if (a._version, g._version) != versions:
        raise RuntimeError(
            f"rule: that of {layer.path!r} changes what it is given, which others need; write a * g, not a.mul_(g)"
        )
    return {name: term for name, term in described.items() if name in layer.names}


def _memory(tensor: Tensor) -> Tensor:
    """The tensor whose memory it is: itself, unless it is a view."""
    base = tensor._base
    return tensor if base is None else base


def _no_view(output: Tensor) -> Tensor:
    """The same memory as a tensor of its own, so that operations in place may follow."""
    return output.new_empty(0).set_(output.detach()) if output._is_view() else output  # type: ignore[call-overload]


def _lowered(x: Tensor) -> Tensor:
    """In the precision of autocast: so it takes half the memory."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


@torch.compiler.disable
def _uncompiled(recorded: Recorded, args: Any, kwargs: Any) -> Any:
    return recorded(*args, **kwargs)
