"""The sizes of batches are secret: a learning rate must not follow the number of pieces that they are cut into."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from bandmf.torch import make_private
from bandmf.torch.training import optimizer as private_optimizer
from training import simple_plan, small_data

PLAN = simple_plan(steps=6, examples=200, batch_size=20)
SCHEDULES = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda count: 1.0 + count),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 4, 0.1),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=PLAN.steps),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
}


def rates_in_pieces(make, after_batch):
    """A run in pieces with a schedule that make_private does not know: the learning rate of every step."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=4,
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    used = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    for count, (x, y) in enumerate(private.loader):
        private.criterion(private.model(x), y).backward()
        private.optimizer.step()
        after_batch(private, scheduler, count)
    return used


def ordinary_rates(make):
    optimizer = torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=1.0, momentum=0.9)
    scheduler, used = make(optimizer), []
    for _ in range(PLAN.steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(used) < PLAN.steps:
            scheduler.step()
    return used


def always(private, scheduler, count):
    if not private.finished:
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_stepped_after_every_piece_counts_steps(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates_in_pieces(SCHEDULES[name], always) == ordinary_rates(SCHEDULES[name])


def test_a_scheduler_that_is_not_put_back_would_count_pieces(monkeypatch):
    """The planted error: what the test above has to see."""
    monkeypatch.setattr(private_optimizer.Schedules, "end_piece", lambda self: None)
    found = rates_in_pieces(SCHEDULES["LambdaLR"], always)
    assert found[-1] > 2 * PLAN.steps


def test_a_scheduler_that_is_stepped_with_the_steps_is_left_alone():
    def with_steps(private, scheduler, count):
        if private.optimizer.stepped:
            scheduler.step()

    assert rates_in_pieces(SCHEDULES["LambdaLR"], with_steps) == [1.0 + step for step in range(PLAN.steps)]


def test_a_rate_that_counts_pieces_by_hand_is_refused():
    def by_hand(private, scheduler, count):
        if not private.loader.rehearsals:
            private.optimizer.param_groups[0]["lr"] = 1.0 / (1 + count)

    with pytest.raises(RuntimeError, match="learning rate changed between two pieces"):
        rates_in_pieces(lambda optimizer: None, by_hand)
