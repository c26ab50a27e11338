"""Optimizers with FSDP2: `rank_optimizers.py FOLDER NAME ...`, which gets verdicts.json.

For each optimizer: whether two ranks end with the same weights with and without saving, and how far from them a run is
that two ranks begin, and one rank ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist

from children import run_ranks
from optimizers import open_run
from training import train, weights

NAMES = sys.argv[2:]


def two(folder):
    torch.set_num_threads(1)
    for name in NAMES:
        plain = weights(train(open_run(name, sharded=True)).model)
        saving = train(open_run(name, folder / name / "whole", sharded=True, save_every=1))
        cut = train(open_run(name, folder / name / "cut", sharded=True, save_every=3), 4)
        found = weights(saving.model)
        for private in (saving, cut):
            private.close()
        if dist.get_rank() == 0:
            torch.save((plain, torch.equal(plain, found)), folder / name / "two.pt")


def one(folder):
    verdicts = {}
    for name in NAMES:
        private = open_run(name, folder / name / "cut", sharded=True, save_every=3)
        assert private.resume()
        assert private.steps_taken == 3
        # Step 3 was released by two ranks, whose rounding is not that of one.
        private.ledger.withdraw(3, "a test, which nobody sees")
        plain, equal = torch.load(folder / name / "two.pt")
        distance = float((weights(train(private).model) - plain).abs().max())
        verdicts[name] = (equal, distance)
    (folder / "verdicts.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    run_ranks(2, two, Path(sys.argv[1]))
    run_ranks(1, one, Path(sys.argv[1]))
