"""Whole steps for loops that count: one item for each step of the plan, however many physical batches it takes.

    for step in private.step_loader:
        for batch in step.batches():
            private.backward(losses_of(private.model, batch))
        private.optimizer.step()

Guarantee: between two items the run has taken exactly one step; the self-test, before the first, is no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandmf.torch.training.make_private import Private


class Step:
    """One step. It is no collection: what a training library counts or moves of a batch, it does not find here."""

    def __init__(self, private: Private, first: Any, rest: Iterator[Any]) -> None:
        self._private, self._first, self._rest = private, first, rest

    def __contains__(self, name: object) -> bool:
        return False

    def batches(self) -> Iterator[Any]:
        """The physical batches of the step, and of the self-test before the first.

        All but the last are stepped on here, which adds them up; the loop's own `optimizer.step()` is for the last.
        """
        batch = self._first
        while True:
            yield batch
            if self._private.stepper.piece.last:
                return
            self._private.optimizer.step()
            self._private.optimizer.zero_grad()
            batch = next(self._rest)


class StepLoader:
    """Iterating gives the steps of one epoch, from where the run is; `len` is how many an epoch has."""

    def __init__(self, private: Private) -> None:
        self._private, self.dataset = private, private.loader.dataset

    def __len__(self) -> int:
        return self._private.loader.pass_steps

    def __iter__(self) -> Iterator[Step]:
        batches = iter(self._private.loader)
        for first in batches:
            yield Step(self._private, first, batches)
