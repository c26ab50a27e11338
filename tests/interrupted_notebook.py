"""A notebook that is interrupted again and again: `interrupted_notebook.py FOLDER INTERRUPTS`.

One process holds model and optimizer, as a notebook does; a thread sends SIGINT at random moments of a cell that
trains. After each interrupt the cell is run again; where Training refuses and names the way, that way is taken.
Prints the number of interrupts and refusals as JSON, and leaves the weights in FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from bandmf import Key
from bandmf.torch import Training
from training import losses, same_run, simple_plan, small_data, small_model, weights

INTERRUPTS = int(sys.argv[2])
PLAN = simple_plan(steps=20 + 6 * INTERRUPTS, examples=60, batch_size=10)


def open_run(folder):
    model = small_model(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with same_run():
        return Training(
            model, losses, optimizer, small_data(60), PLAN, clip_norm=0.5, key=Key(bytes(32)), folder=folder,
            save_every=3, verify=False,
        )  # fmt: skip


def interrupt_after(seconds):
    def send():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    return threading.Thread(target=send)


def cell(training, seconds):
    """Train until an interrupt; whether it came in time."""
    thread = interrupt_after(seconds)
    try:
        thread.start()  # which may be interrupted, too
        for _ in training:
            pass
        thread.join()  # the signal comes to a cell that has ended
        time.sleep(0.5)
    except KeyboardInterrupt:
        thread.join()
        return not training.finished
    return False


def recovered(training, folder):
    """The way that a refusal names."""
    training.close()
    return open_run(folder)


def usable(training, folder, counts):
    """The run itself, or, where it says that it cannot go on, the one that it says to construct."""
    if training._progress.lost is None:
        return training
    counts["refusals"] += 1
    try:
        training.advance()
    except RuntimeError as error:
        if "construct Training again with this folder" in str(error):
            return recovered(training, folder)
    raise AssertionError("a step that was lost was not refused")


def main():
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    dice, counts = random.Random(5), {"interrupts": 0, "refusals": 0}
    clean = open_run(folder / "clean")
    for _ in clean:
        pass
    training = open_run(folder / "run")
    while counts["interrupts"] < INTERRUPTS and not training.finished:
        counts["interrupts"] += cell(training, dice.uniform(0.001, 0.04))
        training = usable(training, folder / "run", counts)
    for _ in training:
        pass
    torch.save((weights(clean.model), weights(training.model)), folder / "weights.pt")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
