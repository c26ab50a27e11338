"""Records, in the private pass, what the gradients of single examples are made of.

Inputs are saved by an autograd function, so that activation checkpointing computes them again and nothing is kept
twice. Nothing is recorded but in the library's own backward pass.
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
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.contributions.totals import Described, Unsettled, settle
from bandmf.torch.clipping.recording.calls import Calls, tensors_of
from bandmf.torch.clipping.recording.fallback import Call
from bandmf.torch.clipping.recording.notes import ANCHOR, Note, base_of
from bandmf.torch.clipping.recording.shared import of_parameter
from bandmf.torch.clipping.refusals import not_by_function, other_rows, second_order
from bandmf.torch.clipping.rows import Listed, Owners, by_example, owners
from bandmf.torch.clipping.rules import Rule
from bandmf.torch.noise.precision import plain_arithmetic


@dataclass(frozen=True, eq=False)
class Layer:
    """A module whose parameters are described together: by a rule, or by torch.func."""

    module: nn.Module
    path: str
    names: dict[str, str]  # of its parameters: within the module -> within the model
    batch: int  # the dimension that counts the examples
    forward: Callable[[Layer, Recorder], Callable[..., Any]]  # what takes the place of its own
    rule: Rule | None = None
    by_function: bool = False  # by torch.func
    outer: dict[str, str] | None = None  # of its parameters and those of its parts, where they are layers, too

    @property
    def inside(self) -> dict[str, str]:
        """All parameters that a call uses."""
        return self.names if self.outer is None else self.outer

    @cached_property
    def input_name(self) -> str:
        """Of the first argument of its `forward`."""
        return list(inspect.signature(type(self.module).forward).parameters)[1]

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
        try:
            for layer in layers:
                before.append((vars(layer.module), "forward", vars(layer.module).get("forward")))
                vars(layer.module)["forward"] = layer.forward(layer, self)
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

    def settle(self) -> list[Described]:
        """All entries, with sums over places added up."""
        settle(self._entries)
        self._unsettled = Unsettled()
        return self._entries

    def receive(self, layer: Layer, rule: Rule, whose: Owners | None, given: Tensor, gradient: Tensor) -> None:
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

        alone = base_of(output) is not base_of(given)
        return Note.apply(ANCHOR, receive, alone, output, given.detach())

    def note_late(self, layer: Layer, rule: Rule, given: list[Tensor], output: Tensor) -> Tensor:
        """The same where the inputs, one for each time, are known later than the output."""
        whose = owners()

        def receive(_: tuple[Tensor, ...], gradient: Tensor) -> None:
            self.receive(layer, rule, whose, torch.stack(given, 1), gradient)

        return Note.apply(ANCHOR, receive, False, output)

    def note_shared(self, name: str, rows: Tensor, describe: Callable[[Tensor], list[Described]]) -> Tensor:
        """A parameter without a layer, with one row for each example."""
        whose = owners()

        def receive(_: tuple[Tensor, ...], gradient: Tensor) -> None:
            if self._arrives(name):
                with self._lock, self.silent(), plain_arithmetic():
                    for described in describe(gradient):
                        self._add(described, whose)

        return Note.apply(ANCHOR, receive, False, rows)

    def call(self, layer: Layer, args: Any, kwargs: Any) -> Call:
        """What torch.func needs to repeat a call of a layer without a rule; made before the layer runs."""
        whose = owners()
        paths = [path for path, _ in tensors_of(args, kwargs)]
        known: list[bool | None] = [None] * len(paths)
        if whose is None or whose.dimensions == 1:
            known = [self.calls.has_rows(layer, path, layer.batch) for path in paths]
        return Call(layer, args, kwargs, self.count(whose), known, isinstance(whose, Listed) and whose.is_one)

    def note_unit(self, call: Call, output: Any) -> Any:
        """The same as `note` for such a layer."""
        leaves, shape = pytree.tree_flatten(output)
        memory = [id(base_of(leaf)) for leaf in (*leaves, *call.given) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                receive = self._receive_unit(call, number)
                alone = not leaf._is_view() and memory.count(id(leaf)) == 1
                leaves[number] = Note.apply(ANCHOR, receive, alone, leaf, *call.tensors)
        return pytree.tree_unflatten(leaves, shape)

    def _receive_unit(self, call: Call, number: int) -> Callable[[tuple[Tensor, ...], Tensor], None]:
        layer, whose = call.layer, owners()

        def receive(saved: tuple[Tensor, ...], gradient: Tensor) -> None:
            if not self._arrives(layer.path):
                return
            owner = whose.first if isinstance(whose, Listed) and call.is_one else whose
            with self._lock, self.silent():
                if not call.is_one:
                    self._check_rows(layer, whose, gradient.movedim(layer.batch, 0) if gradient.ndim else gradient)
                try:
                    found: Described = dict(call.gradients(saved, gradient, number))
                except Exception as error:
                    raise not_by_function(error) from error
                self._add({layer.names[name]: term for name, term in found.items()}, owner)

        return receive


def _describe(layer: Layer, rule: Rule, a: Tensor, g: Tensor) -> Described:
    """What its rule says of the parameters that are trained."""
    versions = a._version, g._version
    described = rule(layer.module, a, g)
    if (a._version, g._version) != versions:
        raise RuntimeError(
            f"rule: that of {layer.path!r} changes what it is given, which others need; write a * g, not a.mul_(g)"
        )
    return {name: term for name, term in described.items() if name in layer.names}
