"""The self-test of the first batches: an example alone must have the gradient that it has in a batch.

Before the first step the loader gives a few rehearsals, of examples that differ from each other: some of them together,
recorded as in training, in a batch of seven and in three of about the size of training; and three of them alone, with
autograd doing everything. If the gradients differ, something escapes clipping: a parameter used outside its layer,
examples that depend on each other, a loss averaged over all tokens, a wrong `loss_reduction`. In the larger batches
examples occur several times, in random places: the norms of their gradients, of each parameter, must be the same in
all places, or the rows of some layer are not the examples in their order. Some are there at half their size as well,
and one batch is of such alone (see `extremes`). The losses are looked at too (see `guarded`).

Nothing of a rehearsal is released; random numbers and learning-rate schedules are put back. The
first rehearsals show whether the model draws random numbers; if so, torch's dropout functions let everything through
in the others. If random numbers are drawn even then, the rest is in evaluation mode, whatever the loop says.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from bandmf.torch.clipping.refusals import UnsupportedError
from bandmf.torch.noise.precision import precision
from bandmf.torch.noise.shards import local
from bandmf.torch.training.random_state import RandomState
from bandmf.torch.training.schedules import Schedules, schedulers_of
from bandmf.torch.training.self_test.collating import AT_RANDOM
from bandmf.torch.training.self_test.extremes import explain_errors, warn_without
from bandmf.torch.training.self_test.guarded import Guards
from bandmf.torch.training.self_test.quiet import Hook, Quiet
from bandmf.torch.training.self_test.sketches import (
    DEPENDS,
    FULL,
    HALF,
    Norms,
    Sketch,
    difference,
    finite,
    placed,
    sketch,
    zero,
)

if TYPE_CHECKING:
    from bandmf.torch.training.step import Stepper

CANDIDATES = 64  # examples that are loaded
TOGETHER = 7  # of which so many make a small batch: few layers have a multiple of it as their size
LARGEST = 64  # rows of a large one
ALONE = 3  # examples that are compared
HALVES = 4  # examples that are in a large batch at half their size too
REHEARSALS = 6 + ALONE
_TINY = 1e-6  # relative to the largest gradient: such an example shows nothing


@dataclass(frozen=True)
class Rehearsal:
    """One batch of the self-test: which of the chosen examples are in it."""

    members: tuple[int, ...]  # their numbers; those from `count` on are the same examples at half their size
    kind: str  # "draws", "small", "large", "halves", "last" or "alone"
    number: int = 0  # of those that are alone

    @property
    def alone(self) -> bool:
        return self.kind in ("draws", "alone")


_of_models: WeakKeyDictionary[nn.Module, SelfTest] = WeakKeyDictionary()


def end_earlier(model: nn.Module) -> None:
    """If rehearsals of this model were left in the middle, by an error say, leave it as it was."""
    if isinstance(model, nn.Module) and (earlier := _of_models.get(model)) is not None:
        earlier.close()


class SelfTest:
    """Conducts the rehearsals; `passed` when they are over."""

    def __init__(self, model: nn.Module, stepper: Stepper, optimizer: Optimizer) -> None:
        self._model, self._stepper, self._optimizer = model, stepper, optimizer
        self.passed = False
        self.compared = 0  # how many examples had a gradient, and were compared
        self._begin_anew()
        self._drew = False
        self.collates_at_random = False  # known of the batches so far
        self.halves = True  # whether there are examples at half their size
        self._at_half = False  # whether the batch at hand has such
        self._exchanged = False  # another way of clipping has taken over
        self._handles: list[Any] = []
        self._silent = False  # whether hooks keep the model in evaluation mode
        self._after = ExitStack()  # puts everything back as it was
        self._before: RandomState | None = None

    def close(self) -> None:
        """Leave model and torch as they were, wherever the rehearsals were left."""
        self._after.close()
        if _of_models.get(self._model) is self:
            del _of_models[self._model]  # which would keep the model, the optimizer and their noise in memory

    def _begin_anew(self) -> None:
        """Forget what batches have shown, as another way of clipping may see it otherwise."""
        self._norms: list[Norms] = []
        self._small: dict[int, Sketch] = {}  # by the number of the example
        self._last: dict[int, Sketch] = {}  # by the number of the comparison
        self._compared: list[int] = [0] * ALONE  # the examples that are
        self._in_small = [False] * ALONE
        self._rows: dict[str, int] = {}
        self._alone: Sketch = {}

    def choose(self, batch: list[int], examples: int) -> list[int]:
        """Examples to choose from: of all parts of the first batch, and others where that is too small."""
        apart = max(1.0, (len(batch) - 1) / (CANDIDATES - 1))
        chosen = [batch[round(number * apart)] for number in range(min(CANDIDATES, len(batch)))]
        taken = set(chosen)
        others = (index for index in range(examples) if index not in taken)
        while len(chosen) < min(CANDIDATES, examples):
            chosen.append(next(others))
        return chosen

    def with_halves(self) -> bool:
        """Whether there shall be examples at half their size: not if the loop was left at the first that had some."""
        if self._at_half:
            self.halves = self._at_half = False
            warn_without("the last pass over private.loader ended at a batch of them")
        return self.halves

    def rehearsals(self, count: int, rows: int, most: int | None = None) -> Iterator[Rehearsal]:
        """The batches to go through, of so many examples and up to so many rows; each is observed before the next.

        Members from `count` on are the examples at half their size. `most` is the physical batch size.
        """
        small = Rehearsal(tuple(range(min(TOGETHER, count, most or TOGETHER))), "small")
        # A prime number, which few layers have as a multiple: so the batch is known by its size.
        rows = _prime(max(len(small.members), min(rows, LARGEST)))
        self._after.close()  # of rehearsals that were left in the middle
        _of_models[self._model] = self  # not before: this keeps the model until `close`
        self._after.callback(self._stepper.generators.give_back)
        self._after.callback(self._stop_listening)
        self._guards = Guards(self._stepper.half.look)
        self._after.callback(self._guards.end)
        self._after.callback(explain_errors(self._model, lambda: self._at_half))
        self._count = count
        self._after.callback(self._set_modes, [(module, module.training) for module in self._model.modules()])
        self._begin_anew()
        try:
            if count > 1:
                schedules = Schedules(self._optimizer, schedulers_of(self._optimizer))
                self._after.callback(schedules.put_back)
                for rehearsal in self._in_turn(count, rows, small):
                    yield rehearsal
                    schedules.end_rehearsal(in_pieces=most is not None)
        finally:
            self.close()
        self.passed = True
        if count > 1 and not self.compared:
            warnings.warn(
                "self-test: the gradients of the rehearsed examples are zero or not finite, so nothing was compared; "
                "look for an overflow in the loss, or for a loss that these examples do not have",
                stacklevel=4,
            )

    def _in_turn(self, count: int, rows: int, small: Rehearsal) -> Iterator[Rehearsal]:
        yield Rehearsal((0,), "draws")
        if self._anyone_drew():
            self._after.callback(Quiet(self._model).end)
        yield Rehearsal((0,), "draws")
        if self._anyone_drew():
            self._silence()
        yield small
        yield small if self._exchanged else _large(count, max(2, rows // 2), rows, "large")
        yield _shuffled(list(range(count, 2 * count)), rows, "halves")
        yield _large(count, rows, rows, "last")
        for number in range(ALONE):
            yield Rehearsal((self._compared[number],), "alone", number)

    def _anyone_drew(self) -> bool:
        return any(self._stepper.ranks.gather(self._drew))

    def _silence(self) -> None:
        """Evaluation mode, even for loops that call model.train() for every batch."""

        def silent(module: nn.Module, _inputs: Any) -> None:
            module.eval()

        self._model.eval()
        self._silent = True
        for module in self._model.modules():
            self._after.callback(module.register_forward_pre_hook(Hook(silent)).remove)

    @staticmethod
    def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
        for module, training in modes:
            module.training = training

    # --- one rehearsal ------------------------------------------------------------------------------------

    def begin(self, rehearsal: Rehearsal) -> None:
        self._before = RandomState()
        self._guards.begin(len(rehearsal.members))
        self._at_half = self.halves and max(rehearsal.members) >= self._count
        self._stepper.clipping.record(None if rehearsal.alone else len(rehearsal.members))
        if rehearsal.alone:
            self._listen()

    def _listen(self) -> None:
        """Sketch gradients as autograd finds them: the loop may clip or change `.grad` afterwards."""
        self._alone = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._take(name))
            for name, parameter in self._stepper.parameters.items()
            if local(parameter) is parameter and parameter.requires_grad
        ]

    def forget(self) -> None:
        """The gradients that were sketched in this rehearsal."""
        self._alone = {}

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, name: str) -> Any:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found = sketch(name, parameter.grad)
            before = self._alone.get(name)
            self._alone[name] = found if before is None else before + found
            parameter.grad = None

        return take

    def bears_halves(self) -> None:
        """After the backward pass of a rehearsal: the loop went through it."""
        self._at_half = False

    def observe(self, rehearsal: Rehearsal, scale: float) -> None:
        """After the backward pass of a rehearsal; `scale` is that of a gradient of its batch."""
        assert self._before is not None
        self._drew = self._before.changed()
        self._stop_listening()
        try:
            problem = self._guards.problem()
            found = (self._finish_alone if rehearsal.alone else self._finish_together)(rehearsal, scale)
            self._refuse(problem or found)
        except BaseException:
            self._after.close()  # now: a traceback that someone keeps would keep the model as it is here
            raise
        self._stepper.clipping.clear()

    def _finish_together(self, rehearsal: Rehearsal, scale: float) -> str | None:
        stepper, rows = self._stepper, len(rehearsal.members)
        self._tolerance = HALF if self._halved() else FULL
        self._rows[rehearsal.kind] = rows
        try:
            found = stepper.clipping.norms(rows, scale)
            self._norms.append(Norms.of(rehearsal.members, found, stepper.parameters))
            if rehearsal.kind == "small":
                self._small = {number: self._sketch(rows, number, scale) for number in rehearsal.members}
            elif rehearsal.kind == "last":
                self._choose_compared()
                places = [rehearsal.members.index(member) for member in self._compared]
                self._last = {n: self._sketch(rows, place, scale) for n, place in enumerate(places)}
        except UnsupportedError as reason:
            if stepper.clipping.otherwise is None or rehearsal.kind == "last":
                raise
            self._begin_anew()
            stepper.clipping.remove()
            stepper.clipping, self._exchanged = stepper.clipping.otherwise(reason), True
        stepper.sums.clear()
        return None

    def _sketch(self, rows: int, place: int, scale: float) -> Sketch:
        """Of the example in this place of the batch, as it would be added."""
        sums = self._stepper.sums
        sums.clear()
        self._stepper.clipping.add_example(sums.views, rows, place, scale)
        return {name: sketch(name, total) for name, total in sums.views.items()}

    def _choose_compared(self) -> None:
        """The first examples of the last batch that have a gradient: others would show nothing."""
        found = self._norms[-1]
        wholes = dict(zip(found.members, found.norms.norm(dim=0).tolist(), strict=True))
        largest = max((size for size in wholes.values() if size < float("inf")), default=0.0)
        good = sorted(member for member, size in wholes.items() if _TINY * largest < size < float("inf"))
        rest = sorted(wholes.keys() - set(good))
        chosen = (good + rest) * ALONE
        self._compared = chosen[:ALONE]
        everywhere = self._stepper.ranks.gather([member in self._small for member in self._compared])
        self._in_small = [all(each) for each in zip(*everywhere, strict=True)]

    def _finish_alone(self, rehearsal: Rehearsal, scale: float) -> str | None:
        found, world = self._alone, self._stepper.ranks.world
        for name, parameter in self._stepper.parameters.items():
            if parameter.grad is not None and name not in found:  # FSDP2's, averaged over the ranks
                found[name] = world * sketch(name, local(parameter.grad))
        if not found:
            raise RuntimeError("no gradients: call loss.backward() on every batch before optimizer.step()")
        if rehearsal.kind == "draws":
            return None
        alone = {name: scale * each for name, each in found.items()}
        number, problem = rehearsal.number, None
        if self._in_small[number]:
            problem = self._compare(alone, self._small[rehearsal.members[0]], "small")
        problem = problem or self._compare(alone, self._last[number], "last")
        self.compared += finite(alone) and not zero(alone)
        if not problem and number == ALONE - 1:
            problem = placed(self._norms, self._tolerance)
        return problem

    def _compare(self, alone: Sketch, together: Sketch, kind: str) -> str | None:
        if finite(alone) and finite(together):
            return difference(alone, together, self._rows[kind], self._tolerance)
        return DEPENDS if finite(alone) or finite(together) else None

    def _refuse(self, problem: str | None) -> None:
        """On all ranks at the same moment."""
        if problem and self.collates_at_random:
            problem = AT_RANDOM
        elif problem and self._drew and self._silent:
            problem = (
                "self-test: random numbers are drawn in evaluation mode too, so an example alone cannot be compared "
                "with itself in a batch; draw them in the data set, or make sure by hand that examples do not depend "
                "on each other and give make_private self_test=False"
            )
        for found in self._stepper.ranks.gather(problem):
            if found is not None:
                raise RuntimeError(found)

    def _halved(self) -> bool:
        """Whether products have less than the precision of float32: those of frozen layers round what others see."""
        stepper = self._stepper
        return precision() != "highest" or bool(stepper.half_precision | stepper.half.of_model)


def _prime(most: int) -> int:
    """The largest one that is not larger."""
    return next((n for n in range(most, 1, -1) if all(n % k for k in range(2, n))), 1)


def _large(count: int, distinct: int, rows: int, kind: str) -> Rehearsal:
    """About so many different ones of the examples, a few of them at half their size too, in random order."""
    halves = min(HALVES, rows // 4) or int(kind == "large")  # of two or three rows, the last batch needs all
    whole = list(range(max(1, min(count, distinct, rows - halves))))
    return _shuffled(whole + [count + number for number in whole[:halves]], rows, kind)


def _shuffled(members: list[int], rows: int, kind: str) -> Rehearsal:
    """These members, as often as it takes to fill the rows, in random order."""
    found = [members[row % len(members)] for row in range(rows)]
    random.Random(f"{kind} {rows}").shuffle(found)
    return Rehearsal(tuple(found), kind)
