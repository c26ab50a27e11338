"""Attacks on a run of two ranks: `rank_attacks.py FOLDER`, which gets what each rank found, as JSON.

Both ranks must see the same refusal: one that waits for the other would never end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports: once here, not in every rank
import torch.distributed as dist

from bandmf.ledger import seal
from children import run_ranks
from rank_training import make
from training import train

DIFFERENT = {
    "clip_norm": (0.5, 50.0),
    "per_layer": (False, True),
    "loss_reduction": ("mean", "sum"),
    "physical_batch_size": (2, 3),
}  # of the two ranks


def refusal(action):
    try:
        action()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def alone(action):
    """Done by rank 0, while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def forked(action):
    """What a fork of this rank gets."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, refusal(action).encode()[:2000])
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def attacks(folder):
    found = {}
    for kind, clipping in (("ddp", "hooks"), ("fsdp", "bookkeeping")):
        original, copy = folder / kind, folder / f"{kind}-copy"
        private = train(make(kind, clipping, original), 6)
        private.save()
        train(private, 8)
        private.save()
        found[f"{kind} fork"] = forked(lambda p=private: p.stepper.ranks.on_first(lambda: None))
        private.close()
        alone(lambda: shutil.copytree(original, copy))  # noqa: B023
        found[f"{kind} copied"] = refusal(lambda: make(kind, clipping, copy))  # noqa: B023
        private = make(kind, clipping, copy, run_id="77" * 16, moved="copied")
        resumed = private.resume()
        found[f"{kind} copy"] = [resumed, private.steps_taken, private.run_id]
        train(private, 2)
        private.close()
        newest = seal.checkpoints(original / "checkpoints")[-1]
        private = make(kind, clipping, original)
        assert private.resume()
        state = private.state_dict()
        tensor = next(iter(state["noise"]["history"].values()))
        if dist.get_rank() == 1:
            tensor.to_local().view(torch.int32)[0].flatten()[0] ^= 1
        found[f"{kind} tag"] = refusal(lambda: private.load_state_dict(state))  # noqa: B023
        alone(lambda: (newest / "__1_0.distcp").write_bytes(b"x"))  # noqa: B023
        found[f"{kind} changed"] = refusal(private.resume)
        private.close()
    for name, values in DIFFERENT.items():
        given = {name: values[dist.get_rank()]}
        found[f"different {name}"] = refusal(lambda: make("ddp", "bookkeeping", **given))  # noqa: B023
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_ranks(2, attacks, Path(sys.argv[1]))
