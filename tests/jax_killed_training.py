"""Trains in JAX in child processes and ends them: with SIGKILL in chosen places and at random moments, or by a signal.

    python jax_killed_training.py FOLDER places KILLS
    python jax_killed_training.py FOLDER signal NUMBER

The children are forked, so that JAX is imported once; nothing of it has been used by then, which would not survive.
Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import optax

import jax_training as tiny
from bandmf import ledger
from bandmf.ledger import checkpoints

PLACES = ["ledger", "released", "checkpoint", "cleaning", "reserved", "random"]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def plant(place, after):
    """Make the `after`-th visit of a place the last thing this process does."""
    visits = [0]

    def now():
        visits[0] += 1
        return visits[0] == after

    if place == "ledger":  # half a line reaches the file
        write = os.write
        os.write = lambda f, line: (write(f, line[: len(line) // 2]), die()) if now() else write(f, line)
    elif place == "released":  # the line is on the disk, the noise not yet added
        append = ledger.Ledger._append
        ledger.Ledger._append = lambda *a: (append(*a), die() if now() else None)
    elif place == "checkpoint":  # data are written, the name is not given
        publish = checkpoints.publish
        checkpoints.publish = lambda *a: die() if now() else publish(*a)
    elif place == "cleaning":  # named, the old ones not yet removed
        remove = checkpoints.shutil.rmtree
        checkpoints.shutil.rmtree = lambda *a: die() if now() else remove(*a)
    elif place == "reserved":  # a chunk was computed, its sums are not recorded
        finish = ledger.Ledger.finish
        ledger.Ledger.finish = lambda *a: die() if now() else finish(*a)


def run(folder, name, at_every_step=lambda step: None):
    """The whole training, from wherever it was: now single steps, now two at once."""
    training = tiny.training(tiny.plan(steps=24), optax.adam(0.1), folder=folder / name, save_every=4)
    state = training.init(tiny.first_weights())
    while not training.finished:
        for item in training.steps(state, at_once=1 + state.step // 4 % 2):
            state = item
            at_every_step(state.step)
            if state.step % 4 == 0:
                break
    training.close()
    np.save(folder / f"{name}.npy", tiny.flat(state.weights))


def child(work):
    """What a fork of this process does; its status."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return process


def attempt(folder, name, place, after, seconds):
    """One process; True if it was killed."""
    process = child(lambda: (plant(place, after), run(folder, name)))
    if place == "random":
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def in_places(folder, count):
    """Runs that are killed in every place, each time where the one before had come to, and then end."""
    dice, kills = random.Random(3), dict.fromkeys(PLACES, 0)
    for number in range(count // len(PLACES)):
        first = number % len(PLACES)
        for place in PLACES[first:] + PLACES[:first]:
            kills[place] += attempt(folder, f"killed{number}", place, dice.randint(1, 2), dice.uniform(0.3, 1.0))
        attempt(folder, f"killed{number}", "nowhere", 0, 0)
    return kills


def by_signal(folder, number):
    """Sent by the loop's body at step 10; what was saved is what the next process begins with."""
    seen = folder / "begun"

    def sends(step):
        if step == 10:
            os.kill(os.getpid(), number)

    process = child(lambda: run(folder, "killed", sends))
    status = os.waitpid(process, 0)[1]
    killed = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 1
    process = child(lambda: run(folder, "killed", lambda step: seen.exists() or seen.write_text(str(step - 1))))
    assert os.waitpid(process, 0)[1] == 0
    return {"killed": killed, "step": int(seen.read_text())}


def main():
    folder, kind, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    assert os.waitpid(child(lambda: run(folder, "clean")), 0)[1] == 0
    told = in_places(folder, number) if kind == "places" else by_signal(folder, number)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
