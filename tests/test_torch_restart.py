"""Checkpoint and restart: the same weights and the same releases, whatever happens in between."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import children
from bandmf import Key
from bandmf.torch import make_private
from bandmf.torch.training.random_state import RandomState, unseal
from children import HERE
from training import RUN_ID, same_run, simple_plan, small_data, small_model, train, weights


def open_run(folder, plan=None, data=None, **options):
    plan = plan or simple_plan(steps=12)
    model = small_model(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"clip_norm": 0.5, "criterion": torch.nn.CrossEntropyLoss(), "save_every": 4, **options}
    data = small_data() if data is None else data
    with same_run():
        return make_private(model, optimizer, data, plan, run_folder=folder, **options)


def kinds(folder):
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [entry["kind"] for entry in entries], {
        entry["step"]: (entry["batch"], entry["sum"]) for entry in entries if entry["kind"] == "step"
    }


@pytest.mark.parametrize("times", [7, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_many_times_is_the_run_that_was_not(times, tmp_path):
    result = children.run(HERE / "killed_training.py", tmp_path, str(times), timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    kills = json.loads(result.stdout)
    assert sum(kills.values()) == times
    assert min(kills.values()) >= times // 7  # in every kind of place
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    assert torch.equal(torch.load(clean / "final.pt"), torch.load(killed / "final.pt"))
    (clean_kinds, clean_steps), (killed_kinds, killed_steps) = kinds(clean), kinds(killed)
    assert killed_steps == clean_steps  # the same sums were released
    assert clean_kinds.count("replay") == 0
    assert killed_kinds.count("replay") > 0
    assert set(killed_kinds) == {"run", "step", "replay"}


def test_a_restart_goes_on_from_the_last_checkpoint_bit_for_bit(tmp_path):
    key = Key()
    whole = train(open_run(tmp_path / "whole", key=key))
    first = train(open_run(tmp_path / "cut", key=key), until=10)
    first.close()
    second = open_run(tmp_path / "cut")  # the key is in the folder
    assert second.resume()
    assert second.steps_taken == 8
    train(second)
    assert torch.equal(weights(second.model), weights(whole.model))
    assert second.ledger.replays == 2
    assert not open_run(tmp_path / "new").resume()


def test_state_dict_holds_the_whole_run_but_not_the_key(tmp_path):
    key = Key()
    private = train(open_run(None, key=key, save_every=None), until=7)
    torch.save(private.state_dict(), tmp_path / "state.pt")
    train(private)
    run_key = key.for_run(RUN_ID)
    for secret in (
        key,
        run_key,
        *(run_key.derive(purpose) for purpose in ("noise", "sampling", "partition")),
    ):
        assert secret.secret not in (tmp_path / "state.pt").read_bytes()
    other = open_run(None, key=key, save_every=None)
    with pytest.raises(ValueError, match="the ledger has 0 steps"):
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    other.stepper.ledger = private.ledger
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert other.steps_taken == 7
    train(other)
    assert torch.equal(weights(other.model), weights(private.model))


def test_the_generators_of_all_gpus_come_back_as_they_were():
    """By their bytes, as there may be none here."""
    key, gpus = Key(), [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    sealed = RandomState({"cpu": torch.get_rng_state(), "cuda": gpus}).sealed(key, "step 3 rank 0")
    opened = unseal(sealed, key, "step 3 rank 0")
    assert torch.equal(opened._cpu, torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(opened._gpus, gpus, strict=True))
    assert unseal(sealed, key, "step 3 rank 1") is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("clip_norm", {"clip_norm": 0.6}),
        ("plan", {"plan": simple_plan(steps=12, noise_multiplier=0.4)}),
        ("plan", {"plan": simple_plan(steps=13)}),
        ("examples", {"plan": simple_plan(steps=12, examples=300), "data": small_data(300)}),
        ("per_layer", {"per_layer": True}),
        ("key", {"key": Key(bytes(32))}),
    ],
)
def test_a_run_goes_on_only_as_it_began(tmp_path, name, change):
    train(open_run(tmp_path), until=5).close()
    with pytest.raises(ValueError, match=f"^{name}"):
        open_run(tmp_path, **change)


def test_another_sampler_is_refused(tmp_path, monkeypatch):
    train(open_run(tmp_path), until=5).close()
    from bandmf.sampling import cyclic_poisson

    describe = cyclic_poisson.describe
    monkeypatch.setattr(cyclic_poisson, "describe", lambda *a, **k: {**describe(*a, **k), "version": 2})
    with pytest.raises(ValueError, match=r"sampler=.*the privacy of the plan rests on"):
        open_run(tmp_path)


def test_other_data_after_a_restart_are_refused_for_released_steps(tmp_path):
    train(open_run(tmp_path), until=6).close()
    data = small_data()
    data.tensors[0][:] += 1
    private = open_run(tmp_path, data=data)
    private.resume()
    with pytest.raises(ValueError, match="step=4: was released before with another sum of gradients"):
        train(private)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    from bandmf.ledger import checkpoints

    private = train(open_run(tmp_path), until=6)
    monkeypatch.setattr(checkpoints, "publish", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        private.save()
    monkeypatch.undo()
    private.close()
    second = open_run(tmp_path)
    assert second.resume()
    assert second.steps_taken == 4
    train(second)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(kept) == 2
    assert not any(name.startswith(".") for name in kept)


def test_saving_needs_a_folder():
    private = open_run(None, save_every=None)
    for act in (private.save, private.resume):
        with pytest.raises(ValueError, match="run_folder=None"):
            act()


def test_what_was_spent_before_a_restart_counts(tmp_path):
    train(open_run(tmp_path), until=8).close()
    again = open_run(tmp_path)
    assert again.steps_taken == 0
    assert again.spent() == again.plan.spent_after(8)
    again.resume()
    assert again.spent() == again.plan.spent_after(8) >= again.plan.spent_after(again.steps_taken)


# --- schedules ------------------------------------------------------------------------------------


def sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def chain(optimizer):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)])


class Wrapper:
    """As a library that wraps schedulers."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def __getattr__(self, name):
        return getattr(vars(self)["scheduler"], name)


MADE = {"sequence": sequence, "chain": chain, "wrapped": lambda optimizer: Wrapper(sequence(optimizer))}


def scheduled_run(folder, make, given):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer)
    private = make_private(
        model, optimizer, small_data(), simple_plan(steps=8), clip_norm=0.5, run_folder=folder, save_every=2,
        criterion=torch.nn.CrossEntropyLoss(), scheduler=scheduler if given else None, self_test=False,
    )  # fmt: skip
    private.resume()
    return private, scheduler


@pytest.mark.parametrize("name", MADE)
def test_a_given_schedule_goes_on_after_a_restart_without_a_warning(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for until in (4, 8):
            private, scheduler = scheduled_run(tmp_path, MADE[name], given=True)
            for x, y in private.loader:
                private.criterion(private.model(x), y).backward()
                private.optimizer.step()
                private.scheduler.step()
                if private.steps_taken == until:
                    break
            if until == 4:
                private.save()
            private.close()
    decayed = 8 if name == "chain" else 6  # the sequence begins with two steps that warm up
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.9**decayed)


def test_a_schedule_that_a_checkpoint_does_not_hold_is_warned_of_once(tmp_path):
    private, scheduler = scheduled_run(tmp_path, sequence, given=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(private)
    told = [str(each.message) for each in found]
    assert len(told) == 1
    assert "its state is not in the checkpoint, so after private.resume() it would begin anew" in told[0]
    assert told[0].startswith("SequentialLR: ")  # not one of those inside of it
    private.close()
    assert scheduler.last_epoch == 0  # and it lives


def test_a_schedule_of_another_optimizer_is_not_warned_of(tmp_path):
    other = sequence(torch.optim.SGD(small_model().parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(open_run(tmp_path))
    assert other.last_epoch == 0
