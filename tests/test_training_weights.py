"""The same plan, run key and data give the same weights: those of `make_private`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bandmf
from bandmf import Key
from bandmf.participation import FixedEpochs
from bandmf.torch import Training, make_private
from training import same_run, small_data, small_model, weights

KEY = Key(bytes(range(32)))
SMALL = {"epsilon": 8, "delta": 1e-3, "examples": 60, "batch_size": 6, "steps": 20}
PLANS = {
    "cyclic": {"sampling": "cyclic-poisson", "bands": 4},
    "bins, BLT": {"mechanism": "blt"},
    "bins, banded inverse": {"mechanism": "banded-inverse"},
    "b-min-sep": {"sampling": "b-min-sep", "bands": 4},
    "unamplified": {"participation": FixedEpochs(2), "adjacency": "zero-out"},
    "one band": {"bands": 1, "sampling": "cyclic-poisson"},
}


def losses(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def by_training(plan, **options):
    model = small_model(dropout=0.2)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    with same_run():
        training = Training(
            model, losses, optimizer, small_data(plan.examples), plan, clip_norm=0.5, key=KEY, scheduler=schedule,
            verify=False, **options,
        )  # fmt: skip
    assert list(training) == list(range(1, plan.steps + 1))
    return weights(model)


def by_make_private(plan, micro_batch=None):
    model = small_model(dropout=0.2)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    with same_run():
        private = make_private(
            model, optimizer, small_data(plan.examples), plan, clip_norm=0.5, key=KEY, loss_reduction="sum",
            scheduler=schedule, physical_batch_size=micro_batch, self_test=False,
        )  # fmt: skip
    while not private.finished:
        for batch in private.loader:
            losses(private.model, batch).sum().backward()
            private.optimizer.step()
            private.scheduler.step()
            private.optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("name", PLANS)
def test_training_gives_the_weights_of_make_private_bit_for_bit(name, micro_batch):
    plan = bandmf.plan(**{**SMALL, **PLANS[name]})
    assert torch.equal(by_training(plan, micro_batch=micro_batch), by_make_private(plan, micro_batch))
