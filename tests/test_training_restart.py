"""Checkpoint and restart: the same weights and the same releases, whatever happens in between."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import children
from bandmf import Key
from bandmf.ledger import checkpoints
from bandmf.sampling import cyclic_poisson
from bandmf.torch import Training
from bandmf.torch.training.generators import RandomState, unseal
from children import HERE
from optimizers import OPTIMIZERS
from sweeps import in_turn
from training import losses, same_run, simple_plan, small_data, small_model, train, weights

PLAN = simple_plan(steps=12, examples=60, batch_size=10)


def open_run(folder, plan=PLAN, data=None, schedule=lambda optimizer: None, optimizer="Adam", **options):
    model = small_model(dropout=0.2)
    if optimizer == "Muon":  # which takes matrices alone
        model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 3, bias=False))
        torch.nn.init.constant_(model[1].weight, 0.1)
        torch.nn.init.eye_(model[0].weight)
    made = OPTIMIZERS[optimizer](model.parameters())
    saving = {} if folder is None else {"save_every": 4}
    options = {"clip_norm": 0.5, "verify": False, "key": Key(bytes(32)), **saving, **options}
    data = small_data(plan.examples) if data is None else data
    with same_run():
        return Training(model, losses, made, data, plan, folder=folder, scheduler=schedule(made), **options)


def killed(training):
    """As kill -9 leaves it: nothing is saved, but the lock is free."""
    training._let_go()
    training._progress.closed = True


def lines(folder):
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [entry["kind"] for entry in entries], {
        entry["step"]: (entry["batch"], entry["sum"]) for entry in entries if entry["kind"] == "step"
    }


@pytest.mark.parametrize("times", [9, pytest.param(60, marks=pytest.mark.long)])
def test_a_run_killed_many_times_ends_with_the_weights_of_one_that_was_not(times, tmp_path):
    result = children.run(HERE / "killed_training.py", tmp_path, str(times), timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    kills = json.loads(result.stdout)
    assert sum(kills.values()) >= 7
    assert all(kills[place] for place in ("accumulation", "ledger", "released", "checkpoint", "state"))
    clean, run = tmp_path / "clean", tmp_path / "killed"
    assert torch.equal(torch.load(clean / "final.pt"), torch.load(run / "final.pt"))
    (clean_kinds, clean_steps), (killed_kinds, killed_steps) = lines(clean), lines(run)
    assert killed_steps == clean_steps  # the same sums were released
    assert clean_kinds.count("replay") == 0 < killed_kinds.count("replay")
    assert set(killed_kinds) == {"run", "step", "replay"}


@pytest.mark.parametrize("times", [10, pytest.param(90, marks=pytest.mark.long)])
def test_a_notebook_that_is_interrupted_ends_with_the_weights_of_one_that_was_not(times, tmp_path):
    result = children.run(HERE / "interrupted_notebook.py", tmp_path, str(times), timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout)["interrupts"] >= times // 2
    clean, found = torch.load(tmp_path / "weights.pt")
    assert torch.equal(clean, found)


def test_a_restart_goes_on_from_the_last_checkpoint_bit_for_bit(tmp_path, caplog):
    caplog.set_level(logging.INFO, "bandmf")
    whole = train(open_run(tmp_path / "whole"))
    killed(train(open_run(tmp_path / "cut"), until=10))
    second = open_run(tmp_path / "cut", key=None)  # the key is in the folder
    assert "goes on after step 8 of 12" in caplog.text
    assert list(second) == [9, 10, 11, 12]
    assert torch.equal(weights(second.model), weights(whole.model))
    assert lines(tmp_path / "cut")[0].count("replay") == 2
    whole.close()
    third = open_run(tmp_path / "whole")
    assert third.finished
    assert list(third) == []


def test_closing_saves_what_was_not_saved(tmp_path):
    with open_run(tmp_path) as training:
        train(training, until=6)
    assert open_run(tmp_path).steps_taken == 6


def test_an_error_in_the_body_saves_nothing(tmp_path):
    """What the body does after a step may be half done."""
    training = train(open_run(tmp_path), until=6)
    with pytest.raises(KeyError), training:
        raise KeyError
    assert open_run(tmp_path).steps_taken == 4


def test_a_checkpoint_is_written_when_the_next_item_is_asked_for(tmp_path):
    """So that the body of its step has run, and `also=` is of that step."""
    model = small_model()
    average = AveragedModel(model)
    training = open_run(tmp_path, also={"average": average})
    for step in training:
        average.update_parameters(training.model)
        if step == 5:
            break
    killed(training)
    again = AveragedModel(small_model())
    other = open_run(tmp_path, also={"average": again})
    assert (other.steps_taken, int(again.n_averaged)) == (4, 4)
    other.close()
    with pytest.raises(ValueError, match=r"also=\[\]: the run was saved with 1 optimizers and also=\['average'\]"):
        open_run(tmp_path)


def test_sigterm_saves_and_then_has_its_effect(tmp_path):
    seen, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        training = open_run(tmp_path)
        for step in training:
            assert not seen
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
        assert (seen, training.steps_taken) == (["mine"], 6)
    finally:
        signal.signal(signal.SIGTERM, before)
    killed(training)
    assert open_run(tmp_path).steps_taken == 6


def test_sigterm_has_its_effect_when_the_last_of_several_runs_has_ended(tmp_path):
    seen, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        several = [iter(open_run(tmp_path / name)) for name in "ab"]
        assert [next(each) for each in several] == [1, 1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert next(several[0], None) is None  # it has saved, and the other has not
        assert not seen
        assert next(several[1], None) is None
        assert seen == ["mine"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"] * 2  # nobody listens any more
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_has_its_effect_after_an_iterator_ended_in_another_thread(tmp_path):
    seen, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        steps = iter(open_run(tmp_path))
        next(steps)
        other = threading.Thread(target=steps.close)
        other.start()
        other.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_has_its_effect_at_once(tmp_path):
    """A loop that is never asked for its next item again must not keep a process alive."""
    seen, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        steps = iter(open_run(tmp_path))
        next(steps)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not seen
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"]
        steps.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_beside_an_error_is_not_lost(tmp_path):
    training = train(open_run(tmp_path), until=2)

    def fail(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise MemoryError

    training._trained.optimizers[0].register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(training)
    assert isinstance(caught.value.__context__, MemoryError)


def test_another_model_is_named_by_what_it_lacks(tmp_path):
    killed(train(open_run(tmp_path), until=5))
    with pytest.raises(ValueError, match=r"model='0\.bias': is in the checkpoint but not in this model; construct the"):
        open_run(tmp_path, optimizer="Muon")  # with a model of its own


def test_ctrl_c_waits_until_a_released_step_has_reached_the_weights(tmp_path):
    training, whole = open_run(tmp_path / "run"), train(open_run(tmp_path / "whole"))
    train(training, until=5)
    handle = training._trained.optimizers[0].register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(training)
    handle.remove()
    assert training.steps_taken == 6
    assert torch.equal(weights(train(training).model), weights(whole.model))


@pytest.mark.parametrize(("name", "until"), in_turn(list(OPTIMIZERS), [6, 2]))
def test_saving_changes_nothing_and_a_restart_restores_all_of_every_optimizer(name, until, tmp_path):
    plain = train(open_run(None, optimizer=name))
    killed(train(open_run(tmp_path, optimizer=name), until=until))
    again = open_run(tmp_path, optimizer=name)
    assert again.steps_taken == until // 4 * 4
    assert torch.equal(weights(train(again).model), weights(plain.model))


SCHEDULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=13),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "function": lambda o: lambda step: 0.1 / (1 + step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_after_a_restart(name, tmp_path):
    whole = train(open_run(None, schedule=SCHEDULES[name]))
    killed(train(open_run(tmp_path, schedule=SCHEDULES[name]), until=6))
    again = open_run(tmp_path, schedule=SCHEDULES[name])
    assert torch.equal(weights(train(again).model), weights(whole.model))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clip_norm", {"clip_norm": 0.6}),
        ("plan", {"plan": simple_plan(steps=12, examples=60, batch_size=10, noise_multiplier=0.4)}),
        ("steps", {"plan": simple_plan(steps=13, examples=60, batch_size=10)}),
        ("per_layer", {"per_layer": True}),
        ("key", {"key": Key(bytes([1] * 32))}),
    ],
)
def test_a_run_goes_on_only_as_it_began_and_a_refusal_locks_nothing(tmp_path, name, change):
    killed(train(open_run(tmp_path), until=5))
    with pytest.raises(ValueError, match=f"^{name}") as kept:
        open_run(tmp_path, **change)
    assert kept.tb is not None
    assert open_run(tmp_path).steps_taken == 4


def test_another_sampler_is_refused(tmp_path, monkeypatch):
    killed(train(open_run(tmp_path), until=5))
    describe = cyclic_poisson.describe
    monkeypatch.setattr(cyclic_poisson, "describe", lambda *a, **k: {**describe(*a, **k), "version": 2})
    with pytest.raises(ValueError, match=r"sampler=.*the privacy of the plan rests on"):
        open_run(tmp_path)


def test_steps_that_cannot_be_repeated_are_lost_and_never_released_twice(tmp_path, caplog):
    killed(train(open_run(tmp_path), until=6))
    before = lines(tmp_path)[1]
    data = small_data(60)
    data.tensors[0][:] += 1
    training = open_run(tmp_path, data=data)
    at_checkpoint = weights(training.model)
    assert training.advance() == 7
    assert "steps 5 to 6 were released before the restart and cannot be repeated" in caplog.text
    assert not torch.equal(weights(training.model), at_checkpoint)
    after = lines(tmp_path)[1]
    assert {step: after[step] for step in before} == before
    assert training.spent() == training.plan.spent_after(7)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    training = train(open_run(tmp_path), until=6)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "publish", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            training.save()
    killed(training)
    second = open_run(tmp_path)
    assert second.steps_taken == 4
    train(second)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(kept) == 2
    assert not any(name.startswith(".") for name in kept)


def test_what_was_spent_before_a_restart_counts(tmp_path):
    killed(train(open_run(tmp_path), until=7))
    again = open_run(tmp_path)
    assert again.steps_taken == 4
    assert again.spent() == again.plan.spent_after(7)


def test_a_ledger_with_a_second_name_is_refused_or_goes_on_alone(tmp_path):
    """A hard link elsewhere could be a second run of the same noise."""
    training = train(open_run(tmp_path / "one"), until=5)
    killed(training)
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=os.link)
    with pytest.raises(ValueError, match=r"moved, copied or restored|link"):
        open_run(tmp_path / "two")


def test_a_key_that_is_a_dangling_link_is_refused(tmp_path):
    killed(train(open_run(tmp_path), until=5))
    os.replace(tmp_path / "key", tmp_path / "elsewhere")
    (tmp_path / "key").symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match="its key is a link to a file that is not there; restore that file"):
        open_run(tmp_path, key=None)
    os.replace(tmp_path / "elsewhere", tmp_path / "missing")
    assert open_run(tmp_path, key=None).steps_taken == 4


def test_the_generators_of_all_gpus_come_back_as_they_were():
    """By their bytes, as there may be none here."""
    key, gpus = Key(), [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    sealed = RandomState({"cpu": torch.get_rng_state(), "cuda": gpus}).sealed(key, "step 3 rank 0")
    opened = unseal(sealed, key, "step 3 rank 0")
    assert torch.equal(opened._cpu, torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(opened._gpus, gpus, strict=True))
    assert unseal(sealed, key, "step 3 rank 1") is None


@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
def test_another_optimizer_is_refused_before_a_step_is_spent(tmp_path, kind):
    begun = open_run(tmp_path)
    train(begun, until=5)
    begun.close()
    with pytest.raises(ValueError, match=rf"optimizer='{kind}': is not what the run began with"):
        open_run(tmp_path, optimizer=kind)
    again = open_run(tmp_path)
    assert again.steps_taken == 5
    again.close()
