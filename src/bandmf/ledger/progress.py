"""How far a run is, whether it may go on, and the warnings that it gives once; alike in PyTorch and JAX."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bandmf import _check
from bandmf.planning import Plan

log = logging.getLogger("bandmf")
_FINITE_EVERY = 100  # steps between two looks at the weights


@dataclass
class Progress:
    """Of a run of this many steps: how many it has taken, and whether one of them is lost."""

    steps: int
    folder: Path | None
    taken: int = 0
    lost: int | None = None  # a step that was released and did not reach the weights
    released: int = 0  # steps, in this process or before: what was spent
    closed: bool = False
    _looked: int = 0  # at the weights, after this step
    _user: dict[str, object] = field(default_factory=dict, repr=False)  # of the run: a call, or none

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One call at a time: a second one in the middle of a step would add to its sums, or use its noise."""
        own = object()
        try:
            if self._user.setdefault("call", own) is not own:
                raise RuntimeError(
                    "this run is in the middle of a step or a checkpoint: call it from one thread, and not from its "
                    "losses; if Ctrl-C has just ended that, close the run and construct Training again"
                )
            yield
        finally:  # wherever Ctrl-C came before: a lock would not know whether it was taken
            if self._user.get("call") is own:
                self._user.clear()

    def check_usable(self) -> None:
        """Fail where the weights are not those of the steps that were released."""
        if self.closed:
            raise RuntimeError("this run was closed; construct Training again to go on")
        if self.lost is not None:
            way = "construct Training again with this folder: it goes on from its last checkpoint"
            if self.folder is None:
                way = "without a folder it cannot go on; what it has released is spent"
            raise RuntimeError(f"step={self.lost + 1}: was released, but an error kept it from the weights; {way}")

    def release(self, step: int, count: int = 1) -> None:
        """The ledger has these steps; they are lost until they are applied."""
        self.lost, self.released = step, max(self.released, step + count)

    def applied(self, steps: int) -> None:
        """The weights are those of so many steps."""
        self.taken, self.lost = steps, None

    def look(self, is_finite: Callable[[], bool]) -> None:
        """Warn once of weights that are not finite; now and then, as to look waits for the step."""
        if self._looked >= self.steps or self.taken < min(self.steps, self._looked + _FINITE_EVERY):
            return
        self._looked = self.taken
        if not is_finite():
            self._looked = self.steps  # once
            log.warning(
                "step %d: weights are not finite any more; lower the learning rate, or look at the loss", self.taken
            )

    def pass_over(self) -> None:
        """Say that steps are lost, after a restart that cannot repeat them, and that the run goes on after them."""
        log.warning(
            "steps %d to %d were released before the restart and cannot be repeated bit for bit (other code, data, "
            "learning rates, machine, kernels or steps at once): they are spent and lost, and the run goes on after "
            "them", self.taken + 1, self.released
        )  # fmt: skip

    def end(self) -> None:
        """Close the run; says once if its plan has not ended."""
        if not self.closed and 0 < self.taken < self.steps:
            way = "without a folder it cannot go on"
            if self.folder is not None:
                way = f"the same program goes on from {self.folder}"
            log.warning("the run ended after step %d of %d; %s", self.taken, self.steps, way)
        self.closed = True


def checked_saving(folder: Path | None, save_every: int | None, plan: Plan) -> int:
    """The number of steps between two checkpoints: by default those of an expected epoch."""
    if save_every is not None and folder is None:
        raise _check.fail("save_every", save_every, "there is nowhere to save", "give Training a folder")
    if save_every is not None:
        return _check.whole("save_every", save_every)
    expected = plan.steps if plan.examples is None or folder is None else plan.examples / plan.batch_size
    return max(1, min(plan.steps, math.ceil(expected)))
