"""Kills one of two ranks at random moments: `killed_ranks.py FOLDER KILLS`.

What is left of the other one is killed, too, as torchrun does. One run is left alone.
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

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist
from torch import nn

from bandmf import Key
from bandmf.torch import Training
from children import free_port
from training import losses, same_run, simple_plan, small_data, small_model, weights

RANKS, STEPS = 2, 150
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def run(folder, rank, port):
    """The whole training, from wherever it was; rank 0 leaves the final weights in the folder."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(small_model(dropout=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with same_run():
        training = Training(
            model, losses, optimizer, small_data(), simple_plan(steps=STEPS, bands=2), clip_norm=0.5,
            key=Key(bytes(32)), micro_batch=7, folder=folder / "run", save_every=3, verify=False,
        )  # fmt: skip
    for _ in training:
        pass
    if rank == 0:
        torch.save(weights(training.model), folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


def started(folder):
    port = free_port()
    folder.mkdir(exist_ok=True)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                run(folder, rank, port)
            except KeyboardInterrupt:
                os._exit(130)
            except BaseException as error:
                (folder / f"error-{rank}.txt").write_text(repr(error))
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def lines(folder):
    ledger = folder / "run" / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def attempt(folder, rank, number, more):
    """A signal after so many lines more of the ledger, in the middle of whatever follows; whether it came in time."""
    wanted, children = lines(folder) + more, started(folder)
    while lines(folder) < wanted and os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
    os.kill(children[rank], number)
    time.sleep(0.2)  # SIGTERM lets all ranks end their step, and save
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return lines(folder) >= wanted


def whole(folder):
    for child in started(folder):
        status = os.waitpid(child, 0)[1]
        assert os.WEXITSTATUS(status) == 0, [path.read_text() for path in folder.glob("error-*")]


def main():
    folder, dice, kills = Path(sys.argv[1]), random.Random(3), 0
    whole(folder / "clean")
    for number in range(int(sys.argv[2])):
        way = SIGNALS[number % len(SIGNALS)]
        kills += attempt(folder / "killed", dice.randrange(RANKS), way, dice.randint(1, 9))
    whole(folder / "killed")
    print(json.dumps({"kills": kills}))


if __name__ == "__main__":
    main()
