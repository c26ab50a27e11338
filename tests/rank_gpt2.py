"""GPT-2 of transformers with tied weights on some ranks: `rank_gpt2.py FOLDER RANKS`, replicas and shards.

The weights after a few steps are left in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from bandmf import Key
from bandmf.torch import Training
from bandmf.torch.losses import language_model
from children import run_ranks
from training import same_run, simple_plan, train, weights

PLAN = simple_plan(steps=6, examples=40, batch_size=8, bands=2)


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, tie_word_embeddings=True))


def losses(model, batch):
    (tokens,) = batch
    return language_model(model(input_ids=tokens).logits, tokens)


def trained(kind):
    """The weights of a run: "one" process, "replicas" or "shards"."""
    model = gpt2()
    if kind == "shards":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 50, (PLAN.examples, 12), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(tokens)
    with same_run():
        training = Training(
            model, losses, optimizer, data, PLAN, clip_norm=0.5, key=Key(bytes(32)), micro_batch=3, verify=False
        )
    return weights(train(training).model)


def both(folder):
    for kind in ("replicas", "shards"):
        found = trained(kind)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{kind}.pt")


if __name__ == "__main__":
    run_ranks(int(sys.argv[2]), both, Path(sys.argv[1]))
