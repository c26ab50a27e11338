"""Noise used twice: every way to release two sums of a step with the same noise repeats nothing or is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat

import numpy as np
import pytest
import torch
from releases import PLAN, Watch, cancels, open_run, other_data, stepper
from torch import nn

from bandmf import Key
from training import same_run, simple_plan, weights


def begun(folder, until=6, **options):
    """A run that was stopped after some steps."""
    watch = Watch(open_run(folder, save_every=2, **options)).train(until)
    watch.training.close()
    return watch


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder, match, error=ValueError, **options):
    """Opening is refused with this sentence, and changes nothing."""
    before = contents(folder)
    with pytest.raises(error, match=match):
        open_run(folder, **options)
    assert contents(folder) == before


def test_the_attack_works_where_runs_share_an_id():
    """What the tests of this file look for is there if it is planted."""
    key = Key()
    with same_run():
        one, two = Watch(open_run(key=key)).train(3), Watch(open_run(key=key, data=other_data())).train(3)
    assert cancels(one, two)


@pytest.mark.parametrize("where", ["none", "folder"])
def test_the_same_key_in_another_run_repeats_neither_noise_nor_batches(tmp_path, where):
    key = Key()
    folders = [tmp_path / name if where == "folder" else None for name in ("one", "two")]
    one = Watch(open_run(folders[0], key=key)).train(8)
    two = Watch(open_run(folders[1], key=key, data=other_data())).train(8)
    assert not cancels(one, two)
    samplers = [stepper(watch.training).sampler for watch in (one, two)]
    assert not all(np.array_equal(*(s.batch(step) for s in samplers)) for step in range(8))
    assert not np.array_equal(*(s.part(0) for s in samplers))
    digests = [stepper(watch.training).sums._secret for watch in (one, two)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("left", ["key", "checkpoints", "both", "empty"])
def test_a_run_without_its_ledger_is_refused(tmp_path, left):
    begun(tmp_path)
    if left == "empty":
        (tmp_path / "ledger.jsonl").write_bytes(b"")
        return refused(tmp_path, "has no first line")
    (tmp_path / "ledger.jsonl").unlink()
    if left == "key":
        shutil.rmtree(tmp_path / "checkpoints")
    if left == "checkpoints":
        (tmp_path / "key").unlink()
    refused(tmp_path, "but no ledger.jsonl, which says what was released; restore it, or begin a new run")
    return refused(tmp_path, "but no ledger.jsonl", key=Key())


@pytest.mark.parametrize("lost", [1, 3, 6])
def test_lines_that_the_ledger_lost_are_noticed_by_the_checkpoint(tmp_path, lost):
    begun(tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-lost]))
    sentence = rf"the ledger has {len(lines) - lost} lines, but checkpoint \d+ was written when it had {len(lines)}"
    refused(tmp_path, sentence, data=other_data())
    path.write_bytes(b"".join(lines))
    assert open_run(tmp_path).steps_taken == 6


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    for name in ("one", "two"):
        begun(tmp_path / name, key=Key(bytes(32)))
    for path in (tmp_path / "two" / "checkpoints").iterdir():
        shutil.rmtree(tmp_path / "one" / "checkpoints" / path.name)
        shutil.copytree(path, tmp_path / "one" / "checkpoints" / path.name)
    refused(tmp_path / "one", "is a checkpoint of another run")


def test_a_folder_that_was_copied_is_refused_until_told(tmp_path):
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    refused(tmp_path / "two", r"moved=None: .*two was moved, copied or restored since its run began.*moved='copied'")
    refused(tmp_path / "one", "lies where its ledger says it does; leave moved= out", moved="copied")
    refused(tmp_path / "two", "moved='elsewhere': must be one of", moved="elsewhere")
    with pytest.raises(ValueError, match=r"moved='moved': there is no run to go on with"):
        open_run(tmp_path / "new", moved="moved")
    assert open_run(tmp_path / "one").steps_taken == 6


def test_a_file_restored_from_a_backup_is_a_copy_too(tmp_path):
    begun(tmp_path)
    shutil.copy(tmp_path / "ledger.jsonl", tmp_path / "backup")
    os.replace(tmp_path / "backup", tmp_path / "ledger.jsonl")
    refused(tmp_path, "was moved, copied or restored")


def test_a_copy_shares_the_weights_and_nothing_else(tmp_path):
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = open_run(tmp_path / "one")
    second = open_run(tmp_path / "two", data=other_data(), moved="copied")
    assert torch.equal(weights(first.model), weights(second.model))
    assert (first.steps_taken, second.steps_taken) == (6, 0)
    one, two = Watch(first).train(), Watch(second).train()
    assert len(two.noise) == PLAN.steps
    for mine in one.noise:
        assert all(float((mine - theirs).norm()) > 0.01 * float(mine.norm()) for theirs in two.noise)


def test_a_copy_counts_what_its_original_had_spent(tmp_path):
    plan = simple_plan(steps=12, noise_multiplier=1.0, delta=1e-5)
    begun(tmp_path / "one", plan=plan)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = open_run(tmp_path / "two", plan=plan, moved="copied")
    assert second.spent() == plan.spent_after(6) > 0
    Watch(second).train(3)
    assert second.spent() == plan.spent_after(6) + plan.spent_after(3)
    second.close()
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    third = open_run(tmp_path / "three", plan=plan, moved="copied")
    assert third.spent() == plan.spent_after(6) + plan.spent_after(3)
    line = json.loads((tmp_path / "three" / "ledger.jsonl").read_text().splitlines()[0])
    assert (
        line["copied_from"]["run_id"]
        == json.loads((tmp_path / "two" / "ledger.jsonl").read_text().splitlines()[0])["run_id"]
    )
    assert line["copied_from"]["steps"] == [6, 3]


def test_a_copy_with_another_plan_is_refused(tmp_path):
    """What its original has spent could not be told."""
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    refused(tmp_path / "two", "^plan=", moved="copied", plan=simple_plan(steps=12, noise_multiplier=0.9))


def test_a_run_that_was_closed_releases_nothing(tmp_path):
    watch = Watch(open_run(tmp_path)).train(3)
    watch.training.close()
    with pytest.raises(RuntimeError, match="this run was closed; construct Training again"):
        watch.train(4)


def test_a_copy_goes_on_after_a_restart_like_any_run(tmp_path):
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = open_run(tmp_path / "two", moved="copied", save_every=4)
    Watch(first).train(2)
    first._opened.ledger.close()  # as if it were killed: nothing is saved
    refused(tmp_path / "two", "leave moved= out", moved="copied")
    second = open_run(tmp_path / "two", save_every=4)
    assert second.steps_taken == 0
    Watch(second).train(7)
    assert second._opened.ledger.replays == 2
    second._opened.ledger.close()
    third = open_run(tmp_path / "two", save_every=4)
    assert third.steps_taken == 4
    Watch(third).train()
    assert sorted(path.name for path in (tmp_path / "two").glob("copied-*"))


def test_a_folder_that_really_moved_goes_on_as_it_was(tmp_path):
    key = Key()
    with same_run():
        whole = Watch(open_run(tmp_path / "whole", key=key, save_every=2)).train().training
        begun(tmp_path / "one", key=key)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    for moved in ("moved", None):  # a statement is made once
        open_run(tmp_path / "two", moved=moved).close()
    training = open_run(tmp_path / "two")
    Watch(training).train()
    assert torch.equal(weights(training.model), weights(whole.model))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "two" / "ledger.jsonl").read_text().splitlines()]
    assert kinds.count("moved") == 1


def test_two_objects_of_one_run_are_refused(tmp_path):
    training = open_run(tmp_path)
    with pytest.raises(RuntimeError, match="this process has it open already"):
        open_run(tmp_path)
    training.close()
    open_run(tmp_path)


def test_only_the_owner_can_read_a_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    begun(folder)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


class Renamed(nn.Module):
    """The same numbers in the same order, by names in another order, which decide the noise."""

    def __init__(self, model):
        super().__init__()
        self.z, self.a = model.weight, model.bias

    def forward(self, x):
        return nn.functional.linear(x, self.z, self.a)


def test_a_model_of_other_names_does_not_repeat_a_step_with_other_noise(tmp_path, caplog):
    begun(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    torch.manual_seed(3)
    two = Watch(open_run(tmp_path, model=Renamed(nn.Linear(8, 3)))).train(7)
    assert "steps 1 to 6 were released before the restart and cannot be repeated" in caplog.text
    assert len(two.released) == 1
