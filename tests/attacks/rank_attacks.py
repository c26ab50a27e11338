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
from bandmf.torch.noise import sealing
from children import run_ranks
from rank_training import make
from training import train

DIFFERENT = {
    "clip_norm": (0.5, 50.0),
    "per_layer": (False, True),
    "clipping": ("auto", "vmap"),
    "micro_batch": (2, 3),
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
    for kind in ("ddp", "fsdp"):
        original, copy = folder / kind, folder / f"{kind}-copy"
        training = train(make(kind, original), 6)
        training.save()
        train(training, 8)
        training.save()
        found[f"{kind} fork"] = forked(lambda t=training: t._stepper.ranks.on_first(lambda: None))
        training.close()
        alone(lambda: shutil.copytree(original, copy))  # noqa: B023
        found[f"{kind} copied"] = refusal(lambda: make(kind, copy))  # noqa: B023
        training = make(kind, copy, run_id="77" * 16, moved="copied")
        found[f"{kind} copy"] = [training.steps_taken, training._opened.run_id]
        train(training, 2)
        training.close()
        found[f"{kind} tag"] = tampered(kind, original)
        newest = seal.checkpoints(original / "checkpoints")[-1]
        alone(lambda: (newest / "__1_0.distcp").write_bytes(b"x"))  # noqa: B023
        found[f"{kind} changed"] = refusal(lambda: make(kind, original))  # noqa: B023
    for name, values in DIFFERENT.items():
        given = {name: values[dist.get_rank()]}
        found[f"different {name}"] = refusal(lambda: make("ddp", **given))  # noqa: B023
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


def tampered(kind, folder):
    """What every rank gets if one bit of rank 1's history is another when it is decrypted."""
    unseal = sealing.unseal

    def spoiled(state, *given):
        if dist.get_rank() == 1:
            next(iter(state.history.values())).view(torch.int32)[0].flatten()[0] ^= 1
        return unseal(state, *given)

    sealing.unseal = spoiled
    try:
        return refusal(lambda: make(kind, folder))
    finally:
        sealing.unseal = unseal


if __name__ == "__main__":
    run_ranks(2, attacks, Path(sys.argv[1]))
