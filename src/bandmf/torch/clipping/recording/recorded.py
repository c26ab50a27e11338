"""What takes the place of a layer's `forward` in the private pass.

It notes the input and, in the backward pass, the gradient of the output. The layer's own parameters do not require
gradients meanwhile: autograd leaves their gradients out (a third of the backward pass), and whatever still reaches
`parameter.grad` bypassed the recorded layers, which is how such uses are found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from bandmf.torch.clipping.contributions.totals import Described
from bandmf.torch.clipping.recording.calls import OUTPUT, argument, tensors_of
from bandmf.torch.clipping.recording.fallback import changed, drawn, random_state
from bandmf.torch.clipping.recording.notes import ANCHOR
from bandmf.torch.clipping.recording.recorder import Layer, Recorder
from bandmf.torch.clipping.recording.shared import Shared, Source, by_layer, of_examples, of_source, rows_of
from bandmf.torch.clipping.refusals import other_rows, refuse_packed
from bandmf.torch.clipping.rows import Owners, owners
from bandmf.torch.clipping.rules import convolution, embedding, linear


class Recorded:
    """Takes the place of a layer's `forward` in the private pass."""

    def __init__(self, layer: Layer, recorder: Recorder) -> None:
        self.layer, self.recorder, self.module = layer, recorder, layer.module
        self.own = layer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.calls.is_looking:
            with recorder.calls.drawing(self.layer):
                output = self.own(*args, **kwargs)
            recorder.calls.see(self.layer, args, kwargs, output, recorder.count(owners()))
            return output
        if recorder.is_silent or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if any(isinstance(each, Shared) for each in given):
            if not any(
                (isinstance(each, Shared) and each.node.once is not None) or of_examples(each) for each in given
            ):
                return by_layer(self.layer, recorder, args, kwargs)
            args, kwargs = self.with_rows(args, kwargs)
        elif self._is_given_once(args, kwargs):
            return by_layer(self.layer, recorder, args, kwargs)
        return self.record(args, kwargs)

    def rows_at(self, args: Any, kwargs: Any) -> tuple[Tensor, str, int] | None:
        """The tensor that has the examples, its path among the arguments and the dimension; None: is not asked."""
        if self.layer.rule in (None, embedding):
            return None
        return *argument(args, kwargs, 0, self.layer.input_name), self.layer.batch

    def _is_given_once(self, args: Any, kwargs: Any) -> bool:
        """Whether all examples share what a layer is given, such as coordinates; fails where that is not clear."""
        whose, asked = owners(), self.rows_at(args, kwargs)
        if asked is None or (whose is not None and whose.dimensions > 1):
            return False
        given, path, dimension = asked
        if given.ndim > dimension and given.shape[dimension] == 1:
            return not given.requires_grad and self.recorder.count(whose) > 1
        calls = self.recorder.calls
        has_rows = calls.has_rows(self.layer, path, dimension)
        if given.requires_grad:
            unclear = has_rows is False
        else:
            unclear = has_rows is None and whose is None and calls.has_seen(self.layer, path)
        if unclear:
            raise other_rows(self.layer.path)
        return has_rows is False

    def with_rows(self, args: Any, kwargs: Any) -> Any:
        """What is Shared among the inputs, with a row for each example in front; its length decides nothing."""
        asked = self.rows_at(args, kwargs)
        dimension = self.layer.batch if asked is None else asked[2]
        for each in (*args, *kwargs.values()):
            if isinstance(each, Shared) and (dimension or (each.node.once is None and len(each) != 1)):
                raise each.node.fail(f"is given to {self.layer.path!r} beside examples")
        return tuple(map(rows_of, args)), {name: rows_of(each) for name, each in kwargs.items()}

    def record(self, args: Any, kwargs: Any) -> Any:
        layer = self.layer
        if layer.rule is None:
            return self._record_unit(args, kwargs)
        if layer.rule is embedding and (known := self._positions(self._input(args, kwargs), args, kwargs)) is not None:
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

    def _positions(self, indices: Tensor, args: Any, kwargs: Any) -> Shared | None:
        """The output for numbers that are given once for all examples, as positions are; None for others."""
        if not self._is_for_all(indices, args, kwargs):
            return None
        module: Any = self.layer.module
        with torch.no_grad():
            value = self.own(indices)

        def describe(gradients: Tensor) -> Described:
            each = embedding(module, indices.expand(len(gradients), *indices.shape), gradients)
            return {self.layer.names[name]: term for name, term in each.items()}

        return of_source(Source(self.layer.names["weight"], value, describe), self.recorder)

    def _is_for_all(self, indices: Tensor, args: Any, kwargs: Any) -> bool:
        """Shared values have the rows of examples, too, where they have: in doubt, they are right, and slower."""
        whose, recorder = owners(), self.recorder
        if whose is not None and whose.dimensions > 1:
            return False
        count, (path, _) = recorder.count(whose), next(tensors_of(args, kwargs))
        if indices.ndim and len(indices) == count:
            return count > 1 and not recorder.calls.has_rows(self.layer, path, 0)
        if indices.ndim < 2:
            return True
        if len(indices) == 1 < indices.shape[1] and recorder.calls.grows(self.layer, path, 1):
            return False  # what grows with the examples is theirs, as packed texts are
        return not recorder.calls.has_rows(self.layer, path, 1)  # which is so where time comes first

    def _record_unit(self, args: Any, kwargs: Any) -> Any:
        """Whatever runs inside is part of the layer, even a module that is also used, and recorded, elsewhere."""
        refuse_packed(self.layer.path, args, kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return by_layer(self.layer, self.recorder, args, kwargs)
        call = self.recorder.call(self.layer, args, kwargs)
        before = random_state(call.given[0])
        with self.recorder.silent():
            output = self._run(args, kwargs)
        if self.recorder.calls.draws(self.layer) or not torch.equal(before, random_state(call.given[0])):
            raise drawn(self.layer)
        call.check_unchanged()
        if not any(given.requires_grad for given in call.given) and self._is_once(output):
            return by_layer(self.layer, self.recorder, args, kwargs)
        return self.recorder.note_unit(call, output)

    def _is_once(self, output: Any) -> bool:
        """Whether all examples share what a layer gives, as positions made for a batch of numbers are; fails where
        that is not clear."""
        whose, batch, calls = owners(), self.layer.batch, self.recorder.calls
        if whose is not None and whose.dimensions > 1:
            return False
        count, has_rows = self.recorder.count(whose), calls.has_rows(self.layer, OUTPUT, batch)
        if isinstance(output, Tensor) and output.ndim > batch and output.shape[batch] == 1 < count:
            return True
        if has_rows is None and count > 1 and whose is None and calls.has_seen(self.layer, OUTPUT):
            raise other_rows(self.layer.path)
        return isinstance(output, Tensor) and has_rows is False

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
        """The input of a convolution in the precision of autocast."""
        if self.layer.rule is not convolution:
            return args, kwargs
        first = _lowered(self._input(args, kwargs))
        return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, self.layer.input_name: first})


class FrozenWords:
    """Takes the place of a frozen embedding's `forward`: what it makes of examples is theirs, as its gradient shows."""

    def __init__(self, layer: Layer, recorder: Recorder) -> None:
        self.layer, self.recorder, self.own = layer, recorder, layer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, calls = self.own(*args, **kwargs), self.recorder.calls
        if calls.is_looking:
            calls.see(self.layer, args, kwargs, output, self.recorder.count(owners()))
            return output
        is_known = isinstance(output, Shared) or of_examples(output)  # where something in it is trained
        if is_known or self.recorder.is_silent or not torch.is_grad_enabled():
            return output
        has_rows = calls.has_rows(self.layer, OUTPUT, 0)
        return output.detach().requires_grad_().clone() if has_rows else output


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
    def forward(ctx: Any, x: Tensor, recorded: RecordedLinear, whose: Owners | None, anchor: Tensor) -> Tensor:
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


def _no_view(output: Tensor) -> Tensor:
    """The same memory as a tensor of its own, so that operations in place may follow."""
    return output.new_empty(0).set_(output.detach()) if output._is_view() else output  # type: ignore[call-overload]


def _lowered(x: Tensor) -> Tensor:
    """In the precision of autocast: so it takes half the memory."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
