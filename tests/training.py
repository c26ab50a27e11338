"""What the tests of sampling and training share: plans without a search, and a small problem to train on."""

from __future__ import annotations

import math
from unittest import mock

from bandmf import workloads
from bandmf.planning import Plan
from bandmf.strategies import BandedToeplitz, Identity


def simple_plan(steps=24, examples=400, batch_size=20, bands=4, noise_multiplier=0.5, **changes):
    """A plan with given numbers; it promises nothing, so that the accountant has nothing to object to."""
    strategy = Identity(steps)
    if bands > 1:
        strategy = BandedToeplitz([1 / math.sqrt(1 + k) for k in range(bands)], steps)
    fields = {
        "workload": workloads.prefix(steps),
        "examples": examples,
        "batch_size": batch_size,
        "epsilon": math.inf,
        "delta": 1e-6,
        "adjacency": "add-remove",
        "strategy": strategy,
        "noise_multiplier": noise_multiplier,
    }
    return Plan(**{**fields, **changes})


def small_data(examples=400, features=8, classes=3, dtype=None):
    """Random inputs and labels, the same every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, features, generator=generator, dtype=dtype)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, classes, (examples,), generator=generator))


def small_model(dtype=None, dropout=0.0):
    """Two layers and a norm, the same every time."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


def losses(model, batch):
    """One loss for each example of a batch (x, label)."""
    from torch.nn import functional

    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def train(training, until=None):
    """To the end of the plan, or until a step was taken."""
    for step in training:
        if step == until:
            break
    return training


def weights(model):
    """All weights in one vector, gathered where they are sharded."""
    import torch

    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


RUN_ID = "5a" * 16


def same_run(run_id=RUN_ID):
    """Inside this context every new run has this id: with the same key, the same noise and batches."""
    return mock.patch("bandmf.ledger._fresh_run_id", return_value=run_id)
