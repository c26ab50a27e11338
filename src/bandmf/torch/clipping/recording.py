"""Records, in the private pass, what the gradients of single examples are made of.

For one pass, `Recorded` takes the place of each layer's `forward`: it notes the input and, in the backward pass, the
gradient of the output. The layer's own parameters do not require gradients meanwhile: autograd leaves their gradients
out (a third of the backward pass), and whatever still reaches `parameter.grad` bypassed the recorded layers, which is
how such uses are found.

Inputs are saved by an autograd function, so that activation checkpointing computes them again and nothing is kept
twice.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.calls import Calls, tensors_of
from bandmf.torch.clipping.contributions.totals import Described, Unsettled, settle
from bandmf.torch.clipping.fallback import Call, changed
from bandmf.torch.clipping.refusals import not_by_function, other_rows, refuse_packed, second_order
from bandmf.torch.clipping.rows import Owners, by_example, owners
from bandmf.torch.clipping.rules import Rule, convolution, embedding, linear
from bandmf.torch.clipping.shared import (
    Shared,
    Source,
    by_layer,
    of_examples,
    of_parameter,
    of_source,
    rows_of,
)
from bandmf.torch.noise.precision import plain_arithmetic

ANCHOR = torch.empty(0, requires_grad=True)  # gives outputs a backward pass where no input has one


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

    @property
    def is_in_doubt(self) -> bool:
        """Whether its calls may be given what all examples share: positions, tables, masks."""
        return self.rule is embedding or (self.rule is None and self.replacement is None)

    def parameters(self) -> list[nn.Parameter]:
        """Those at hand now: FSDP2 exchanges them."""
        own = self.module._parameters
        return [own[name] if name in own else self.module.get_parameter(name) for name in self.names]  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Bare:
    """A module that hands out parameters without a layer."""

    module: nn.Module
    names: dict[str, str]


class Recorder:
    """What the layers of a model have noted in the pass at hand."""

    def __init__(self) -> None:
        self.examples = 0
        self._entries: list[Described] = []  # by the names of the model
        self._unsettled = Unsettled()
        self._listening = False  # whether the backward pass is ours: `losses` may have some of its own
        self.calls = Calls()
        self._lock = threading.RLock()  # every GPU has a thread of its own in the backward pass
        self._thread = threading.local()

    @property
    def is_silent(self) -> bool:
        return getattr(self._thread, "silent", False)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing that this thread runs is recorded."""
        before = self.is_silent
        self._thread.silent = True
        try:
            yield
        finally:
            self._thread.silent = before

    @contextmanager
    def of(self, layers: Iterable[Layer], bare: Iterable[Bare], examples: int) -> Iterator[None]:
        """Record these; afterwards they, and what was noted, are as before."""
        self.examples, before = examples, []
        self.calls.begin()
        try:
            for layer in layers:
                before.append((vars(layer.module), "forward", vars(layer.module).get("forward")))
                vars(layer.module)["forward"] = (layer.replacement or Recorded)(layer, self)
            for owner in bare:
                for name, full in owner.names.items():
                    before.append((vars(owner.module), name, None))
                    parameter: Any = owner.module._parameters[name]
                    vars(owner.module)[name] = of_parameter(full, parameter, self)
            yield
        finally:
            for own, name, was in before:
                own.pop(name, None)
                if was is not None:
                    own[name] = was
            self._entries, self._unsettled, self._listening = [], Unsettled(), False

    def listen(self) -> None:
        """From now on, until the pass ends, backward passes are recorded."""
        self._listening = True
        self.calls.begin_backward()

    def settle(self) -> list[Described]:
        """All entries, with sums over places added up."""
        settle(self._entries)
        self._unsettled = Unsettled()
        return self._entries

    def receive(
        self, layer: Layer, rule: Rule, whose: Owners | None, given: Tensor, gradient: Tensor
    ) -> None:
        """In the backward pass.

        What is small is computed at once, so that inputs and gradients of convolutions and of normalizing layers do not
        wait in memory for the end of the pass.
        """
        if not self._arrives(layer.path):
            return
        with self._lock, self.silent(), plain_arithmetic():
            if layer.batch:
                given, gradient = given.movedim(layer.batch, 0), gradient.movedim(layer.batch, 0)
            if whose is not None and whose.dimensions > 1:
                given, gradient = (each.flatten(0, whose.dimensions - 1) for each in (given, gradient))
            self._check_rows(layer, whose, given, gradient)
            described = _describe(layer, rule, given, gradient)
            self._add({layer.names[name]: term for name, term in described.items()}, whose)

    def _add(self, described: Described, whose: Owners | None) -> None:
        if whose is not None:
            described = by_example(described, whose, self.examples)
        self._unsettled.add(described)
        self._entries.append(described)

    def count(self, whose: Owners | None) -> int:
        """How many rows a layer has."""
        return self.examples if whose is None else whose.count(self.examples)

    def _arrives(self, path: str) -> bool:
        """Whether a backward pass through a layer is to be recorded."""
        if not self._listening and torch.is_grad_enabled():  # create_graph
            raise second_order(path)
        return self._listening

    def _check_rows(self, layer: Layer, whose: Owners | None, *rows: Tensor) -> None:
        if any(each.ndim == 0 or len(each) != self.count(whose) for each in rows):
            raise other_rows(layer.path)

    def note(self, layer: Layer, rule: Rule, given: Tensor, output: Tensor) -> Tensor:
        """The output, tied to an entry that its backward pass will make."""
        whose = owners()

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            self.receive(layer, rule, whose, saved[0], gradient)

        alone = _memory(output) is not _memory(given)
        return _Note.apply(ANCHOR, receive, alone, output, given.detach())

    def note_late(self, layer: Layer, rule: Rule, given: list[Tensor], output: Tensor) -> Tensor:
        """The same where the inputs, one for each time, are known later than the output."""
        whose = owners()

        def receive(_: tuple[Tensor, ...], gradient: Tensor) -> None:
            self.receive(layer, rule, whose, torch.stack(given, 1), gradient)

        return _Note.apply(ANCHOR, receive, False, output)

    def note_shared(self, name: str, rows: Tensor, describe: Callable[[Tensor], list[Described]]) -> Tensor:
        """A parameter without a layer, with one row for each example."""
        whose = owners()

        def receive(_: tuple[Tensor, ...], gradient: Tensor) -> None:
            if self._arrives(name):
                with self._lock, self.silent(), plain_arithmetic():
                    for described in describe(gradient):
                        self._add(described, whose)

        return _Note.apply(ANCHOR, receive, False, rows)

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Call:
        """What torch.func needs to repeat a call of a layer without a rule; made before the layer runs."""
        whose = owners()
        count = self.count(whose)
        tensors = tensors_of(args, kwargs)
        known: list[bool | None] = [None] * len(tensors)
        if whose is None or whose.dimensions == 1:
            known = self.calls.has_rows(layer, tensors, count, layer.batch)
        self.calls.count_call(layer)
        return Call(layer, args, kwargs, count, known)

    def note_unit(self, call: Call, output: Any) -> Any:
        """The same as `note` for such a layer."""
        leaves, shape = pytree.tree_flatten(output)
        memory = [id(_memory(leaf)) for leaf in (*leaves, *call.given) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                receive = self._receive_unit(call, number)
                alone = not leaf._is_view() and memory.count(id(leaf)) == 1
                leaves[number] = _Note.apply(ANCHOR, receive, alone, leaf, *call.tensors)
        return pytree.tree_unflatten(leaves, shape)

    def _receive_unit(self, call: Call, number: int) -> Callable[[tuple[Tensor, ...], Tensor], None]:
        layer, whose = call.layer, owners()

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            if not self._arrives(layer.path):
                return
            with self._lock, self.silent():
                self._check_rows(
                    layer, whose, gradient.movedim(layer.batch, 0) if gradient.ndim else gradient
                )
                try:
                    found: Described = dict(call.gradients(saved, gradient, number))
                except Exception as error:
                    raise not_by_function(error) from error
                self._add({layer.names[name]: term for name, term in found.items()}, whose)

        return receive


class Recorded:
    """Takes the place of a layer's `forward` in the private pass."""

    def __init__(self, layer: Layer, recorder: Recorder) -> None:
        self.layer, self.recorder, self.module = layer, recorder, layer.module
        self.own = layer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.is_silent or not torch.is_grad_enabled():
            if self.layer.is_in_doubt:
                recorder.calls.see(self.layer, args, kwargs, recorder.count(owners()))
            return self.own(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if any(isinstance(each, Shared) for each in given):
            if not any(
                (isinstance(each, Shared) and each.node.once is not None) or of_examples(each)
                for each in given
            ):
                return by_layer(self.layer, recorder, args, kwargs)
            args, kwargs = tuple(map(rows_of, args)), {name: rows_of(each) for name, each in kwargs.items()}
        return self.record(args, kwargs)

    def record(self, args: Any, kwargs: Any) -> Any:
        layer = self.layer
        if layer.rule is None:
            return self._record_unit(args, kwargs)
        if layer.rule is embedding and (known := self._positions(self._input(args, kwargs))) is not None:
            return known
        args, kwargs = self._adapt(args, kwargs)
        given = self._input(args, kwargs)
        version = given._version
        output = self._run(args, kwargs)
        if given._version != version:
            raise changed(layer)
        if isinstance(output, Tensor):
            return self.recorder.note(layer, layer.rule, given, output)
        return self.recorder.note_unit(self.recorder.call(layer, args, kwargs), output)

    def _positions(self, indices: Tensor) -> Shared | None:
        """The output for numbers that are given once for all examples, as positions are; None for others."""
        is_for_all = self._is_for_all(indices)
        self.recorder.calls.count_call(self.layer)
        if not is_for_all:
            return None
        module: Any = self.layer.module
        with torch.no_grad():
            value = self.own(indices)

        def describe(gradients: Tensor) -> Described:
            each = embedding(module, indices.expand(len(gradients), *indices.shape), gradients)
            return {self.layer.names[name]: term for name, term in each.items()}

        return of_source(Source(self.layer.names["weight"], value, describe), self.recorder)

    def _is_for_all(self, indices: Tensor) -> bool:
        """Shared values have the rows of examples, too, where they have: in doubt, they are right, and slower."""
        whose, recorder = owners(), self.recorder
        if whose is not None and whose.dimensions > 1:
            return False
        count = recorder.count(whose)
        (has_rows,) = recorder.calls.has_rows(self.layer, [indices], count, 0)
        if indices.ndim and len(indices) == count:
            is_doubtful = indices.ndim == 1 or indices.shape[1] == count
            return not has_rows if has_rows is not None else is_doubtful and count > 1
        if indices.ndim < 2:
            return True
        (is_second,) = recorder.calls.has_rows(self.layer, [indices], count, 1)
        time_first = indices.shape[1] == count if is_second is None else is_second
        return not time_first and len(indices) > 1

    def _record_unit(self, args: Any, kwargs: Any) -> Any:
        """Whatever runs inside is part of the layer, even a module that is also used, and recorded, elsewhere."""
        refuse_packed(self.layer.path, args, kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return by_layer(self.layer, self.recorder, args, kwargs)
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
        first, whose = self._input(args, kwargs), owners()
        once = first.ndim > 1 and len(first) == 1 and (whose is None or whose.dimensions == 1)
        if self.layer.rule is embedding and once:
            first = first.expand(self.recorder.count(whose), *first.shape[1:])
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
        return _Linear.apply(self._input(args, kwargs), self, owners(), ANCHOR)

    def _describes(self, name: str) -> bool:
        """Whether no gradient is lost: a weight that is computed from others has one elsewhere."""
        own = self.module._parameters.get(name)
        if own is None:
            return name == "bias" and getattr(self.module, name) is None
        return not own.requires_grad or (own.is_leaf and name in self.layer.names)

    @property
    def weight(self) -> Tensor:
        """(out, in), as torch has it; transformers' Conv1D has (in, out)."""
        weight: Any = self.module.weight
        return weight if self.layer.rule is linear else weight.T


class _Linear(torch.autograd.Function):
    """x weight' + bias, whose backward pass hands x and the gradient over."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recorded: RecordedLinear, whose: Owners | None, anchor: Tensor
    ) -> Tensor:
        weight, bias, given = recorded.weight, recorded.module.bias, _lowered(x)
        if given.dtype != weight.dtype and torch.is_autocast_enabled(x.device.type):
            weight = weight.to(given.dtype)
            bias = None if bias is None else bias.to(given.dtype)
        ctx.save_for_backward(given, weight if x.requires_grad else None)
        ctx.recorded, ctx.whose = recorded, whose
        return _no_view(functional.linear(given, weight, bias))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, weight = ctx.saved_tensors  # once: checkpointing does not give them a second time
        layer = ctx.recorded.layer
        ctx.recorded.recorder.receive(layer, layer.rule, ctx.whose, given, gradient)
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
