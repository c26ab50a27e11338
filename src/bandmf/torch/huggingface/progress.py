"""The Trainer's counters and checkpoints follow those of the private run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from bandmf.torch.training.make_private import Private

_KEPT = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")


class Progress(TrainerCallback):
    """Keeps the Trainer's counters at those of the run, and writes the run's checkpoints with the Trainer's."""

    def __init__(self, private: Private) -> None:
        self._private = private

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Go on where the run is; what had been logged by then is in the Trainer's checkpoint of that step."""
        state.global_step = self._private.steps_taken
        self._set_epoch(state)
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.global_step and (folder / TRAINER_STATE_NAME).is_file():
            before = dataclasses.asdict(TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)))
            for name in _KEPT:
                setattr(state, name, before.get(name, getattr(state, name)))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step != self._private.steps_taken:
            raise RuntimeError(
                f"the Trainer counts {state.global_step} steps, the private run {self._private.steps_taken}: something "
                "else calls optimizer.step() or draws batches; look at callbacks and overridden methods"
            )
        self._set_epoch(state)
        if self._private.finished:
            self._save()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._save()

    def _save(self) -> None:
        if self._private.folder is not None:
            self._private.save()

    def _set_epoch(self, state: TrainerState) -> None:
        state.epoch = self._private.steps_taken / self._private.loader.epoch_steps
