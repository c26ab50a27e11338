"""Learning-rate schedules and averages of weights count steps, though a loop calls them for every batch.

Batches of the self-test are no steps, and neither are the pieces of a step but for its last: a rate that followed the
number of pieces would tell the sizes of batches, which are secret. So the schedulers of the optimizer and the numbers
in its groups are put back after each of them to what they were, as random numbers are; and torch's AveragedModel
leaves them out.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

_COUNTED = (
    "a schedule counted the batches of the self-test, on which no step is taken: the numbers in optimizer.param_groups "
    "were others after each; give a scheduler of torch to make_private as scheduler= and step private.scheduler, or "
    "count private.steps_taken, or count only when optimizer.stepped"
)
_BY_PIECES = (
    "a number in optimizer.param_groups changed between two pieces of one step: a schedule that counts pieces depends "
    "on the sizes of batches, which must stay secret; use a scheduler of torch, or count private.steps_taken, or count "
    "only when optimizer.stepped"
)
BY_BATCHES = (
    "{name} was called after some batches and not after others, as no count of steps tells: a count of batches depends "
    "on their sizes, which must stay secret; call it after every optimizer.step(), or by private.steps_taken, or only "
    "when optimizer.stepped"
)


class Schedules:
    """The schedulers and settings of an optimizer as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedulers: list[LRScheduler]) -> None:
        self._optimizer = optimizer
        self._schedulers = [(each, _copied(vars(each))) for each in schedulers]
        self._settings = [_copied(settings) for settings in _settings(optimizer)]
        self._after: str | None = (
            None  # what the settings were at the end of the last rehearsal, or of the first piece
        )
        self._after_first: list[Any] = []  # where the schedulers were then
        self._stepped: list[LRScheduler] = []  # in the last rehearsal
        self._rehearsals = 0

    def end_rehearsal(self, in_pieces: bool = False) -> None:
        """Put everything back; fail if the loop sets rates of its own that follow the number of rehearsals.

        And, where pieces come after them, if a scheduler is stepped after some of them and then not.
        """
        settings = _settings(self._optimizer)
        after = _shown(settings)
        made = [set(group) for group in settings] != [set(group) for group in self._settings]
        # A scheduler that was made during a rehearsal has a state that nobody knows from before.
        stepped = [each for each, state in self._schedulers if _counts(vars(each)) != _counts(state)]
        # A loop may call once, as it sees the number of steps for the first time.
        omitted = [] if self._rehearsals == 1 else [each for each in self._stepped if each not in stepped]
        seen_first = self._rehearsals == 1 and bool(self._stepped) and not stepped
        if made or (self._after not in (None, after) and not self._by_metric() and not seen_first):
            raise RuntimeError(_COUNTED)
        if in_pieces and omitted:
            raise RuntimeError(BY_BATCHES.format(name=type(not_inside(omitted)[0]).__name__))
        self._after, self._stepped, self._rehearsals = after, stepped, self._rehearsals + 1
        self.put_back()

    def end_piece(self) -> None:
        """Put everything back; fail if the loop sets rates of its own from piece to piece.

        All pieces of a step begin with the same schedules, so all of them must end with the same.
        """
        after, places = _shown(self._now()), self._places()
        by_hand = after != _shown(self._settings) and not self.counted()
        moved = self._after is not None and places != self._after_first
        differs = self._after not in (None, after) and not self._by_metric()
        if by_hand or moved or differs:
            raise RuntimeError(_BY_PIECES)
        self._after, self._after_first = after, places
        self.put_back()

    def end_step(self) -> None:
        """After the last piece: fail if a scheduler that moved after the others has moved to another place."""
        before = [_place(state) for _, state in self._schedulers]
        for place, first, now in zip(before, self._after_first, self._places(), strict=False):
            if first != place and now not in (place, first):
                raise RuntimeError(_BY_PIECES)

    def counted(self) -> bool:
        """Whether a scheduler has been stepped since."""
        return any(_counts(vars(each)) != _counts(state) for each, state in self._schedulers)

    def _now(self) -> list[dict[str, Any]]:
        """The settings by the names from before: a scheduler that was made since adds names of its own."""
        groups = zip(self._optimizer.param_groups, self._settings, strict=False)
        return [{name: group.get(name) for name in settings} for group, settings in groups]

    def _places(self) -> list[Any]:
        return [_place(vars(each)) for each, _ in self._schedulers]

    def _by_metric(self) -> bool:
        """Whether the rates are those of a scheduler that goes by losses, which differ between rehearsals."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        plateaus = [each for each, _ in self._schedulers if isinstance(each, ReduceLROnPlateau)]
        return any(rates == [float(rate) for rate in each.get_last_lr()] for each in plateaus)

    def put_back(self) -> None:
        for scheduler, state in self._schedulers:
            vars(scheduler).clear()
            vars(scheduler).update(_copied(state))
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=False):
            for name, value in settings.items():
                if isinstance(value, Tensor) and isinstance(now := group.get(name), Tensor):
                    now.detach().copy_(value)  # others may hold this very tensor
                else:
                    group[name] = _copied(value)


class Pieces:
    """Holds the schedules of an optimizer from piece to piece of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held: Schedules | None = None  # after a piece that did not complete its step
        self._ended: Schedules | None = None  # after one that did
        self._settled = False  # whether a step was completed in this pass over the loader
        self._known = Known(optimizer)

    def begin(self) -> None:
        """Before a piece counts: what the loop did after the last one is over."""
        if self._held is not None:
            self._held.end_piece()
        elif self._ended is not None:
            self._ended.end_step()

    def end(self, partial: bool, stepped: bool) -> None:
        """A piece was counted: more of its step are to come, or it has completed the step; else it is a rehearsal."""
        self._ended = None
        if partial:
            self._held = self._schedules(self._held)
            return
        # In the first step of a pass a schedule may begin where a checkpoint was.
        self._ended = self._held if self._settled else None
        self._held, self._settled = None, self._settled or stepped

    def leave(self) -> None:
        """The pass over the loader is over; where that leaves a step in the middle, its pieces count nothing."""
        if self._held is not None and self._held.counted():
            self._held.put_back()
        self._held = self._ended = None
        self._settled = False

    def _schedules(self, before: Schedules | None) -> Schedules:
        """As they are now."""
        if before is not None and self._known.all_found:
            return before  # put back, so they are what they were
        return Schedules(self._optimizer, self._known.schedulers())


class Known:
    """The schedulers of an optimizer, looked for when one may have been made; they are not kept alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found: list[ref[LRScheduler]] = []
        self._made = -1  # as many schedulers had been made when these were looked for

    @property
    def all_found(self) -> bool:
        return self._made == schedulers_made()

    def schedulers(self) -> list[LRScheduler]:
        if not self.all_found:
            self._found, self._made = (
                [ref(each) for each in schedulers_of(self._optimizer)],
                schedulers_made(),
            )
        return [each for there in self._found if (each := there()) is not None]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates, momentum and the like, of each group."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _shown(settings: list[dict[str, Any]]) -> str:
    """To compare; a tensor would change in place."""
    return repr(pytree.tree_map_only(Tensor, Tensor.tolist, settings))


def _counts(state: dict[str, Any]) -> dict[str, Any]:
    """What a scheduler counts by."""
    return {name: value for name, value in state.items() if isinstance(value, int | float)}


def _place(state: dict[str, Any]) -> Any:
    """Where a scheduler is on its way."""
    return state.get("last_epoch"), state.get("T_cur")


def _copied(values: Any) -> Any:
    """Lists, tuples, dictionaries and tensors anew; everything else, such as other schedulers, as it is."""
    return pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), values)


class _Made:
    """The schedulers that were made since this was imported; and how many, to know if there may be another one."""

    number = 0
    alive: ClassVar[WeakValueDictionary[int, LRScheduler]] = WeakValueDictionary()
    has_earlier_ones = False


def _noted(kind: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
    _note(made := object.__new__(kind))
    return made


def _note(scheduler: LRScheduler) -> None:
    _Made.number += 1
    _Made.alive[_Made.number] = scheduler


setattr(LRScheduler, "__new__", _noted)  # noqa: B010  (its type is that of any __new__)


def schedulers_made() -> int:
    return _Made.number


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those of this optimizer, however it is wrapped (wrappers have the groups of what they wrap).

    Those inside others are found by themselves.
    """
    if not _Made.has_earlier_ones:
        _note_earlier_ones()
    groups, found = optimizer.param_groups, list(_Made.alive.values())
    return [each for each in found if getattr(vars(each).get("optimizer"), "param_groups", None) is groups]


def unsaved(optimizer: torch.optim.Optimizer, given: Any) -> list[LRScheduler]:
    """Those of an optimizer that are neither the given one, whose state is in checkpoints, nor inside of it."""
    saved = {id(each) for each in inside(given)}
    return not_inside([each for each in schedulers_of(optimizer) if id(each) not in saved])


def not_inside(schedulers: list[LRScheduler]) -> list[LRScheduler]:
    """Those of them that no other one of them has."""
    inner = {id(each) for outer in schedulers for each in inside(outer) if each is not outer}
    return [each for each in schedulers if id(each) not in inner]


def counts_of(scheduler: LRScheduler) -> list[dict[str, Any]]:
    """What a scheduler and those inside of it count by: a chain counts nothing by itself."""
    return [_counts(vars(each)) for each in inside(scheduler)]


def inside(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it has: as a wrapper, in a sequence or in a chain."""
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, LRScheduler):
                yield from inside(each)


def _note_earlier_ones() -> None:
    """Those that were made before this was imported: nothing but the garbage collector knows them."""
    kinds, known = set(_kinds(LRScheduler)), {id(each) for each in _Made.alive.values()}
    for each in gc.get_objects():
        if type(each) in kinds and id(each) not in known:
            _note(each)
    _Made.has_earlier_ones = True


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in type.__subclasses__(kind):
        yield from _kinds(each)


# --- averages of weights ------------------------------------------------------------------------------------


class Run(Protocol):
    def between_steps(self) -> bool:
        """Whether it has not completed a step just now."""

    def called(self, what: Any) -> None:
        """A scheduler or an average was called, whether it counts that or not."""


_runs: WeakKeyDictionary[nn.Module, ref[Run]] = WeakKeyDictionary()


def average_steps(model: nn.Module, run: Run) -> Callable[[], None]:
    """Let torch's averages of this model, or of a part of it, leave out what comes between two steps of a run.

    Ends by calling what is returned. The run is not kept alive.
    """
    there, modules = ref(run), list(model.modules())
    _runs.update(dict.fromkeys(modules, there))

    def end() -> None:
        for module in modules:
            if _runs.get(module) is there:
                del _runs[module]

    return end


def _runs_of(model: nn.Module) -> list[Run]:
    """The private runs that a model is in, however it is wrapped."""
    found = [there() for module in model.modules() if (there := _runs.get(module)) is not None]
    return list({id(run): run for run in found if run is not None}.values())


def _between_steps(runs: list[Run]) -> bool:
    return any(run.between_steps() for run in runs)


def _only_after_steps(update: Callable[[AveragedModel, nn.Module], None]) -> Any:
    @functools.wraps(update)
    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        for run in (runs := _runs_of(model)):
            run.called(average)
        if not _between_steps(runs):
            update(average, model)

    return update_parameters


setattr(AveragedModel, "update_parameters", _only_after_steps(AveragedModel.update_parameters))  # noqa: B010
