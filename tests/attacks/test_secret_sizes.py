"""The sizes of batches are secret: what follows them without noise is noticed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from bandmf.torch import make_private
from training import simple_plan, small_data

PLAN = simple_plan(steps=6, examples=200, batch_size=20)


def own_scheduler(step_when):
    """A run in pieces with a scheduler that make_private does not know; the learning rate at the end."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0 + count)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=4,
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    for x, y in private.loader:
        private.criterion(private.model(x), y).backward()
        private.optimizer.step()
        if step_when(private):
            scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_a_scheduler_that_counts_pieces_is_noticed():
    with pytest.warns(UserWarning, match="learning rate changed between two pieces"):
        rate = own_scheduler(lambda private: private.loader.rehearsals == 0)
    assert rate > 2 * PLAN.steps  # it has counted pieces


def test_a_scheduler_that_counts_steps_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_scheduler(lambda private: private.optimizer.stepped) == 1.0 + PLAN.steps
