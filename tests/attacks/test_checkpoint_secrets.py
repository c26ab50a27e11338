"""A checkpoint without the key: the noise cannot be read from it, nor anything be made to happen by changing it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import stat

import pytest
import torch
import torch.distributed.checkpoint as dcp
from releases import CLIP, PLAN, RATE, Watch, open_run, stepper
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from bandmf import Key
from bandmf.ledger import seal
from bandmf.torch.noise import sealing
from bandmf.torch.training import generators as kept_generators
from bandmf.torch.training.generators import Generators
from training import same_run, simple_plan, small_model, weights


def stolen(folder):
    """All tensors of a checkpoint, read without the key."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def recovered(before, after, slot):
    """The attack: the sum of the step between two checkpoints, as (released - noise), from weights and history."""
    total = []
    for name in ("weight", "bias"):
        moved = (before[f"model.{name}"] - after[f"model.{name}"]) / RATE * PLAN.batch_size
        y = after[f"noise.history.{name}"][slot].reshape(moved.shape)
        total.append((moved - CLIP * PLAN.noise_scale * y.nan_to_num(0, 0, 0).clamp(-9, 9)).flatten())
    return torch.cat(total)


def error_of_the_attack(folder):
    """How far the best slot's answer is from the clipped sum of step 5, in units of the noise's own size."""
    watch = Watch(open_run(folder, save_every=1, plan=PLAN)).train(6)
    watch.training.close()
    before, after = (stolen(path) for path in seal.checkpoints(folder / "checkpoints"))
    slots = len(after["noise.history.bias"])
    assert slots == PLAN.bands - 1
    errors = [float((recovered(before, after, slot) - watch.true[5]).norm()) for slot in range(slots)]
    return min(errors) / float(watch.noise[5].norm())


def test_two_checkpoints_do_not_reveal_a_clipped_sum(tmp_path):
    assert error_of_the_attack(tmp_path) > 0.5


def test_the_attack_works_on_a_history_in_the_clear(tmp_path, monkeypatch):
    """What the test above looks for is there if it is planted."""
    monkeypatch.setattr(sealing, "_encrypt", lambda state, secret: None)
    assert error_of_the_attack(tmp_path) < 1e-4


def sealed(training):
    """What a checkpoint holds, as it is written."""
    return training._saved._sealed()


def test_no_stream_is_used_for_two_checkpoints(tmp_path):
    """Of the same run, step and contents, too: else one that is written again would reveal another."""
    training = Watch(open_run(tmp_path)).train(5).training
    mine, salts, pads = stepper(training).noise.history, [], []
    plain = {name: vectors.clone() for name, vectors in mine.items()}
    for _ in range(2):
        with sealed(training) as state:
            salts.append(state["noise"]["seal"]["salt"])
            pads.append({name: mine[name].view(torch.int32) ^ plain[name].view(torch.int32) for name in mine})
    assert salts[0] != salts[1]
    for name in mine:
        assert float((pads[0][name] == pads[1][name]).float().mean()) < 0.05
        assert torch.equal(mine[name], plain[name])  # the run's own is as it was


def test_an_interrupted_encryption_is_noticed(tmp_path, monkeypatch):
    """Half of the history would be no noise: the run must not go on with it."""
    watch = Watch(open_run(tmp_path)).train(5)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sealing._Stream, "words", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch.training.save()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="was interrupted while it wrote"):
        watch.train(6)


def test_a_failed_save_leaves_the_run_as_it_was(tmp_path, monkeypatch):
    key = Key()
    with same_run():
        whole = Watch(open_run(tmp_path / "one", key=key)).train()
        watch = Watch(open_run(tmp_path / "two", key=key)).train(5)
    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        watch.training.save()
    monkeypatch.undo()
    watch.train()
    assert torch.equal(weights(whole.training.model), weights(watch.training.model))


# --- how many examples a batch has ----------------------------------------------------------------------


def dropout_run(folder, **options):
    return open_run(folder, model=small_model(dropout=0.5), **options)


def generators(folder):
    """All that an attacker finds of torch's generators in a checkpoint, which of it are states they could have."""
    state = _load_state_dict_from_keys({"random"}, checkpoint_id=str(folder))["random"]["0"]
    found = state["cpu"] if isinstance(state, dict) else state
    return found[: len(torch.get_rng_state())]


def size_of_a_batch(before, after):
    """The attack: how many rows dropout has drawn for between two checkpoints; None if that cannot be told."""
    mine = torch.get_rng_state()
    try:
        for size in range(100):
            torch.set_rng_state(before)
            if size:
                nn.functional.dropout(torch.ones(size, 16), 0.5, True)
            if torch.equal(torch.get_rng_state(), after):
                return size
    except RuntimeError:  # no state of a generator
        pass
    finally:
        torch.set_rng_state(mine)
    return None


def attacked_size(folder):
    """What the attack says of the batch between the last two checkpoints, and its true size."""
    training = Watch(dropout_run(folder, save_every=1)).train(6).training
    sizes = [len(stepper(training).sampler.batch(step)) for step in range(12)]
    training.close()
    return size_of_a_batch(*map(generators, seal.checkpoints(folder / "checkpoints"))), sizes[5]


def test_two_checkpoints_do_not_reveal_how_many_examples_a_batch_has(tmp_path):
    assert attacked_size(tmp_path)[0] is None


def test_the_attack_counts_examples_if_generators_are_in_the_clear(tmp_path, monkeypatch):
    """And if batches drew from the user's own, as they would if nothing was lent to them."""
    monkeypatch.setattr(kept_generators.RandomState, "sealed", lambda state, *_: state._cpu)
    monkeypatch.setattr(Generators, "lent", lambda *_: contextlib.nullcontext())
    found, true = attacked_size(tmp_path)
    assert found == true


def test_a_checkpoint_does_not_hold_the_generators(tmp_path):
    training = Watch(dropout_run(tmp_path)).train(3).training
    states = []
    for _ in range(2):
        with sealed(training) as state:
            states.append(state["random"]["0"])
    now = torch.get_rng_state()
    for state in states:
        assert len(state) > len(now)
        assert now.numpy().tobytes() not in state.numpy().tobytes()
    assert float((states[0] == states[1]).float().mean()) < 0.05  # each has a nonce of its own


# --- what is executed -----------------------------------------------------------------------------------


class Malicious:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def saved(folder):
    Watch(open_run(folder)).train(5).training.close()
    return seal.checkpoints(folder / "checkpoints")[-1]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "seal.json"])
def test_nothing_of_a_changed_checkpoint_is_executed(tmp_path, name):
    folder, proof = saved(tmp_path / "run"), tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Malicious(proof)))
    with pytest.raises(ValueError, match=f"{name}: was changed after it was written"):
        open_run(tmp_path / "run")
    assert not proof.exists()


def test_the_attack_works_on_a_checkpoint_without_a_seal(tmp_path, monkeypatch):
    folder, proof = saved(tmp_path / "run"), tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(proof)))
    monkeypatch.setattr(seal, "changed", lambda *_: [])
    with pytest.raises(AttributeError, match=r"state_dict_metadata|planner_data"):
        open_run(tmp_path / "run")
    assert proof.exists()


def test_files_of_two_checkpoints_cannot_be_exchanged(tmp_path):
    Watch(open_run(tmp_path, save_every=2)).train().training.close()
    older, newer = seal.checkpoints(tmp_path / "checkpoints")
    shutil.copy(older / "__0_0.distcp", newer / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"__0_0.distcp: was changed"):
        open_run(tmp_path)


class Counter:
    """Something to save whose state is an object of its own class."""

    def state_dict(self):
        return {"mine": self}

    def load_state_dict(self, state):
        raise AssertionError("nothing was saved")


def test_objects_that_are_not_plain_are_refused_before_they_are_written(tmp_path):
    training = open_run(tmp_path, also={"counter": Counter()})
    with pytest.raises(ValueError, match=r"also.counter: a checkpoint holds tensors, numbers, text"):
        training.save()
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_a_missing_or_foreign_seal_is_refused(tmp_path):
    folder = saved(tmp_path)
    known = json.loads((folder / "seal.json").read_text())
    (folder / "seal.json").write_text(json.dumps({**known, "entries": known["entries"] - 1}))
    with pytest.raises(ValueError, match=r"seal.json: was changed after it was written, or is missing"):
        open_run(tmp_path)
    (folder / "seal.json").unlink()
    with pytest.raises(ValueError, match=r"or remove .* to go on from the checkpoint before it"):
        open_run(tmp_path)
    shutil.rmtree(folder)
    open_run(tmp_path)


def test_checkpoints_are_closed_to_others(tmp_path):
    mask = os.umask(0)
    try:
        folder = saved(tmp_path)
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}


def test_a_strategy_without_history_is_saved_and_resumed(tmp_path):
    plan = simple_plan(steps=6, bands=1)
    first = Watch(open_run(tmp_path, plan=plan, save_every=2)).train(5).training
    first._opened.ledger.close()  # as if it were killed
    assert open_run(tmp_path, plan=plan).steps_taken == 4
