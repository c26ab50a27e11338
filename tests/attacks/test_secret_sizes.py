"""The sizes of batches are secret: no rate or average may follow the number of pieces that they are cut into."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bandmf.torch import make_private
from bandmf.torch.training import schedules
from bandmf.torch.training.schedules.calls import Calls
from sweeps import in_turn
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
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
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
    monkeypatch.setattr(schedules.Schedules, "end_piece", lambda self: None)
    found = rates_in_pieces(SCHEDULES["LambdaLR"], always)
    assert found[-1] > 2 * PLAN.steps


def test_a_scheduler_that_is_stepped_with_the_steps_is_left_alone():
    def with_steps(private, scheduler, count):
        if private.optimizer.stepped:
            scheduler.step()

    assert rates_in_pieces(SCHEDULES["LambdaLR"], with_steps) == [1.0 + step for step in range(PLAN.steps)]


def test_a_scheduler_made_in_the_middle_counts_steps():
    made = []

    def later(private, scheduler, count):
        if not private.loader.rehearsals and not made:
            made.append(lr_scheduler.StepLR(private.optimizer.original, 3, 0.1))
        elif made and not private.finished:
            made[0].step()

    found = rates_in_pieces(lambda optimizer: None, later)
    assert found[:3] == [1.0] * 3
    assert found[3:] == pytest.approx([0.1] * 3)


def test_a_scheduler_that_nobody_holds_is_free():
    optimizer = torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=1.0)
    scheduler, known = lr_scheduler.StepLR(optimizer, 1, 0.5), schedules.Known(optimizer)
    assert known.schedulers() == [scheduler]
    there = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert (there(), known.schedulers()) == (None, [])


def test_a_step_that_was_left_holds_no_schedule():
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=4, self_test=False
    )
    for _ in range(2):
        for x, y in private.loader:
            nn.functional.cross_entropy(model(x), y).backward()
            private.optimizer.step()
            if not private.optimizer.stepped:
                break
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("ends", ["break", "close"])
def test_pieces_of_a_step_that_was_left_do_not_count(ends):
    """The schedule was one ahead."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=4, self_test=False
    )
    batches = iter(private.loader)
    while not (private.steps_taken == 2 and not private.optimizer.stepped):
        x, y = next(batches)
        nn.functional.cross_entropy(model(x), y).backward()
        private.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 3
    if ends == "break":
        del batches  # as when a loop ends
    else:
        private.close()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.25)


def test_a_rate_that_is_set_after_a_step_was_left_stays():
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=4, self_test=False
    )
    batches = iter(private.loader)
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    private.optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5  # in a notebook, where the traceback of an error keeps `batches`
    next(iter(private.loader))
    assert optimizer.param_groups[0]["lr"] == 0.5


def warm_restarts(optimizer):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_scheduler_that_is_given_a_count_of_pieces_is_refused(every):
    def given(private, scheduler, count):
        if not private.loader.rehearsals:
            scheduler.step(count // every)

    with pytest.raises(RuntimeError, match=r"optimizer\.param_groups changed between two pieces"):
        rates_in_pieces(warm_restarts, given)


def test_a_scheduler_that_is_stepped_after_some_pieces_is_refused():
    """As loops do that add gradients up themselves."""

    def some(private, scheduler, count):
        if not private.loader.rehearsals and count % 3 == 0:
            scheduler.step()

    with pytest.raises(RuntimeError, match=r"optimizer\.param_groups changed between two pieces"):
        rates_in_pieces(SCHEDULES["LambdaLR"], some)


@pytest.mark.parametrize("counts", ["pieces", "steps"])
def test_steps_of_two_pieces_are_compared_too(counts):
    """None of them lies between two others."""
    optimizer = torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=1.0)
    scheduler, count = warm_restarts(optimizer), 0
    pieces = schedules.Pieces(optimizer)

    def take(number):
        nonlocal count
        pieces.begin()
        pieces.end(partial=number % 2 == 0, stepped=number % 2 == 1)
        count += 1
        scheduler.step(count if counts == "pieces" else count // 2)

    for number in range(4):  # the first step may begin anywhere
        take(number)
    if counts == "steps":
        take(4)
        assert scheduler.last_epoch == 2
    else:
        with pytest.raises(RuntimeError, match=r"optimizer\.param_groups changed between two pieces"):
            take(4)


def test_a_scheduler_that_is_given_the_number_of_steps_works():
    """Even where it begins far from where it was, as after a restart."""

    def given(private, scheduler, count):
        scheduler.step(20 + private.steps_taken)

    found = rates_in_pieces(warm_restarts, given)
    optimizer = torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=1.0)
    scheduler, expected = warm_restarts(optimizer), []
    for step in range(1, PLAN.steps):
        scheduler.step(20 + step)
        expected.append(optimizer.param_groups[0]["lr"])
    assert found[1:] == expected


def test_a_plateau_may_go_by_the_losses_of_pieces():
    """It is not private, which nothing can notice; but it does not count pieces."""
    losses = iter([1.0, 0.5, 2.0] * 100)

    def given(private, scheduler, count):
        scheduler.step(next(losses))

    rates_in_pieces(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), given)


def test_a_switch_from_one_scheduler_to_another_works():
    made = []

    def switch(private, scheduler, count):
        (scheduler if private.steps_taken < 3 else made[0]).step()

    def two(optimizer):
        made.append(lr_scheduler.ConstantLR(optimizer, 1.0, 100))
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    assert rates_in_pieces(two, switch) == pytest.approx([1.0, 0.5, 0.25, 0.25, 0.25, 0.25])


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_settings_that_count_pieces_by_hand_are_refused(name):
    def by_hand(private, scheduler, count):
        if not private.loader.rehearsals:
            private.optimizer.param_groups[0][name] = 1.0 / (2 + count)

    with pytest.raises(RuntimeError, match=r"optimizer\.param_groups changed between two pieces"):
        rates_in_pieces(lambda optimizer: None, by_hand)


# --- averages of weights ----------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As DistributedDataParallel and torch.compile keep a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WHOLE, PART = (lambda model: model), (lambda model: model[0])


def average_of_run(part=WHOLE, wrap=WHOLE, pieces=None, before=False, **options):
    """The average after a run, and its mean of the weights after each step, computed by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    average = AveragedModel(part(model), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=pieces)
    kept = [part(model).state_dict() if before else None]
    for x, y in private.loader:
        if before:
            average.update_parameters(wrap(part(model)))
        nn.functional.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        if private.optimizer.stepped:
            kept.append({name: value.clone() for name, value in part(model).state_dict().items()})
        if not before:
            average.update_parameters(wrap(part(model)))
    private.close()
    return average, kept


@pytest.mark.parametrize("pieces", [None, 4])
@pytest.mark.parametrize(("part", "wrap"), [(WHOLE, WHOLE), (WHOLE, Wrapped), (PART, WHOLE)])
def test_averages_of_weights_count_steps(pieces, part, wrap):
    average, kept = average_of_run(part, wrap, pieces)
    assert int(average.n_averaged) == PLAN.steps
    for name, found in average.module.state_dict().items():
        expected = torch.stack([each[name] for each in kept[1:]]).mean(0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_moving_average_is_that_of_the_steps():
    average, kept = average_of_run(pieces=2, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = kept[1]["0.weight"]
    for each in kept[2:]:
        expected = (expected + each["0.weight"]) / 2
    torch.testing.assert_close(average.module[0].weight.data, expected)


def test_an_average_that_is_updated_before_each_batch_counts_the_first_weights_and_the_steps_but_the_last():
    average, _ = average_of_run(pieces=4, before=True)
    assert int(average.n_averaged) == PLAN.steps


def test_an_average_that_counts_pieces_would_be_seen(monkeypatch):
    """The planted error: what the tests above have to see."""
    monkeypatch.setattr(schedules, "_between_steps", lambda model: False)
    average, _ = average_of_run(pieces=4)
    assert int(average.n_averaged) > 2 * PLAN.steps


def test_averages_of_other_models_and_of_closed_runs_go_on():
    model, other = nn.Linear(8, 3), nn.Linear(8, 3)
    averages = AveragedModel(model), AveragedModel(other)
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), small_data(200), PLAN, clip_norm=0.5
    )
    x, y = next(iter(private.loader))
    nn.functional.cross_entropy(model(x), y).backward()
    private.optimizer.step()
    for average, each in zip(averages, (model, other), strict=True):
        average.update_parameters(each)
    assert [int(each.n_averaged) for each in averages] == [0, 1]
    private.close()
    averages[0].update_parameters(model)
    assert int(averages[0].n_averaged) == 1


def test_an_average_goes_on_when_a_loop_has_left_the_run_in_the_middle():
    """Training on public data that comes after it, without close()."""
    for batches in (1, 4):  # in the self-test, and at the first piece of a step
        model = nn.Linear(8, 3)
        private = make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), small_data(200), PLAN, clip_norm=0.5,
            physical_batch_size=4, self_test=batches == 1,
        )  # fmt: skip
        for count, (x, y) in enumerate(private.loader):
            nn.functional.cross_entropy(model(x), y).backward()
            private.optimizer.step()
            if count + 1 >= batches and not private.optimizer.stepped:
                break
        average = AveragedModel(model)
        average.update_parameters(model)
        assert int(average.n_averaged) == 1


def test_a_step_that_failed_is_no_step_for_averages_and_schedules():
    """What the step before it had said was still said."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, self_test=False,
        scheduler=lr_scheduler.StepLR(optimizer, 1, 0.5),
    )  # fmt: skip
    average = AveragedModel(model)
    for x, y in private.loader:
        if private.steps_taken == 1:
            with pytest.raises(RuntimeError, match="no gradients"):
                private.optimizer.step()
        else:
            nn.functional.cross_entropy(model(x), y).backward()
            private.optimizer.step()
        stepped = private.optimizer.stepped
        private.scheduler.step()
        average.update_parameters(model)
        if not stepped:
            break
    assert (private.scheduler.last_epoch, int(average.n_averaged)) == (1, 1)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bookkeeping"])
def test_no_gradients_of_examples_stay_after_a_piece(mode):
    """torch.save(model) would write them, without noise."""
    model = nn.Linear(8, 3)
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), small_data(200), PLAN, clip_norm=0.5,
        physical_batch_size=4, clipping=mode,
    )  # fmt: skip
    for x, y in private.loader:
        nn.functional.cross_entropy(model(x), y).backward()
        private.optimizer.step()
        for parameter in model.parameters():
            assert getattr(parameter, "grad_sample", None) is None
            assert private.optimizer.stepped or parameter.grad is None


# --- calls by a count of batches --------------------------------------------------------------------


def calls_in_pieces(after_batch, size, steps=80, given=False, self_test=True):
    """A run whose loop calls `after_batch(private, scheduler, average, count)`: what the two have counted."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler, average = lr_scheduler.StepLR(optimizer, 1000), AveragedModel(model)
    private = make_private(
        model, optimizer, small_data(200), simple_plan(steps=steps, examples=200, batch_size=20), clip_norm=0.5,
        physical_batch_size=size, epoch_steps=steps // 2, self_test=self_test,
        scheduler=scheduler if given else None,
    )  # fmt: skip
    batch = private.stepper.sampler.batch  # of sizes that are the same in every run of this test
    sizes = random.Random(1).choices(range(14, 28), k=steps)
    private.stepper.sampler.batch = lambda step: np.resize(batch(step), sizes[step])
    while not private.finished:
        for count, (x, y) in enumerate(private.loader):
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = private.steps_taken
            private.optimizer.step()
            after_batch(private, private.scheduler if given else scheduler, average, count, before)
    private.close()
    return scheduler.last_epoch, int(average.n_averaged)


def every(batches, of):
    def after(private, scheduler, average, count, before):
        if (count + 1) % batches == 0:
            scheduler.step() if of == "schedule" else average.update_parameters(private.model)

    return after


@pytest.mark.parametrize(
    ("kind", "case"),
    in_turn(
        [("schedule", False), ("schedule", True), ("average", False)],
        list(product([5, 10], [6, 20], [True, False])),
    ),
)
def test_calls_after_every_few_batches_are_refused(kind, case):
    """The calls after pieces were dropped, so the count of the others followed the sizes of batches.

    In steps of one or two pieces, as of size 20, it takes a few calls until one lies between two pieces.
    """
    (of, given), (batches, size, self_test) = kind, case
    with pytest.raises(RuntimeError, match=r"(was called after some batches|changed between two pieces)"):
        calls_in_pieces(every(batches, of), size, given=given, self_test=self_test)


def test_calls_that_nobody_watched_would_follow_the_sizes_of_batches(monkeypatch):
    """The planted error: what the test above has to see."""
    monkeypatch.setattr(Calls, "by_steps", lambda self, kind, called: True)
    counted = [calls_in_pieces(every(10, "average"), size)[1] for size in (6, 20)]
    assert counted[0] != counted[1]


def both(condition):
    def after(private, scheduler, average, count, before):
        if condition(private, before):
            scheduler.step()
            average.update_parameters(private.model)

    return after


def phases(private, before):
    """After every batch at first, later after some steps."""
    return private.steps_taken < 3 or (private.optimizer.stepped and private.steps_taken % 3 == 0)


BY_STEPS = {
    "always": (lambda private, before: True, 12),
    "with the steps": (lambda private, before: private.optimizer.stepped, 12),
    "some steps": (lambda private, before: private.optimizer.stepped and private.steps_taken % 4 == 0, 3),
    "number of steps": (lambda private, before: private.steps_taken % 4 == 0, 3),
    "number before the step": (lambda private, before: before % 4 == 0, 3),
    "from a step on": (lambda private, before: private.steps_taken >= 5, 8),
    "until a step": (lambda private, before: before < 5, 5),
    "at one step": (lambda private, before: before == 7, 1),
    "phases": (phases, 6),
    "never": (lambda private, before: False, 0),
}


@pytest.mark.parametrize(
    ("name", "case"), in_turn(list(BY_STEPS), list(product([None, 3, 20], [False, True])))
)
def test_calls_that_go_by_steps_are_counted(name, case):
    size, given = case
    condition, expected = BY_STEPS[name]
    assert calls_in_pieces(both(condition), size, steps=12, given=given) == (expected, expected)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("size", [None, 3, 20])
def test_calls_when_the_number_of_steps_is_another_are_counted(size, given):
    """Such a loop calls after the first rehearsal, at zero steps, and not after the second."""
    seen = [-1]

    def is_another(private, before):
        before, seen[0] = seen[0], private.steps_taken
        return before != private.steps_taken

    assert calls_in_pieces(both(is_another), size, steps=12, given=given) == (12, 12)


@pytest.mark.parametrize("size", [None, 6])
def test_calls_between_passes_are_counted(size):
    """As loops with epochs have it, even those that leave a pass in the middle of a step."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler, average = lr_scheduler.StepLR(optimizer, 1000), AveragedModel(model)
    private = make_private(
        model, optimizer, small_data(200), PLAN, clip_norm=0.5, physical_batch_size=size, epoch_steps=3
    )
    passes = 0
    while not private.finished:
        for count, (x, y) in enumerate(private.loader):
            nn.functional.cross_entropy(model(x), y).backward()
            private.optimizer.step()
            if count == 13:
                break
        scheduler.step()
        average.update_parameters(model)
        passes += 1
    assert (scheduler.last_epoch, int(average.n_averaged)) == (passes, passes)


def test_batches_of_whole_steps_may_be_counted():
    """Nothing is secret where each step is one batch."""
    assert calls_in_pieces(every(10, "average"), None)[1] > 0
