"""Learning-rate schedules in the ordinary place of a loop: the rehearsals of the self-test do not count."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from bandmf.torch import make_private
from sweeps import in_turn
from training import simple_plan, small_data

STEPS = 12
PLAN = simple_plan(steps=STEPS, examples=60, batch_size=20, bands=1, noise_multiplier=0.01)
DATA = small_data(60)

SCHEDULES = {
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda count: 1 / (1 + count)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def step(scheduler):
    """A metric that only gets worse, where there is one: what rehearsals say must be forgotten."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 + scheduler.last_epoch)
    else:
        scheduler.step()


def optimizer_of(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def settings(optimizer):
    return [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]


def ordinary(make):
    """The settings of each step of a loop without privacy."""
    model, used = nn.Linear(8, 3), []
    optimizer = optimizer_of(model)
    scheduler = make(optimizer)
    for _ in range(STEPS):
        used.append(settings(optimizer))
        model(torch.zeros(1, 8)).sum().backward()
        optimizer.step()
        step(scheduler)
    return used


def private_run(optimizer=None, model=None, **options):
    model = nn.Linear(8, 3) if model is None else model
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    return make_private(model, optimizer, DATA, PLAN, clip_norm=1.0, **options)


def used_by(private, after):
    """The settings of each step of the plan, with `after` at the end of every batch."""
    used = []
    while not private.finished:
        for x, y in private.loader:
            private.optimizer.zero_grad()
            functional.cross_entropy(private.model(x), y).backward()
            before = settings(private.optimizer.original)
            private.optimizer.step()
            if private.optimizer.stepped:
                used.append(before)
            after()
    return used


@pytest.mark.parametrize(
    ("place", "name"), in_turn(["before", "after, raw", "after, private"], list(SCHEDULES))
)
def test_schedules_are_those_of_an_ordinary_loop(name, place):
    model = nn.Linear(8, 3)
    optimizer = optimizer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()", for one
        scheduler = SCHEDULES[name](optimizer) if place == "before" else None
        private = private_run(optimizer, model)
        if scheduler is None:
            scheduler = SCHEDULES[name](private.optimizer if place == "after, private" else optimizer)
        assert used_by(private, lambda: step(scheduler)) == ordinary(SCHEDULES[name])


def test_a_given_schedule_is_that_of_an_ordinary_loop():
    model = nn.Linear(8, 3)
    optimizer = optimizer_of(model)
    private = private_run(optimizer, model, scheduler=SCHEDULES["OneCycleLR"](optimizer))
    assert used_by(private, lambda: private.scheduler.step()) == ordinary(SCHEDULES["OneCycleLR"])


def test_a_rate_that_is_a_tensor_is_put_back_in_place():
    model = nn.Linear(8, 3)
    rate = torch.tensor(0.1)
    optimizer = optimizer_of(model, rate)
    scheduler = SCHEDULES["LinearLR"](optimizer)
    used = used_by(private_run(optimizer, model), scheduler.step)
    expected = [group[0][0] for group in ordinary(SCHEDULES["LinearLR"])]
    assert [group[0][0] for group in used] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_schedule_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(8, 3)
    optimizer = optimizer_of(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, SCHEDULES["LinearLR"](optimizer))
    private = private_run(optimizer, model)
    assert used_by(private, scheduler.step) == ordinary(SCHEDULES["LinearLR"])


def test_a_schedule_of_another_optimizer_goes_on():
    other = optimizer_of(nn.Linear(2, 2))
    scheduler = SCHEDULES["LambdaLR"](other)
    private = private_run()
    count = private.loader.rehearsals + STEPS
    used_by(private, lambda: (other.step(), scheduler.step()))
    assert scheduler.last_epoch == count


def test_rehearsals_left_in_the_middle_leave_the_schedule():
    model = nn.Linear(8, 3)
    optimizer = optimizer_of(model)
    scheduler = SCHEDULES["LinearLR"](optimizer)
    private = private_run(optimizer, model)
    batches = iter(private.loader)
    for _ in range(3):
        x, y = next(batches)
        functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1
    scheduler_of_checkpoint = {**scheduler.state_dict(), "last_epoch": 5}
    private.stepper.abandon()  # as a restart from a checkpoint does, before it loads the schedule
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    scheduler.load_state_dict(scheduler_of_checkpoint)
    del batches
    private.close()
    assert scheduler.last_epoch == 5


# --- schedules counted by hand -----------------------------------------------------------------------


def rates_by(private, rate):
    def set_rate():
        for group in private.optimizer.param_groups:
            group["lr"] = rate()

    return set_rate


def test_a_schedule_that_counts_batches_by_hand_is_refused():
    private, counted = private_run(), iter(range(1000))
    with pytest.raises(RuntimeError, match="a schedule counted the batches of the self-test"):
        used_by(private, rates_by(private, lambda: 0.1 * (1 - next(counted) / STEPS)))
    assert private.steps_taken == 0
    assert private.optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_that_is_given_the_number_of_batches_is_refused():
    private, counted = private_run(), iter(range(1000))
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(private.optimizer, 10)
    with pytest.raises(RuntimeError, match="a schedule counted the batches of the self-test"):
        used_by(private, lambda: scheduler.step(next(counted) / 10))


def test_a_scheduler_that_is_made_in_a_rehearsal_is_refused():
    private, made = private_run(), []

    def after():
        made.append(made or SCHEDULES["LinearLR"](private.optimizer))

    with pytest.raises(RuntimeError, match="a schedule counted the batches of the self-test"):
        used_by(private, after)


def test_a_schedule_that_counts_steps_by_hand_works():
    private = private_run()
    used = used_by(private, rates_by(private, lambda: 0.1 * (1 - private.steps_taken / STEPS)))
    assert [group[0][0] for group in used] == [0.1 * (1 - step / STEPS) for step in range(STEPS)]


def test_a_rate_that_shrinks_with_every_batch_works():
    private = private_run()
    used = used_by(private, rates_by(private, lambda: private.optimizer.param_groups[0]["lr"] / 2))
    assert [group[0][0] for group in used] == [0.1 / 2**step for step in range(STEPS)]


def test_rehearsals_on_a_plateau_may_differ():
    """A restart in the middle of one: then a loss of a rehearsal may or may not reduce the rate."""
    private = private_run()
    scheduler = lr_scheduler.ReduceLROnPlateau(private.optimizer, patience=0, factor=0.5)
    scheduler.step(1.0)
    metrics = iter([0.5, 2.0] * 4 + [0.5])
    used = used_by(private, lambda: scheduler.step(next(metrics, 0.1)))
    assert {group[0][0] for group in used[:2]} == {0.1}
