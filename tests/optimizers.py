"""Every optimizer of torch that a training loop can step without a closure, on a small model of matrices alone."""

from __future__ import annotations

import torch
from torch import nn

from bandmf import Key
from bandmf.torch import make_private
from training import same_run, simple_plan, small_data

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon(p, lr=0.01)
PLAN = simple_plan(steps=6)


def open_run(name, folder=None, sharded=False, schedule=lambda optimizer: None, **options):
    """A run with this optimizer; its model has matrices only, which Muon insists on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = OPTIMIZERS[name](model.parameters())
    options = {"clip_norm": 0.5, "criterion": nn.CrossEntropyLoss(), "key": Key(bytes(32)), **options}
    clipping = "bookkeeping" if sharded else "hooks"
    with same_run():
        return make_private(
            model, optimizer, small_data(), PLAN, run_folder=folder, clipping=clipping,
            scheduler=schedule(optimizer), **options,
        )  # fmt: skip
