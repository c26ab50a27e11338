"""What a loop may do between steps, what data may be, and what is refused before anything is opened."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import pickle
import random
import re
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bandmf import Key
from bandmf.ledger.progress import Progress
from bandmf.torch import Training
from training import losses, same_run, simple_plan, small_data, small_model, train, weights

STEPS = 12
PLAN = simple_plan(steps=STEPS, examples=60, batch_size=20, bands=2)


def open_run(model=None, optimizer=None, data=None, plan=PLAN, losses=losses, **options):
    model = small_model() if model is None else model
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = small_data(plan.examples) if data is None else data
    options = {"clip_norm": 0.5, "key": Key(bytes(32)), "verify": False, **options}
    with same_run():
        return Training(model, losses, optimizer, data, plan, **options)


@pytest.fixture(scope="module")
def expected():
    return weights(train(open_run()).model)


def weights_of(body=lambda training, step: None, **options):
    """After a whole run with this body of its loop."""
    training = open_run(**options)
    for step in training:
        body(training, step)
    return weights(training.model)


class IterableOf(IterableDataset):
    """The same item for ever."""

    def __init__(self, item):
        self.item = item

    def __iter__(self):
        return iter([self.item] * 60)


# --- the body of the loop ---------------------------------------------------------------------------------


def evaluates(training, step):
    training.model.eval()
    with torch.no_grad():
        training.model(torch.randn(5, 8))


def toggles(training, step):
    training.model.requires_grad_(step % 2 == 0)


def leaves_gradients(training, step):
    losses(training.model, (torch.randn(5, 8), torch.zeros(5).long())).sum().backward()


def copies(training, step):
    twin = pickle.loads(pickle.dumps(copy.deepcopy(training.model)))
    losses(twin, (torch.randn(5, 8), torch.zeros(5).long())).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())  # an ordinary model


def draws(training, step):
    torch.manual_seed(step)
    torch.rand(3)


@pytest.mark.parametrize("body", [evaluates, toggles, leaves_gradients, copies, draws])
def test_a_loop_may_do_between_steps_what_it_likes(body, expected):
    assert torch.equal(weights_of(body), expected)


def in_turns(one, other):
    for _ in zip(one, other, strict=True):
        pass


def in_threads(one, other):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, (one, other)))


@pytest.mark.parametrize("go", [in_turns, in_threads])
def test_two_runs_side_by_side_draw_what_each_draws_alone(go):
    def pair():
        return [open_run(small_model(dropout=0.5), key=Key(bytes([number]) * 32)) for number in (1, 2)]

    alone, together = pair(), pair()
    for training in alone:
        train(training)
    before = torch.get_rng_state()
    go(*together)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(weights(one.model), weights(other.model))
    assert not torch.equal(weights(alone[0].model), weights(alone[1].model))
    assert torch.equal(torch.get_rng_state(), before)


IN_THE_MIDDLE = "in the middle of a step or a checkpoint: call it from one thread, and not from its losses"


@pytest.mark.parametrize("call", ["advance", "close"])
def test_losses_that_call_the_run_are_refused(call, expected):
    def meddling(model, batch):
        if meddling.on:
            getattr(training, call)()
        return losses(model, batch)

    meddling.on, training = True, open_run(losses=meddling)
    with pytest.raises(RuntimeError, match=IN_THE_MIDDLE):
        training.advance()
    meddling.on, training._progress.closed = False, False
    assert torch.equal(weights(train(training).model), expected)


@pytest.mark.parametrize("call", ["advance", "save"])
def test_a_second_thread_takes_no_part_in_a_step(call, expected, tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def slow(model, batch):
        if threading.current_thread() is not threading.main_thread():  # where the constructor looks at copies
            inside.set()
            assert go_on.wait(30)
        return losses(model, batch)

    training = open_run(losses=slow, folder=tmp_path)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(train, training)
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match=IN_THE_MIDDLE):
            getattr(training, call)()
        go_on.set()
        assert torch.equal(weights(whole.result().model), expected)


def test_a_step_leaves_modes_and_requires_grad_as_the_loop_has_them():
    training = open_run()
    for step in training:
        assert all(p.requires_grad == (step % 2 == 1) for p in training.model.parameters())
        assert training.model.training == (step % 2 == 1)
        assert all(p.grad is None for p in training.model.parameters())  # nothing of a sum is left
        training.model.requires_grad_(step % 2 == 0).train(step % 2 == 0)


def test_a_step_is_taken_in_the_modes_of_the_start():
    model = small_model(dropout=0.5)
    model[2].eval()  # frozen dropout
    training = open_run(model)
    for _ in training:
        training.model.train()
        assert model[2].training
    assert torch.equal(weights(model), weights_of())


def test_an_average_in_the_body_is_that_of_the_steps():
    model, kept = small_model(), []
    average = AveragedModel(model)
    for _ in open_run(model):
        average.update_parameters(model)
        kept.append(weights(model))
    assert int(average.n_averaged) == STEPS
    torch.testing.assert_close(weights(average), torch.stack(kept).mean(0), rtol=1e-5, atol=1e-6)


def test_learning_rates_set_in_the_body_act_on_the_next_step():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = open_run(model, optimizer)
    before = weights(model)
    for step in training:
        moved, before = not torch.equal(weights(model), before), weights(model)
        assert moved == (step % 2 == 1)
        optimizer.param_groups[0]["lr"] = 0.0 if step % 2 == 1 else 0.1


def test_advance_is_an_item_of_the_loop(expected):
    training = open_run()
    assert [training.advance() for _ in range(STEPS)] == list(range(1, STEPS + 1))
    assert torch.equal(weights(training.model), expected)
    with pytest.raises(RuntimeError, match=f"all {STEPS} steps of the plan were taken"):
        training.advance()


def test_a_loop_that_is_left_goes_on(expected):
    training = train(open_run(), until=5)
    assert list(training) == list(range(6, STEPS + 1))
    assert list(training) == []
    assert torch.equal(weights(training.model), expected)


# --- optimizers and schedules -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_sees_the_released_means_and_nothing_else(make):
    """A twin that is fed the same takes the same steps."""
    model, twin = small_model(), small_model()
    optimizer, other = make(model.parameters(), lr=0.1), make(twin.parameters(), lr=0.1)

    def feed(*_):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        other.step()

    optimizer.register_step_post_hook(feed)
    train(open_run(model, optimizer))
    assert torch.equal(weights(model), weights(twin))
    assert not torch.equal(weights(model), weights(small_model()))


def test_several_optimizers_share_a_model(expected):
    model = small_model()
    several = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
    schedules = [lr_scheduler.ConstantLR(each, 1.0) for each in several]
    assert torch.equal(weights_of(model=model, optimizer=several, scheduler=schedules), expected)


@pytest.mark.parametrize("when", ["frozen at the start", "added in the loop"])
def test_parameters_that_are_not_the_models_get_no_update(when):
    """Not even where `losses` gives them a gradient, which has no noise."""
    foreign, model = nn.Parameter(torch.ones(3)), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "frozen at the start":
        foreign.requires_grad_(False)
        optimizer.add_param_group({"params": [foreign]})

    def with_one_of_its_own(model, batch):
        if foreign.requires_grad:
            (foreign.sum() * batch[0].sum()).backward()
        return losses(model, batch)

    training = open_run(model, optimizer, losses=with_one_of_its_own)
    for step in training:
        if step == 1:
            foreign.requires_grad_(True)
            if when == "added in the loop":
                optimizer.add_param_group({"params": [foreign]})
    assert torch.equal(foreign, torch.ones(3))


def test_what_no_optimizer_holds_stays_as_it_is_though_it_is_unfrozen_in_the_body():
    model = small_model()
    model[0].weight.requires_grad_(False)
    before, optimizer = weights(model[0]), torch.optim.SGD(model.parameters(), lr=0.1)
    training = open_run(model, optimizer)
    assert "0.weight" not in training._stepper.sums.views
    for _ in training:
        model.requires_grad_(True)
    assert torch.equal(model[0].weight.flatten(), before[: model[0].weight.numel()])
    assert not torch.equal(weights(model[0]), before)


SCHEDULES = {
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda count: 1 / (1 + count)),
}


def rates(scheduler_of, run):
    """The rate of each step."""
    model, used = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = scheduler_of(optimizer)
    optimizer.register_step_pre_hook(lambda *_: used.append(float(optimizer.param_groups[0]["lr"])))
    run(model, optimizer, scheduler)
    return used


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_an_ordinary_loop(name):
    def ordinary(model, optimizer, scheduler):
        for _ in range(STEPS):
            model(torch.zeros(1, 8)).sum().backward()
            optimizer.step()
            scheduler.step()

    def private(model, optimizer, scheduler):
        train(open_run(model, optimizer, scheduler=scheduler, micro_batch=4))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates(SCHEDULES[name], private) == rates(SCHEDULES[name], ordinary)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_function_of_the_steps_taken_is_a_schedule(rate):
    model, used = small_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    optimizer.register_step_pre_hook(lambda *_: used.append(float(optimizer.param_groups[0]["lr"])))
    train(open_run(model, optimizer, scheduler=lambda step: 0.1 / (1 + step)))
    assert used == pytest.approx([0.1 / (1 + step) for step in range(STEPS)])
    assert (optimizer.param_groups[0]["lr"] is rate) == isinstance(rate, torch.Tensor)


def test_a_plateau_is_stepped_in_the_body():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    with pytest.raises(ValueError, match=r"scheduler='ReduceLROnPlateau'.*in the loop's body"):
        open_run(model, optimizer, scheduler=plateau)
    for _ in open_run(model, optimizer):
        plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1


# --- data -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """(index, example) for all examples, backwards."""

    def __init__(self, data):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        return ((index, self.data[index]) for index in reversed(range(len(self.data))))


class Plain(Dataset):
    def __init__(self):
        self.data = small_data(60)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.data[index]


class Fetched(Plain):
    def __getitems__(self, indices):
        return [self.data[index] for index in indices]


WAYS = {
    "data set": {"data": Plain()},
    "all at once": {"data": Fetched()},
    "list": {"data": list(small_data(60))},
    "workers": {"data": Plain(), "workers": 2},
    "DataLoader": {"data": DataLoader(Plain(), batch_size=20, shuffle=True)},
    "stream": {"data": Stream(small_data(60))},
    "DataLoader of a stream": {"data": DataLoader(Stream(small_data(60)), batch_size=20)},
    "collate": {"collate": lambda rows: [torch.stack(part) for part in zip(*rows, strict=True)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_however_batches_are_loaded_the_weights_are_the_same(way, expected):
    assert torch.equal(weights_of(**WAYS[way]), expected)


def test_one_pass_over_a_stream_collects_a_turn_of_all_parts():
    stream = Stream(small_data(60))
    train(open_run(data=stream))
    assert stream.passes == 1 + STEPS // 2, "and one before the first step, for examples to try the losses on"
    with pytest.raises(ValueError, match="the stream ended before it gave every index"):
        train(open_run(data=Stream(small_data(30))))


@pytest.mark.parametrize("change", [lambda rows: rows.pop(0), lambda rows: rows.append(rows[0])])
def test_a_data_set_that_changes_its_length_during_the_run_is_refused(change):
    rows = list(small_data(60))
    training = train(open_run(data=rows), until=3)
    training._batches.forget()  # as a step that fails does
    change(rows)
    with pytest.raises(ValueError, match=r"^len\(data\)=.*was 60 when the run began"):
        train(training)


@pytest.mark.parametrize(("size", "told"), [(7, True), (20, False), (1, False)])
def test_a_batch_size_that_is_not_used_is_named_once(size, told):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        open_run(data=DataLoader(small_data(60), batch_size=size))
    found = [str(each.message) for each in said if "DataLoader" in str(each.message)]
    assert found == told * [
        f"DataLoader(batch_size={size}): not used; the plan draws the batches, of about 20 examples"
    ]


class Drawing(torch.utils.data.Dataset):
    """Its examples are drawn from the global generators, as augmentation does it."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.randn(8) + random.random() + np.random.random(), torch.tensor(index % 3)


def test_looking_at_a_few_examples_draws_nothing_from_the_users_generators():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    open_run(data=Drawing(), verify=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


# --- what is refused ---------------------------------------------------------------------------------------


def lbfgs():
    return {"optimizer": torch.optim.LBFGS(small_model().parameters())}


def sparse():
    return {"optimizer": torch.optim.SparseAdam(small_model().parameters())}


def a_schedule_in_its_place():
    return {"optimizer": lr_scheduler.StepLR(torch.optim.SGD(small_model().parameters(), lr=0.1), 3)}


def of_others():
    model = small_model()
    return {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)}


def other_schedule():
    return {"scheduler": lr_scheduler.StepLR(torch.optim.SGD(small_model().parameters(), lr=0.1), 3)}


def frozen():
    model = small_model().requires_grad_(False)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


REFUSED = {
    "^clip_norm=0": {"clip_norm": 0},
    "^clip_norm=nan": {"clip_norm": float("nan")},
    "^clip_norm='1'": {"clip_norm": "1"},
    "^clipping='fast': must be one of": {"clipping": "fast"},
    "^micro_batch=0": {"micro_batch": 0},
    "^save_every=0": {"save_every": 0},
    "^workers=-1": {"workers": -1},
    "^model='str': must be a torch.nn.Module": {"model": "x", "optimizer": 1},
    "^losses='CrossEntropyLoss': must be a function": {"losses": nn.CrossEntropyLoss()},
    "^optimizer='str': must be a torch.optim.Optimizer": {"optimizer": "x"},
    "^optimizer='LBFGS'": lbfgs,
    "^optimizer='SparseAdam': needs sparse gradients": sparse,
    "^optimizer='StepLR': must be a torch.optim.Optimizer": a_schedule_in_its_place,
    "^optimizer: holds parameters that are not the model's": of_others,
    "^optimizer: holds no trainable parameter": frozen,
    "^scheduler='StepLR': is for another optimizer": other_schedule,
    "^scheduler='str'": {"scheduler": "cosine"},
    "^also=": {"also": {"average": 1}},
    "^data='int'": {"data": 7},
    "^workers=1: must be 0": {"data": Stream(small_data(60)), "workers": 1},
    "^key='bytes': must be a bandmf.Key": {"key": bytes(32)},
    r"^len\(data\)=50|^examples|must be the plan's examples=60": {"data": small_data(50)},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_every_argument_is_checked_and_nothing_is_left_locked(sentence, tmp_path):
    given = REFUSED[sentence]
    with pytest.raises(ValueError, match=sentence) as kept:
        open_run(folder=tmp_path / "run", **(given() if callable(given) else given))
    assert kept.tb is not None  # it holds the frames, and what they hold
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert train(open_run(folder=tmp_path / "run")).finished


def test_something_else_in_place_of_a_plan_gets_one_sentence():
    with pytest.raises(ValueError, match=r"plan='dict': must be a Plan; make one with bandmf\.plan"):
        Training(small_model(), losses, None, small_data(), {"epsilon": 8}, clip_norm=1.0)


def test_saving_needs_a_folder():
    with pytest.raises(ValueError, match="save_every=3: there is nowhere to save"):
        open_run(save_every=3)
    with pytest.raises(ValueError, match="folder=None: there is nowhere to save"):
        open_run().save()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"folder='.*/file/run': cannot be made .*; give another folder"):
        open_run(folder=tmp_path / "file" / "run")


# --- how a run ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [True, False])
def test_an_optimizer_that_fails_is_known_and_the_way_on_is_named(folder, tmp_path, expected):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = open_run(model, optimizer, folder=tmp_path if folder else None)
    train(training, until=4)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.advance()
    handle.remove()
    way = "construct Training again with this folder" if folder else "without a folder it cannot go on"
    for act in (training.advance, *([training.save] if folder else [])):
        with pytest.raises(RuntimeError, match=f"step=5: was released, but an error kept it.*{way}"):
            act()
    training.close()
    if folder:
        assert torch.equal(weights(train(open_run(folder=tmp_path)).model), expected)


def test_losses_that_fail_once_leave_the_step_to_be_taken_again(expected):
    calls = []

    def fickle(model, batch):
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("a mistake of the user's")
        return losses(model, batch)

    training = open_run(losses=fickle)
    calls.clear()
    with pytest.raises(KeyError):
        train(training)
    assert training.steps_taken == 3
    assert torch.equal(weights(train(training).model), expected)


def said(caplog):
    return [each.message for each in caplog.records if "the run ended after step" in each.message]


@pytest.mark.parametrize("end", ["closed", "with", "error", "forgotten"])
def test_a_run_that_ends_unfinished_says_so_once(end, caplog):
    caplog.set_level(logging.WARNING, "bandmf")
    training = train(open_run(), until=3)
    if end == "closed":
        training.close()
        training.close()
    elif end == "with":
        with training:
            pass
    elif end == "error":
        with pytest.raises(KeyError), training:
            raise KeyError
    if end != "forgotten":
        with pytest.raises(RuntimeError, match="this run was closed; construct Training again"):
            training.advance()
    del training
    assert said(caplog) == [f"the run ended after step 3 of {STEPS}; without a folder it cannot go on"]


def test_a_run_that_ends_with_its_plan_says_nothing(caplog):
    caplog.set_level(logging.WARNING, "bandmf")
    with open_run() as training:
        train(training)
    assert not caplog.records


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, "fast"])
def test_a_rate_that_is_none_is_refused_before_a_step_is_spent(rate):
    training = open_run(scheduler=lambda step: rate if step == 2 else 0.1)
    with pytest.raises(ValueError, match=r"scheduler's rate|could not convert"):
        train(training)
    assert (training.steps_taken, training._progress.released) == (2, 2)


def test_ctrl_c_in_the_last_update_leaves_a_finished_run(caplog):
    caplog.set_level(logging.WARNING, "bandmf")

    def interrupt(*_):
        if training.steps_taken == STEPS - 1:
            signal.raise_signal(signal.SIGINT)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), open_run(model, optimizer) as training:
        train(training)
    assert training.finished
    assert not caplog.records


def test_ctrl_c_while_a_call_begins_leaves_the_run_to_the_next_one():
    lines, first = inspect.getsourcelines(Progress.alone.__wrapped__)
    begun = next(n for n, line in enumerate(lines) if line.strip() == "yield")
    for number in range(first, first + begun + 1):
        progress = Progress(STEPS, None)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(Progress.alone, number), progress.alone():
            pass
        with progress.alone():
            pass


@contextlib.contextmanager
def interrupted_at(function, number):
    """Ctrl-C just before this line runs."""

    def trace(frame, event, _):
        if frame.f_code is not function.__wrapped__.__code__:
            return None
        if event == "line" and frame.f_lineno == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_weights_that_are_not_finite_any_more_are_warned_of(caplog):
    model = small_model()
    train(open_run(model, torch.optim.SGD(model.parameters(), lr=1e38), clip_norm=1e6))
    assert any("weights are not finite any more" in each.message for each in caplog.records)


def test_they_are_warned_of_once(caplog):
    progress = Progress(350, None)
    for step in range(1, 351):
        progress.applied(step)
        progress.look(lambda: False)
    assert [each.getMessage()[:9] for each in caplog.records] == ["step 100:"]


def test_dropout_in_eval_mode_is_noted(caplog):
    open_run(small_model(dropout=0.5).eval())
    assert "is in eval mode, so it is trained without dropout" in caplog.text


def test_what_verify_could_not_compare_is_said(caplog):
    def shaken(model, batch):
        return losses(model, batch) * (1 + np.random.rand() * len(batch[0]) ** 0.5)

    training = open_run(losses=shaken, verify=True)
    assert "was not compared alone and in company" in caplog.text
    assert "none was found to depend on others.\n  losses was not compared" in training.explain()
    assert "Verified on a few examples: none was found to depend on others.\nNo guarantee" in (
        open_run(verify=True).explain()
    )


def test_losses_that_fail_on_one_example_are_never_given_one_alone():
    """A forgotten dimension of squeeze() ends no run in the middle."""

    def squeezed(model, batch):
        x, y = batch
        assert y.squeeze().ndim == 1
        return functional.mse_loss(model(x)[:, :1].squeeze(), y.squeeze().float(), reduction="none")

    plan = simple_plan(steps=40, examples=60, batch_size=2, bands=2)  # many batches of one, and of none
    whole, cut = (train(open_run(plan=plan, losses=squeezed, micro_batch=size)) for size in (None, 2))
    torch.testing.assert_close(weights(whole.model), weights(cut.model), rtol=0, atol=1e-5)


def test_a_run_that_is_finished_keeps_no_workers():
    training = train(open_run(workers=1))
    assert training._batches._loaded is None


def test_a_run_shows_where_it_is(tmp_path):
    training = train(open_run(folder=tmp_path), until=2)
    assert repr(training) == f"Training(step 2 of {STEPS}, epsilon=inf at delta=1e-06, folder={str(tmp_path)!r})"
    assert "Not verified" in training.explain()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((torch.zeros(60, 8), torch.zeros(60)), "len(data)=2: must be the plan's examples=60"),
        (((index, torch.zeros(8)) for index in range(60)), "can be read once only"),
        (IterableOf((torch.zeros(8), torch.zeros(()))), "a stream must give pairs (index, example)"),
    ],
)
def test_data_of_another_form_are_told_so_and_not_by_the_loss(data, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        open_run(data=data, verify=True)
