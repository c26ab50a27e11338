"""Schedulers and averages may be called by the count of steps, not by a count of batches.

A loop that calls one of them after every tenth batch calls it more often where batches are large and cut into more
pieces, even if all calls but those after steps count nothing. So it is recorded after which batches there was a call.
A loop that goes by steps sees the same number of steps after all pieces of a step but the last: either it calls after
all of them or after none, and it calls after them only if it did so at the end of the step before, which had the same
number, or will at the end of this one, if it has asked for the number before `optimizer.step()`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.lr_scheduler import LRScheduler

from bandmf.torch.training.schedules import BY_BATCHES, Known, counts_of, not_inside

_FIRST_TWO = 2  # rehearsals


class Calls:
    """After which batches one scheduler or average was called, as far as that is known."""

    def __init__(self) -> None:
        self._rehearsal: bool | None = None  # after the last one
        self._rehearsals = 0
        self._pieces: bool | None = None  # after those of the step at hand
        self._last: bool | None = None  # after the last piece of the step before

    def by_steps(self, kind: str, called: bool) -> bool:
        """Record a batch; False if a loop that goes by steps cannot have called as this one did."""
        if kind == "rehearsal":
            before, self._rehearsal = self._rehearsal, called
            self._rehearsals += 1
            # It may begin to call; or call once, as the number of steps is seen for the first time.
            return called or not before or self._rehearsals <= _FIRST_TWO
        if kind == "piece":
            before, self._pieces = self._pieces, called
            return before in (None, called)
        possible = called or not self._pieces or self._last is not False
        self._pieces, self._last = None, called
        return possible


class Watched:
    """Records the calls after each batch of a run whose batches are cut into pieces."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._known = Known(optimizer)
        self._calls: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()
        self._called: list[ref[Any]] = []
        self._counts: list[tuple[ref[LRScheduler], list[Any]]] = []  # of schedulers, when the batch ended
        self._kind: str | None = None  # of the last batch; None outside of passes over the loader

    def expect(self, what: Any) -> None:
        """Something is there from the start, though it may not be called."""
        self._calls[what] = Calls()

    def called(self, what: Any) -> None:
        """A scheduler or an average was called, whether it counts that or not."""
        self._called.append(ref(what))

    def seen(self) -> list[Any]:
        """What was called since the last batch."""
        schedulers = [(each, counts) for there, counts in self._counts if (each := there()) is not None]
        called = [each for there in self._called if (each := there()) is not None]
        called += [each for each, counts in schedulers if counts_of(each) != counts]
        for each in (*called, *(each for each, _ in schedulers)):
            self._calls.setdefault(each, Calls())
        return called

    def record(self, called: list[Any]) -> None:
        """The next batch is to be counted: fail if the last one shows that the loop counts batches."""
        if self._kind is None:
            return
        for each, calls in list(self._calls.items()):
            if not calls.by_steps(self._kind, any(each is one for one in called)):
                raise RuntimeError(BY_BATCHES.format(name=_name(each)))

    def end(self, partial: bool, stepped: bool) -> None:
        """A batch was counted: a piece with more to come, one that has completed its step, or a rehearsal."""
        self._kind = "piece" if partial else "last" if stepped else "rehearsal"
        self._called = []
        self._counts = [(ref(each), counts_of(each)) for each in not_inside(self._known.schedulers())]

    def leave(self) -> None:
        """The pass over the loader is over; what is called after it goes by passes."""
        self._kind, self._called, self._counts = None, [], []
        for each in list(self._calls):
            self._calls[each] = Calls()


def _name(what: Any) -> str:
    """The scheduler that was given, for the one that a loop calls in its place."""
    return type(getattr(what, "original", what)).__name__
