"""A run as its user holds it: how far it is, what it has spent, its checkpoints and its end; for PyTorch and JAX."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from bandmf import _check
from bandmf.ledger.processes import Processes
from bandmf.ledger.progress import Progress, checked_saving
from bandmf.ledger.run_folder import Opened, plan_of, provenance
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key
from bandmf.sampling import Sampler, sampler_of


class TrainingRun(ABC):
    """What bandmf.torch.Training and bandmf.jax.Training have in common."""

    _opened: Opened
    _sampler: Sampler
    _progress: Progress

    def __init__(self, plan: Plan, folder: str | Path | None, save_every: int | None) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self.plan = plan_of(self.folder, checked_plan(plan))
        self._save_every = checked_saving(self.folder, save_every, plan)
        self._saved_at: int | None = None  # the step of the last checkpoint

    def _open(self, key: Key | None, moved: str | None, processes: Processes, examples: int | None) -> None:
        self._opened = Opened(self.folder, key, moved, processes)
        self._sampler = sampler_of(self.plan, self._opened.run_key, examples)
        self._progress = Progress(self.plan.steps, self.folder)

    def _begin(self, clip_norm: float, per_layer: bool = False) -> None:
        """Begin the run, or go on with the one in the folder."""
        begun = provenance(self.plan, self._opened.run_key, self._sampler, clip_norm=clip_norm, per_layer=per_layer)
        self._progress.released = self._opened.begin(begun, self.plan)
        weakref.finalize(self, Progress.end, self._progress)

    # --- what it knows ------------------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """How many updates the model has had."""
        return self._progress.taken

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan were taken."""
        return self.steps_taken >= self.plan.steps

    def spent(self) -> float:
        """The epsilon of all steps that the run has released, in this process or before, at the plan's delta.

        A run that goes on from a copy (`moved="copied"`) adds what its ancestors had released when they were copied:
        epsilons and deltas add, so with n ancestors it holds at n + 1 times the plan's delta.
        """
        return self._opened.spent(self.plan, self._progress.released)

    def __repr__(self) -> str:
        plan, folder = self.plan, None if self.folder is None else str(self.folder)
        return (
            f"Training(step {self.steps_taken} of {plan.steps}, epsilon={plan.epsilon:g} at delta={plan.delta:g}, "
            f"folder={folder!r})"
        )

    # --- its folder ---------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint into the folder now, all of it or nothing."""
        if self.folder is None:
            raise _check.fail("folder", None, "there is nowhere to save", "give Training a folder")
        with self._progress.alone():
            return self._save()

    @abstractmethod
    def _write(self) -> Path:
        """A checkpoint of the run as it is."""

    def _save(self) -> Path:
        self._progress.check_usable()
        path = self._write()
        self._saved_at = self.steps_taken
        return path

    def _save_now(self) -> None:
        """Unless it is saved already."""
        if self.folder is not None and self._saved_at != self.steps_taken:
            self._save()

    def _save_alone(self) -> None:
        with self._progress.alone():
            self._save_now()

    def close(self) -> None:
        """Save what was not saved, and let another process have the run; says so if the plan has not ended."""
        if self._progress.closed:
            return
        try:
            if self._progress.lost is None:
                self._save_alone()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._progress.end()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the body after a step may be half done, and other processes may not come to save
            self._let_go()
