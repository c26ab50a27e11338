"""Noise used twice: every way to release two sums of a step with the same noise repeats nothing or is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat

import numpy as np
import pytest
import torch
from releases import PLAN, Watch, cancels, open_run, other_data

import bandmf
from bandmf import Key
from bandmf.participation import MinSeparation
from bandmf.strategies import BufferedToeplitz
from bandmf.torch import Engine
from bandmf.torch.training import checkpoint
from training import same_run, simple_plan, weights


def begun(folder, until=6, **options):
    """A run that was stopped after some steps."""
    watch = Watch(open_run(folder, save_every=2, **options)).train(until)
    watch.private.save()
    watch.private.close()
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
    samplers = [watch.private.stepper.sampler for watch in (one, two)]
    assert not all(np.array_equal(*(s.batch(step) for s in samplers)) for step in range(8))
    assert not np.array_equal(*(s.part(0) for s in samplers))
    digests = [watch.private.stepper.sums._secret for watch in (one, two)]
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
    sentence = (
        rf"the ledger has {len(lines) - lost} lines, but checkpoint \d+ was written when it had {len(lines)}"
    )
    refused(tmp_path, sentence, data=other_data())
    path.write_bytes(b"".join(lines))
    assert open_run(tmp_path).resume()


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
    refused(
        tmp_path / "two",
        r"moved=None: .*two was moved, copied or restored since its run began.*moved='copied'",
    )
    refused(tmp_path / "one", "lies where its ledger says it does; leave moved= out", moved="copied")
    refused(tmp_path / "two", "moved='elsewhere': must be one of", moved="elsewhere")
    with pytest.raises(ValueError, match=r"moved='moved': there is no run to go on with"):
        open_run(tmp_path / "new", moved="moved")
    assert open_run(tmp_path / "one").resume()


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
    assert first.resume()
    assert second.resume()
    assert torch.equal(weights(first.model), weights(second.model))
    assert (first.steps_taken, second.steps_taken) == (6, 0)
    one, two = Watch(first).train(), Watch(second).train()
    assert len(two.noise) == PLAN.steps
    for mine in one.noise:
        assert all(float((mine - theirs).norm()) > 0.01 * float(mine.norm()) for theirs in two.noise)
    assert first.run_id != second.run_id


def interrupted_step(private, monkeypatch):
    """A step that ends after some of its history is written."""

    def interrupt(*_):
        raise KeyboardInterrupt

    (executor,) = private.stepper.noise.executors.values()
    advance = executor.advance
    with monkeypatch.context() as patched:
        patched.setattr(executor, "advance", lambda *given: (advance(*given), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            Watch(private).train(private.steps_taken + 1)
    assert private.stepper.noise.unfinished


def test_a_copy_takes_an_interrupted_step_again_with_the_noise_of_that_step(tmp_path, monkeypatch):
    """Its checkpoint holds no noise of its own, so the history, here sums that decay, begins anew."""
    strategy = BufferedToeplitz([0.5, 0.2], [0.5, 0.9], 16)
    plan = bandmf.plan(
        epsilon=8, delta=1e-5, examples=400, batch_size=100, strategy=strategy, adjacency="zero-out",
        steps=16, participation=MinSeparation(4, 4),
    )  # fmt: skip
    begun(tmp_path / "one", plan=plan)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    private = open_run(tmp_path / "two", plan=plan, moved="copied")
    assert private.resume()
    interrupted_step(private, monkeypatch)
    assert private.resume()
    engine = Engine(strategy, private.stepper.engine.key, max_vectors=plan.max_vectors)
    state = engine.init(private.stepper.parameters)
    for each in Watch(private).train(6).noise:
        expected = {name: torch.zeros_like(p) for name, p in private.stepper.parameters.items()}
        engine.add(state, expected, private.stepper.scale)
        noise = torch.cat([z.flatten() for z in expected.values()])
        torch.testing.assert_close(each, noise, rtol=1e-4, atol=1e-4 * float(noise.norm()))


@pytest.mark.parametrize("place", ["_template", "load"])
def test_an_interrupted_step_stays_refused_where_its_checkpoint_cannot_be_loaded(
    tmp_path, monkeypatch, place
):
    begun(tmp_path)
    private = open_run(tmp_path)
    assert private.resume()
    interrupted_step(private, monkeypatch)

    def fail(*_, **__):
        raise OSError("the disk is gone")

    owner = checkpoint.dcp if place == "load" else checkpoint.optimizer_state
    with monkeypatch.context() as patched:
        patched.setattr(owner, "load" if place == "load" else "named", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            private.resume()
    with pytest.raises(RuntimeError, match="was interrupted while it wrote"):
        Watch(private).train(7)
    assert private.resume()
    Watch(private).train(7)


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
    assert line["copied_from"]["run_id"] == second.run_id
    assert line["copied_from"]["steps"] == [6, 3]


def test_a_copy_with_another_plan_is_refused(tmp_path):
    """What its original has spent could not be told."""
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    refused(tmp_path / "two", "^plan=", moved="copied", plan=simple_plan(steps=12, noise_multiplier=0.9))


def test_a_run_that_was_closed_releases_nothing(tmp_path):
    watch = Watch(open_run(tmp_path)).train(3)
    watch.private.ledger.close()
    with pytest.raises(RuntimeError, match="the run was closed; open it again"):
        watch.train(4)


def test_a_copy_goes_on_after_a_restart_like_any_run(tmp_path):
    begun(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = open_run(tmp_path / "two", moved="copied", save_every=4)
    first.resume()
    Watch(first).train(2)  # before a checkpoint of its own
    first.close()
    refused(tmp_path / "two", "leave moved= out", moved="copied")
    second = open_run(tmp_path / "two", save_every=4)
    assert second.resume()
    Watch(second).train(7)
    assert second.ledger.replays == 2
    second.close()
    third = open_run(tmp_path / "two", save_every=4)
    assert third.resume()
    assert third.steps_taken == 4
    Watch(third).train()
    assert sorted(path.name for path in (tmp_path / "two").glob("copied-*"))


def test_a_folder_that_really_moved_goes_on_as_it_was(tmp_path):
    key = Key()
    with same_run():
        whole = Watch(open_run(tmp_path / "whole", key=key, save_every=2)).train().private
        begun(tmp_path / "one", key=key)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    for moved in ("moved", None):  # a statement is made once
        private = open_run(tmp_path / "two", moved=moved)
        private.resume()
        private.close()
    private = open_run(tmp_path / "two")
    private.resume()
    Watch(private).train()
    assert torch.equal(weights(private.model), weights(whole.model))
    kinds = [
        json.loads(line)["kind"] for line in (tmp_path / "two" / "ledger.jsonl").read_text().splitlines()
    ]
    assert kinds.count("moved") == 1


def test_two_objects_of_one_run_are_refused(tmp_path):
    private = open_run(tmp_path)
    with pytest.raises(RuntimeError, match="this process has it open already"):
        open_run(tmp_path)
    private.close()
    open_run(tmp_path)


def test_only_the_owner_can_read_a_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    begun(folder)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
