"""Trains with PrivateTrainer in child processes and kills them with SIGKILL in chosen places; one run is left alone.

    python killed_trainer.py FOLDER

The children are forked, so that transformers is imported once. Prints how each child of the second run ended as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every child
from transformers import TrainerCallback

from bandmf import ledger
from trainers import plan_of, texts, trained, trainer_of, writer
from training import weights

HELD_OUT = [{"input_ids": [*row["input_ids"][::-1], 1][:8]} for row in texts(6)]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class KillAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            die()


class KillInSave(TrainerCallback):
    """The Trainer's checkpoint is written, that of the run is not."""

    def on_save(self, args, state, control, **_):
        if state.global_step == 4:
            die()


def kill_between_ledger_and_noise(lines):
    append, seen = ledger.Ledger._append, [0]

    def killing(*given):
        append(*given)
        seen[0] += 1
        if seen[0] == lines:
            die()

    ledger.Ledger._append = killing


def run(folder, callbacks):
    torch.set_num_threads(1)
    options = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "warmup_steps": 3,
        "per_device_train_batch_size": 5, "logging_steps": 1,
    }  # fmt: skip
    trainer = trainer_of(
        folder / "out", model=writer(dropout=0.1), plan=plan_of(steps=7), options=options, callbacks=callbacks,
        folder=folder / "run", eval_dataset=HELD_OUT,
    )  # fmt: skip
    trained(trainer, resume_from_checkpoint=True)
    # Epsilon is that of all released steps: a killed run may have released more of them by then.
    others = ("runtime", "per_second", "epsilon")
    history = [
        {name: value for name, value in line.items() if not name.endswith(others)} for line in trainer.state.log_history
    ]
    end = {"weights": weights(trainer.model).tolist(), "steps": trainer.state.global_step, "history": history}
    end["epsilon"] = trainer.spent()
    (folder / "end.json").write_text(json.dumps(end))


def attempt(folder, callbacks=(), lines=None):
    child = os.fork()
    if child == 0:
        try:
            os.dup2(2, 1)  # what the Trainer prints
            if lines is not None:
                kill_between_ledger_and_noise(lines)
            run(folder, list(callbacks))
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "killed"
    return "ended" if os.WEXITSTATUS(status) == 0 else "failed"


def main():
    folder = Path(sys.argv[1])
    for name in ("clean", "killed"):
        (folder / name).mkdir()
    gc.freeze()  # every training collects garbage
    attempt(folder / "clean")
    killed = folder / "killed"
    ends = [
        attempt(killed, [KillAfter(1)]),  # before the first checkpoint
        attempt(killed, lines=4),
        attempt(killed, [KillInSave()]),
        attempt(killed),
    ]
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
