"""Passes of `losses` over chosen examples, always from the same start: weights, buffers and generators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bandmf.torch.clipping.containers import exchanged, tensors_in, to_device
from bandmf.torch.clipping.passes import eagerly
from bandmf.torch.clipping.protocol import Losses, checked_losses
from bandmf.torch.clipping.rows import Owners, owners
from bandmf.torch.training.data import Collate
from bandmf.torch.training.verify.draws import STYLES, Draws, Shape, Style, following
from bandmf.torch.training.verify.start import Start

INPUT = "an input of the batch"


@dataclass
class Seen:
    """A tensor of the batch, or an output of a layer, at its n-th call."""

    name: str
    shape: Shape
    tensor: Tensor | None = None  # where its gradient can be asked for
    whose: Owners | None = None  # what `rows` says


@dataclass
class Pass:
    """What came of one pass."""

    members: Sequence[int]
    losses: Tensor
    draws: Draws
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)  # in the order of the pass
    batch: list[Tensor] = field(default_factory=list)
    drew: int = 0  # in the forward pass
    elsewhere: bool = False  # whether Python's or NumPy's generator was used
    redraws: bool = True  # whether backward passes may draw, as those of checkpoints do

    def gradient(self, place: int, of: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        if not of:  # which autograd refuses
            return ()
        self.draws.rewind(self.drew)
        with self.draws if self.redraws else nullcontext(), sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(self.losses[place], of, retain_graph=True, allow_unused=True)

    def draws_in_backward(self, trained: dict[str, nn.Parameter]) -> bool:
        """Whether a backward pass draws: one that computes something again."""
        self.gradient(0, list(trained.values()))
        return len(self.draws.shapes) > self.drew


class Passes:
    """Runs `losses` on examples by their numbers."""

    def __init__(
        self, model: nn.Module, losses: Losses, examples: Sequence[Any], collate: Collate, start: Start
    ) -> None:
        self.model, self.examples, self.count = model, examples, len(examples)
        self.losses, self._collate, self.start = losses, collate, start
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tracks = True
        self.smallest = 1  # examples that a pass needs
        self.failed: Exception | None = None  # of a single example
        self.dimensions: list[int | None] | None = None  # of each draw, the one that counts examples
        self.places: dict[tuple[str, int], int] = {}  # of what is seen, likewise
        self.unassigned = self.is_half = False
        self._redraws = True  # in the backward pass, as checkpoints do
        self.changed_by_copies: dict[str, Tensor | None] = {}  # weights and buffers, in a pass of one example's copies

    def profile(self) -> None:
        """Find out, from copies of one example, which dimensions count examples."""
        try:
            one = self([0], tracked=True)
        except Exception as error:
            self.smallest, self.failed = 2, error
            one = self([0, 0], tracked=True)
        two = self([0] * (self.smallest + 1), tracked=True)
        self.changed_by_copies = self.start.changes()
        self._redraws = bool(one.draws.shapes)
        if self._redraws:
            with suppress(RuntimeError):  # of reentrant checkpoints
                self._redraws = one.draws_in_backward(self.trained) and two.draws_in_backward(self.trained)
        sizes = (self.smallest, self.smallest + 1)
        pairs = zip(one.draws.shapes, two.draws.shapes, strict=False)
        self.unassigned |= len(one.draws.shapes) != len(two.draws.shapes)
        self.dimensions = [following(*pair, sizes) for pair in pairs]
        for key, seen in one.seen.items():
            other = two.seen.get(key)
            place = None if other is None else following(seen.shape, other.shape, sizes)
            if place is not None and place >= 0 and seen.shape[place] == self.smallest:
                self.places[key] = place

    def alone(self, example: int, style: Style = STYLES[0], tracked: bool = False) -> Pass:
        return self([example] * self.smallest, style, tracked=tracked)

    def clipped(self, members: Sequence[int], style: Style, add: Callable[[Losses, Any], object]) -> Draws:
        """Give a batch of these examples to clipping, which runs `losses` itself, perhaps several times."""
        draws = Draws(members, self.dimensions, style)
        with self._ready(), torch.enable_grad():
            with draws:
                batch = self.batch(members)
            drawn = len(draws.shapes)

            def losses(model: nn.Module, given: Any) -> Tensor:
                draws.rewind(drawn)
                with nullcontext() if self._redraws else draws:
                    return self.losses(model, given)

            with draws if self._redraws else nullcontext():
                add(losses, batch)
        return draws

    @contextmanager
    def _ready(self) -> Iterator[None]:
        self.start.put_back()
        self.start.seed()
        with sdpa_kernel(SDPBackend.MATH), eagerly():
            yield

    def batch(self, members: Sequence[int]) -> Any:
        """A collate function may take things out of its examples."""
        return to_device(self._collate([copy.copy(self.examples[each]) for each in members]), self._device)

    def __call__(self, members: Sequence[int], style: Style = STYLES[0], tracked: bool = False) -> Pass:
        """One forward pass; `tracked`, with a graph that knows inputs and the outputs of all layers."""
        if tracked and self._tracks:
            try:
                return self._run(members, style, tracked, inputs=True)
            except Exception:  # some programs do not take inputs that want gradients
                found = self._run(members, style, tracked, inputs=False)
                self._tracks = False
                return found
        return self._run(members, style, tracked, inputs=False)

    def _run(self, members: Sequence[int], style: Style, tracked: bool, inputs: bool) -> Pass:
        draws = Draws(members, self.dimensions, style)
        found = Pass(members, torch.empty(0), draws, redraws=self._redraws)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._ready())
            stack.enter_context(draws)
            batch = self.batch(members)
            found.batch.extend(tensors_in(batch))
            if inputs:
                batch = exchanged(batch, lambda part: _tracked(part, found) if isinstance(part, Tensor) else None)
            if tracked:
                stack.enter_context(_watched(self.model, found, inputs))
            losses = self.losses(self.model, batch)
            found.elsewhere = self.start.drew_elsewhere()
        found.losses = checked_losses(losses, len(members)) if tracked else losses.detach()
        found.drew = len(draws.shapes)
        self.unassigned |= draws.unassigned or found.elsewhere
        kinds = [losses.dtype, *(s.tensor.dtype for s in found.seen.values() if s.tensor is not None)]
        self.is_half |= any(kind.itemsize < 4 for kind in kinds)
        return found


def _tracked(tensor: Tensor, found: Pass) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    own = tensor.detach().clone().requires_grad_()
    _note(found, INPUT, own)
    return own.clone()  # which may be changed in place


def _note(found: Pass, name: str, tensor: Tensor) -> None:
    number = sum(key[0] == name for key in found.seen)
    kept = tensor if tensor.requires_grad else None
    found.seen[name, number] = Seen(name, tuple(tensor.shape), kept, owners())


@contextmanager
def _watched(model: nn.Module, found: Pass, inputs: bool) -> Iterator[None]:
    """Notes what layers give: those without others inside, and those with parameters of their own."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def note(_: nn.Module, __: Any, output: Any) -> Any:
            is_number = isinstance(output, Tensor) and output.is_floating_point()
            if inputs and is_number and torch.is_grad_enabled() and not output.requires_grad:  # it is frozen
                output = output.detach().clone().requires_grad_().clone()
            for tensor in tensors_in(output):
                _note(found, name, tensor)
            return output

        return note

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
