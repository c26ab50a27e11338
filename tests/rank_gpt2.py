"""GPT-2 of transformers with tied weights on some ranks: `rank_gpt2.py FOLDER RANKS`, replicas and shards.

The weights after a few steps are left in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist

from bandmf import Key
from bandmf.torch import make_private
from bandmf.torch.losses import language_model
from children import run_ranks
from test_torch_models import CLIP, Texts, gpt2
from training import same_run, simple_plan, weights

PLAN = simple_plan(steps=6, examples=40, batch_size=8, bands=2)


def train(kind):
    """The weights of a run: "one" process, "replicas" or "shards"."""
    model = gpt2(tied=True)
    if kind == "shards":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with same_run():
        private = make_private(
            model,
            optimizer,
            Texts(PLAN.examples),
            PLAN,
            clip_norm=CLIP,
            key=Key(bytes(32)),
            physical_batch_size=3,
        )
    while not private.finished:
        for batch in private.loader:
            # Without position_ids: transformers makes one row of them for all examples.
            private.backward(language_model(model(input_ids=batch["input_ids"]).logits, batch["labels"]))
            private.optimizer.step()
    found = weights(model)
    private.close()
    return found


def both(folder):
    for kind in ("replicas", "shards"):
        found = train(kind)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{kind}.pt")


if __name__ == "__main__":
    run_ranks(int(sys.argv[2]), both, Path(sys.argv[1]))
