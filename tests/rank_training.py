"""Training runs on some ranks: `rank_training.py FOLDER RANKS NAME:KIND[:UNTIL] ... [RANKS ...]`.

KIND is ddp or fsdp, or one of these with "-two": with two bands. Each run leaves its final weights in FOLDER/NAME, and
how many micro-batches each rank had in each step. With UNTIL it stops after so many steps; started again under the same
name, it goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist
from torch import nn

from bandmf import Key
from bandmf.torch import Training
from children import run_ranks
from training import RUN_ID, losses, same_run, simple_plan, small_data, small_model, train, weights

PLAN = simple_plan(steps=18, examples=403, batch_size=3, bands=4)  # many shares are empty
TWO_BANDS = simple_plan(steps=18, examples=403, batch_size=3, bands=2)  # a history of one vector


def make(kind, folder=None, run_id=RUN_ID, **options):
    """The run of this rank, or of the only process."""
    model, plan = small_model(), TWO_BANDS if kind.endswith("-two") else PLAN
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[1], model[4], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {
        "clip_norm": 0.5, "key": Key(bytes(32)), "micro_batch": 2, "folder": folder,
        "verify": not kind.startswith("one"), **options,
    }  # fmt: skip
    with same_run(run_id):
        return Training(model, losses, optimizer, small_data(403), plan, **options)


def one_run(folder, kind, until=None):
    folder.mkdir(parents=True, exist_ok=True)
    training = make(kind, folder / "run")
    micros = [len(list(training._batches._cut(step))) for step in range(PLAN.steps)]
    torch.save(micros, folder / f"micros-{dist.get_rank()}.pt")
    train(training, until and int(until))
    final = weights(training.model)
    if dist.get_rank() == 0:
        torch.save(final, folder / "final.pt")
    training.close()


def all_runs(folder, jobs):
    for job in jobs:
        name, *rest = job.split(":")
        one_run(folder / name, *rest)


def main():
    launches = []
    for word in sys.argv[2:]:
        if word.isdigit():
            launches.append((int(word), []))
        else:
            launches[-1][1].append(word)
    for ranks, jobs in launches:
        run_ranks(ranks, all_runs, Path(sys.argv[1]), jobs)


if __name__ == "__main__":
    main()
