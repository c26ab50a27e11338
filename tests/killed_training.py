"""Trains in child processes and ends them by a signal, in chosen places and at random moments.

    python killed_training.py FOLDER KILLS [PLAN]

The children are forked, so that torch is imported once. One run is left alone.
Prints the number of kills in each place as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every child

from bandmf import Key, Plan, ledger
from bandmf.ledger import checkpoints
from bandmf.torch import Training
from bandmf.torch.clipping import bookkeeping
from bandmf.torch.training import checkpoint
from training import same_run, simple_plan, small_data, small_model, weights

STEPS = 80  # so many that the kills at random moments of a fast machine come before the end
PLACES = ["accumulation", "ledger", "released", "checkpoint", "state", "cleaning", "KILL", "TERM", "INT"]
AT_RANDOM = ("KILL", "TERM", "INT")


def losses(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def run(folder):
    """The whole training, from wherever it was; leaves the final weights in the folder."""
    torch.set_num_threads(1)
    plan = Plan.load(sys.argv[3]) if len(sys.argv) > 3 else simple_plan(steps=STEPS)
    data, model = small_data(plan.examples), small_model(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    with same_run():
        training = Training(
            model, losses, optimizer, data, plan, clip_norm=0.5, key=Key(bytes(32)),
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), micro_batch=7, folder=folder, save_every=3,
            also={"average": average}, verify=False,
        )  # fmt: skip
    for _ in training:
        average.update_parameters(model)
    torch.save(torch.cat([weights(model), weights(average)]), folder / "final.pt")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def plant(place, after):
    """Make the `after`-th visit of a place the last thing this process does."""
    visits = [0]

    def now():
        visits[0] += 1
        return visits[0] == after

    if place == "accumulation":
        original = bookkeeping.Bookkeeping.add_to
        bookkeeping.Bookkeeping.add_to = lambda *a: die() if now() else original(*a)
    elif place == "ledger":
        write = os.write
        # Half a line reaches the file.
        os.write = lambda f, line: (write(f, line[: len(line) // 2]), die()) if now() else write(f, line)
    elif place == "released":  # the line is on the disk, the noise not yet added
        append = ledger.Ledger._append
        ledger.Ledger._append = lambda *a: (append(*a), die() if now() else None)
    elif place == "checkpoint":  # data are written, the name is not given
        publish = checkpoints.publish
        checkpoints.publish = lambda *a: die() if now() else publish(*a)
    elif place == "state":  # in the middle of collecting and writing
        collect = checkpoint.RandomState
        checkpoint.RandomState = lambda *given: die() if now() else collect(*given)
    elif place == "cleaning":  # named, the old ones not yet removed
        remove = checkpoints.shutil.rmtree
        checkpoints.shutil.rmtree = lambda *a: die() if now() else remove(*a)


def attempt(folder, place, after, seconds):
    """One process; True if a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if place not in AT_RANDOM:
                plant(place, after)
            run(folder)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if place in AT_RANDOM:
        time.sleep(seconds)
        os.kill(child, getattr(signal, f"SIG{place}"))
    status = os.waitpid(child, 0)[1]
    ended = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 130
    assert ended or os.WEXITSTATUS(status) == 0
    return ended


def main():
    folder, attempts = Path(sys.argv[1]), int(sys.argv[2])
    dice = random.Random(7)
    kills = dict.fromkeys(PLACES, 0)
    attempt(folder / "clean", "nowhere", 0, 0)
    for number in range(attempts):
        place = PLACES[number % len(PLACES)]
        visits = dice.randint(1, 2) if place in ("checkpoint", "state", "cleaning") else dice.randint(1, 4)
        kills[place] += attempt(folder / "killed", place, visits, dice.uniform(0.05, 0.3))
    attempt(folder / "killed", "nowhere", 0, 0)  # to the end
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
