"""The self-test of the first batches: an example alone must have the gradient that it has in a batch.

Before the first step the loader gives a few rehearsals: two examples alone, with autograd doing everything, and the
same two among others, recorded as in training. If the gradients differ, something escapes clipping: a parameter used
outside its layer, examples that depend on each other, a loss averaged over all tokens, a wrong `loss_reduction`.
Nothing of a rehearsal is released, and random numbers are put back afterwards. The first rehearsal shows whether the
model draws random numbers; if so, torch's dropout functions let everything through in the others. If random numbers
are drawn even then, the rest is in evaluation mode, whatever the loop says.

Gradients are compared by sketches, their products with a few random signs, since two of them may not fit in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bandmf.torch.clipping.refusals import UnsupportedError, used_elsewhere
from bandmf.torch.noise.shards import local
from bandmf.torch.training.random_state import RandomState

if TYPE_CHECKING:
    from bandmf.torch.training.step import Stepper

SKETCHES = 8
TOGETHER = 4  # examples of the batch that the two are compared in
REHEARSALS = 5
# Relative differences that rounding explains: of a parameter's gradient, and of a parameter to the whole.
_FULL, _HALF = (2e-2, 1e-4), (0.2, 2e-2)

_DEPENDS = (
    "self-test: the gradient of an example is finite alone and not in a batch, or the other way around, so the "
    "examples of a batch depend on each other (a norm or a deviation over the batch, in-batch negatives, padding that "
    "counts)"
)

Sketch = dict[str, Tensor]


@dataclass(frozen=True)
class Rehearsal:
    """One batch of the self-test: which of the chosen examples are in it."""

    members: tuple[int, ...]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1


class SelfTest:
    """Conducts the rehearsals; `passed` when they are over."""

    def __init__(self, model: nn.Module, stepper: Stepper) -> None:
        self._model, self._stepper = model, stepper
        self.passed = False
        self.compared = 0  # how many examples were finite, and compared
        self._together: dict[int, Sketch] = {}
        self._rows = 0
        self._alone: dict[int, Sketch] = {}
        self._drew = False
        self._exchanged = False  # another way of clipping has taken over
        self._handles: list[Any] = []
        self._silent = False  # whether hooks keep the model in evaluation mode
        self._after = ExitStack()  # puts everything back as it was
        self._before: RandomState | None = None

    def choose(self, batch: list[int], examples: int) -> list[int]:
        """Examples to rehearse with: of the first batch, and others where that is too small."""
        others = (index for index in range(examples) if index not in set(batch[:TOGETHER]))
        chosen = batch[:TOGETHER]
        while len(chosen) < min(TOGETHER, examples):
            chosen.append(next(others))
        return chosen

    def rehearsals(self, count: int) -> Iterator[Rehearsal]:
        """The batches to go through; each must be observed before the next."""
        together = Rehearsal(tuple(range(count)))
        self._after.close()  # of rehearsals that were left in the middle
        self._after.callback(self._stepper.generators.give_back)
        self._after.callback(self._stop_listening)
        self._after.callback(self._set_modes, [(module, module.training) for module in self._model.modules()])
        try:
            if count > 1:
                yield Rehearsal((0,))
                if self._anyone_drew():
                    self._after.callback(Quiet(self._model).end)
                yield Rehearsal((0,))
                if self._anyone_drew():
                    self._silence()
                yield Rehearsal((0,))
                yield together
                yield together if self._exchanged else Rehearsal((1,))
        finally:
            self._after.close()
        self.passed = True
        if count > 1 and not self.compared:
            warnings.warn(
                "self-test: the gradients of the rehearsed examples are not finite, so nothing was compared; look for "
                "an overflow in the loss",
                stacklevel=4,
            )

    def _anyone_drew(self) -> bool:
        return any(self._stepper.ranks.gather(self._drew))

    def _silence(self) -> None:
        """Evaluation mode, even for loops that call model.train() for every batch."""

        def silent(module: nn.Module, _inputs: Any) -> None:
            module.eval()

        self._model.eval()
        self._silent = True
        for module in self._model.modules():
            self._after.callback(module.register_forward_pre_hook(silent).remove)

    @staticmethod
    def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
        for module, training in modes:
            module.training = training

    # --- one rehearsal ------------------------------------------------------------------------------------

    def begin(self, rehearsal: Rehearsal) -> None:
        self._before = RandomState()
        self._stepper.clipping.record(None if rehearsal.alone else len(rehearsal.members))
        if rehearsal.alone:
            self._listen(rehearsal.members[0])

    def _listen(self, number: int) -> None:
        """Sketch gradients as autograd finds them: the loop may clip or change `.grad` afterwards."""
        self._alone[number] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._take(name, number))
            for name, parameter in self._stepper.parameters.items()
            if local(parameter) is parameter
        ]

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, name: str, number: int) -> Any:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found = sketch(name, parameter.grad)
            before = self._alone[number].get(name)
            self._alone[number][name] = found if before is None else before + found
            parameter.grad = None

        return take

    def observe(self, rehearsal: Rehearsal, scale: float) -> None:
        """After the backward pass of a rehearsal; `scale` is that of a gradient of its batch."""
        assert self._before is not None
        self._drew = self._before.changed()
        self._stop_listening()
        try:
            if rehearsal.alone:
                self._finish_alone(rehearsal.members[0], scale)
            else:
                self._finish_together(rehearsal, scale)
            self._compare()
        except BaseException:
            self._after.close()  # now: a traceback that someone keeps would keep the model as it is here
            raise
        self._stepper.clipping.clear()

    def _finish_together(self, rehearsal: Rehearsal, scale: float) -> None:
        stepper, self._rows = self._stepper, len(rehearsal.members)
        self._tolerance = _HALF if self._halved() else _FULL
        try:
            for number in (0, 1):
                stepper.sums.clear()
                stepper.clipping.add_example(stepper.sums.views, self._rows, number, scale)
                self._together[number] = {
                    name: sketch(name, total) for name, total in stepper.sums.views.items()
                }
        except UnsupportedError as reason:
            if stepper.clipping.otherwise is None:
                raise
            self._together = {}
            stepper.clipping.remove()
            stepper.clipping, self._exchanged = stepper.clipping.otherwise(reason), True
        stepper.sums.clear()

    def _finish_alone(self, number: int, scale: float) -> None:
        found = self._alone[number]
        world = self._stepper.ranks.world
        for name, parameter in self._stepper.parameters.items():
            if parameter.grad is not None:  # FSDP2 has put it there, averaged over the ranks
                found[name] = world * sketch(name, local(parameter.grad))
        if not found:
            raise RuntimeError("no gradients: call loss.backward() on every batch before optimizer.step()")
        self._alone[number] = {name: scale * each for name, each in found.items()}

    def _compare(self) -> None:
        """Those that were seen both alone and together; on all ranks at the same moment."""
        problem = None
        for number in self._alone.keys() & self._together.keys():
            alone, together = self._alone[number], self._together[number]
            if _finite(alone) and _finite(together):
                self.compared += 1
                problem = problem or difference(alone, together, self._rows, self._tolerance)
            elif _finite(alone) or _finite(together):
                problem = problem or _DEPENDS
        if problem and self._drew and self._silent:
            problem = (
                "self-test: random numbers are drawn in evaluation mode too, so an example alone cannot be compared "
                "with itself in a batch; draw them in the data set, or make sure by hand that examples do not depend "
                "on each other and give make_private self_test=False"
            )
        for found in self._stepper.ranks.gather(problem):
            if found is not None:
                raise RuntimeError(found)

    def _halved(self) -> bool:
        """Whether products have less than the precision of float32."""
        return torch.get_float32_matmul_precision() != "highest" or self._stepper.clipping.half_precision


def _finite(sketches: Sketch) -> bool:
    return all(bool(each.isfinite().all()) for each in sketches.values())


_attend = functional.scaled_dot_product_attention


def _through(given: Tensor, *_: Any, **__: Any) -> Tensor:
    return given


def _attentive(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
    mask = rest[0] if rest else named.pop("attn_mask", None)
    named.pop("dropout_p", None)
    return _attend(query, key, value, mask, 0.0, *rest[2:], **named)


class Quiet:
    """Torch's dropout functions let everything through while the model runs, which stays in training mode."""

    _NAMES = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    _QUIET: ClassVar = dict.fromkeys(_NAMES, _through) | {"scaled_dot_product_attention": _attentive}
    _USUAL: ClassVar = {name: getattr(functional, name) for name in _QUIET}

    def __init__(self, model: nn.Module) -> None:
        self._depth = 0  # modules that run inside of each other
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        self._set(self._QUIET)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._set(self._USUAL)

    def _set(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(functional, name, function)

    def end(self) -> None:
        self._set(self._USUAL)
        for handle in self._handles:
            handle.remove()


def sketch(name: str, gradient: Tensor) -> Tensor:
    """The products of a gradient with random signs, the same for the same name and shape."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    generator = torch.Generator(gradient.device).manual_seed(sum(name.encode()))
    flat = gradient.detach().flatten().to(torch.promote_types(gradient.dtype, torch.float32))
    products = []
    for _ in range(SKETCHES):
        heads = torch.empty_like(flat).bernoulli_(0.5, generator=generator).bool()
        products.append(2 * flat[heads].sum() - flat.sum())
    return torch.stack(products).double().cpu()


def difference(alone: Sketch, together: Sketch, rows: int, tolerance: tuple[float, float]) -> str | None:
    """What is wrong, in a sentence; None if nothing is."""
    own, to_whole = tolerance
    zero = torch.zeros(SKETCHES, dtype=torch.float64)
    names = list(together)
    a = torch.stack([alone.get(name, zero) for name in names])
    b = torch.stack([together[name] for name in names])
    whole = a.norm()

    def differs(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).norm(dim=1) > own * (a.norm(dim=1) + b.norm(dim=1)) / 2 + to_whole * whole

    wrong = differs(a, b)
    if not bool(wrong.any()):
        return None
    ratio = float((a * b).sum() / (b * b).sum()) if bool((b != 0).any()) else 0.0
    if ratio > 0 and not bool(differs(a, ratio * b).any()):
        return _of_loss(ratio, rows)
    name = names[int(wrong.nonzero()[0])]
    if float(together[name].norm()) <= to_whole * float(whole):
        return str(used_elsewhere(name))
    return (
        f"self-test: the gradient of {name!r} for an example alone is not the one that it has in a batch: either the "
        "parameter is also used outside the layer that owns it (call the layer itself), or the examples of a "
        "batch depend on each other there (a norm over the batch, in-batch negatives, padding that counts)"
    )


def _of_loss(ratio: float, rows: int) -> str:
    for expected, given, right in ((1 / rows, "mean", "sum"), (rows, "sum", "mean")):
        if abs(ratio / expected - 1) < 0.02:
            return (
                f"loss_reduction={given!r}: the loss is a {right} over the examples; make_private needs "
                f"loss_reduction={right!r}"
            )
    return (
        f"self-test: the loss of an example alone is {ratio:.3g} times the one that it has in a batch, so it depends "
        "on the other examples; divide each example's loss by its own count (of tokens, say), not by that of the "
        "batch: bandmf.torch.losses has such losses"
    )
