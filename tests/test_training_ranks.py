"""DDP and FSDP2 with real processes: what they train is what one process trains."""

from __future__ import annotations

import json

import pytest
import torch

import children
from children import HERE
from rank_training import make
from training import train, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs, from one process: to start one takes longer than to train."""
    folder = tmp_path_factory.mktemp("ranks")
    two = ["2", "ddp-2:ddp", "fsdp-2:fsdp", "ddp-on:ddp:10", "fsdp-on:fsdp:10"]
    two += ["ddp-again:ddp-two:10", "ddp-again:ddp-two", "fsdp-again:fsdp-two:10", "fsdp-again:fsdp-two"]
    one = ["1", "ddp-on:ddp:15", "fsdp-on:fsdp:15"]
    three = ["3", "ddp-3:ddp", "fsdp-3:fsdp", "ddp-on:ddp", "fsdp-on:fsdp"]
    result = children.run(HERE / "rank_training.py", folder, *two, *one, *three)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone():
    """The weights of one process."""
    return weights(train(make("one")).model)


@pytest.mark.parametrize("name", ["ddp-2", "ddp-3", "fsdp-2", "fsdp-3"])
def test_ranks_train_what_one_process_trains(name, alone, folder):
    torch.testing.assert_close(torch.load(folder / name / "final.pt"), alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["ddp-on", "fsdp-on"])
def test_a_run_goes_on_with_another_number_of_ranks(name, alone, folder):
    torch.testing.assert_close(torch.load(folder / name / "final.pt"), alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["ddp-again", "fsdp-again"])
def test_a_run_whose_history_is_one_vector_goes_on(name, folder):
    """It is loaded into the memory where it is, which no copy may be made of onto itself."""
    alone = weights(train(make("one-two")).model)
    torch.testing.assert_close(torch.load(folder / name / "final.pt"), alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["ddp-3", "fsdp-2"])
def test_every_rank_has_the_same_number_of_micro_batches(name, folder):
    first, *others = (torch.load(path) for path in (folder / name).glob("micros-*.pt"))
    assert others
    assert all(counts == first for counts in others)
    assert min(first) == 1
    assert max(first) > 1


@pytest.mark.parametrize("times", [3, pytest.param(18, marks=pytest.mark.long)])
def test_ranks_that_are_killed_end_with_the_weights_of_ranks_that_were_not(times, tmp_path):
    result = children.run(HERE / "killed_ranks.py", tmp_path, str(times), timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout)["kills"] == times
    clean, killed = (torch.load(tmp_path / name / "final.pt") for name in ("clean", "killed"))
    assert torch.equal(clean, killed)


def test_gpt2_with_tied_weights_trains_on_ranks_what_it_trains_alone(tmp_path):
    import rank_gpt2

    result = children.run(HERE / "rank_gpt2.py", tmp_path, "2")
    assert result.returncode == 0, result.stderr[-3000:]
    alone = rank_gpt2.trained("one")
    for kind in ("replicas", "shards"):
        torch.testing.assert_close(torch.load(tmp_path / f"{kind}.pt"), alone, rtol=0, atol=5e-6)
