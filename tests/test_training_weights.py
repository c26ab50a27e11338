"""The same plan, run key and data give the same weights, version after version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bandmf
from bandmf import Key
from bandmf.torch import Training
from training import same_run, small_data, small_model, weights

REFERENCE = Path(__file__).parent / "reference"
KEY = Key(bytes(range(32)))
PLANS = ("b-min-sep", "bins_BLT", "bins_banded_inverse", "cyclic", "one_band", "unamplified")


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
            **options,
        )  # fmt: skip
    assert list(training) == list(range(1, plan.steps + 1))
    return weights(model)


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("name", PLANS)
def test_the_same_plan_run_key_and_data_give_the_recorded_weights(name, micro_batch):
    """Recorded when Training gave, bit for bit, what the adapters before it did."""
    plan = bandmf.Plan.load(REFERENCE / "plans" / f"{name}.json")  # planning anew could give another certificate
    recorded = json.loads((REFERENCE / "torch_weights.json").read_text())[f"{name}, micro_batch={micro_batch}"]
    found = by_training(plan, micro_batch=micro_batch)
    np.testing.assert_allclose(found.numpy(), recorded, rtol=0, atol=1e-6)
