"""Trains in JAX in child processes and kills them with SIGKILL, in chosen places and at random moments.

    python jax_killed_training.py FOLDER KILLS

The children are forked, so that JAX is imported once; nothing of it has been used by then, which would not survive.
Prints the number of kills as JSON.
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
from training import same_run

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


def run(folder):
    """The whole training, from wherever it was: two steps by themselves, then two at once, and so on."""
    plan = tiny.plan(steps=24)
    training = tiny.Training(plan, optax.adam(0.1))
    with same_run():
        open_run = tiny.open_run(plan, folder)
    weights, state = open_run.restore(training.begin())
    while not open_run.finished:
        open_run.save((weights, state))
        if open_run.steps_taken % 4 == 0:
            weights, state = training.steps(open_run, weights, state, until=open_run.steps_taken + 2)
        else:
            chunk = next(open_run.chunks(tiny.data(), steps=2))
            weights, state = open_run.release_chunk(training.advance, chunk, weights, state)
    np.save(folder / "final.npy", tiny.flat(weights))


def attempt(folder, place, after, seconds):
    """One process; True if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            plant(place, after)
            run(folder)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if place == "random":
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main():
    folder = Path(sys.argv[1])
    dice, kills = random.Random(3), dict.fromkeys(PLACES, 0)
    attempt(folder / "clean", "nowhere", 0, 0)
    for number in range(int(sys.argv[2])):
        place = PLACES[number % len(PLACES)]
        kills[place] += attempt(folder / "killed", place, dice.randint(1, 3), dice.uniform(1.0, 3.0))
    attempt(folder / "killed", "nowhere", 0, 0)  # to the end
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
