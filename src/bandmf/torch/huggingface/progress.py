"""The Trainer's counters, epochs and checkpoints follow those of the private run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bandmf.torch.training.training import Training

_KEPT = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")


class Steps:
    """What a Trainer takes for its loader: one empty item for each step, as many as an expected epoch has."""

    def __init__(self, training: Training, dataset: Any) -> None:
        self._training, self.dataset = training, dataset

    def __len__(self) -> int:
        plan = self._training.plan
        steps = plan.steps if plan.examples is None else math.ceil(plan.examples / plan.batch_size)
        return max(1, min(plan.steps, steps))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The steps that are left of the epoch in which the run is."""
        taken, plan = self._training.steps_taken, self._training.plan
        for _ in range(taken, min(plan.steps, (taken // len(self) + 1) * len(self))):
            yield {}


class History:
    """What a Trainer has logged, and which weights were best, as checkpoints of the run keep it."""

    def __init__(self) -> None:
        self.state = TrainerState()

    def state_dict(self) -> dict[str, Any]:
        # As text: a metric of the user's may be of any type.
        return {"json": json.dumps({name: getattr(self.state, name) for name in _KEPT}, default=str)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _set(self.state, json.loads(state_dict["json"]))

    def continue_in(self, state: TrainerState) -> None:
        """Hand it over to the state with which a Trainer begins."""
        _set(state, {name: getattr(self.state, name) for name in _KEPT})
        self.state = state


def _set(state: TrainerState, values: dict[str, Any]) -> None:
    for name in _KEPT:
        setattr(state, name, values[name])


class Progress(TrainerCallback):
    """Keeps the Trainer's counters at those of the run, and writes the run's checkpoints with the Trainer's."""

    def __init__(self, training: Training, steps: Steps, history: History) -> None:
        self._training, self._steps, self._history = training, steps, history

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Go on where the run is."""
        state.global_step = self._training.steps_taken
        self._set_epoch(state)
        self._history.continue_in(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step != self._training.steps_taken:
            raise RuntimeError(
                f"the Trainer counts {state.global_step} steps, the private run {self._training.steps_taken}: an "
                "overridden training_step must call super().training_step"
            )
        self._set_epoch(state)
        if self._training.finished:  # before the best weights are loaded in place of the last
            self._save()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._save()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not args.load_best_model_at_end:
            self._save()

    def _save(self) -> None:
        if self._training.folder is not None:
            self._training.save()

    def _set_epoch(self, state: TrainerState) -> None:
        state.epoch = self._training.steps_taken / len(self._steps)
