"""Two ranks train with balls-in-bins: `rank_bins.py FOLDER`, which gets run folder, weights and refusals.

Each rank plans for itself with a cache of its own, as on two machines; so their certificates differ.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bins_runs import open_run, planned
from children import run_ranks
from training import train, weights


def work(folder):
    rank = dist.get_rank()
    os.environ["BANDMF_CACHE"] = str(folder / f"cache-{rank}")
    plan = planned("inverse")
    training = open_run(plan, wrap=DistributedDataParallel, micro_batch=2, folder=folder / "run")
    (folder / f"plans-{rank}").write_text(f"{plan.digest} {training.plan.digest}")
    train(training).close()
    torch.save(weights(training.model), folder / f"weights-{rank}.pt")
    try:
        open_run(planned("inverse", epsilon=8 + rank))
    except ValueError as error:
        (folder / f"refused-{rank}").write_text(str(error))


if __name__ == "__main__":
    run_ranks(2, work, Path(sys.argv[1]))
