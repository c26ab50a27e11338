"""What one batch adds, it adds once: whatever the loop does with the loader and with errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import functional

from one_at_a_time import MODES
from private_loops import plain, private_of, small_net, vectors
from sweeps import in_turn


def rehearsed(private):
    """An iterator past the self-test."""
    batches = iter(private.loader)
    for _ in range(private.loader.rehearsals):
        plain(private, next(batches))
    return batches


@pytest.mark.parametrize("mode", MODES)
def test_two_passes_at_once_are_refused(mode):
    private = private_of(small_net(), vectors(), clipping=mode, physical_batch_size=2)
    first = rehearsed(private)
    plain(private, next(first))
    second = iter(private.loader)
    plain(private, next(second))
    with pytest.raises(RuntimeError, match=r"another pass over private\.loader began inside"):
        next(first)


@pytest.mark.parametrize(("mode", "place"), in_turn(list(MODES), ["ledger", "sums"]))
def test_a_step_that_failed_is_not_added_again(mode, place, monkeypatch):
    honest = private_of(small_net(), vectors(), clipping=mode, learning_rate=0.0)
    for batch in honest.loader:
        plain(honest, batch)
    private = private_of(small_net(), vectors(), clipping=mode, learning_rate=0.0)
    batches = rehearsed(private)
    batch = next(batches)
    target = private.ledger if place == "ledger" else private.stepper.clipping
    name = "release" if place == "ledger" else "add_to"
    original = getattr(target, name)

    def fail(*given):
        if place == "sums":
            original(*given)  # some of it was added
        raise OSError("no space left on device")

    monkeypatch.setattr(target, name, fail)
    with pytest.raises(OSError, match="no space"):
        plain(private, batch)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"iterate private.loader anew"):
        private.optimizer.step()
    for batch in private.loader:
        plain(private, batch)
    assert private.finished
    for mine, theirs in zip(private.model.parameters(), honest.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_a_copy_of_the_model_holds_nothing_of_the_data():
    """Made at the worst moment: between the backward pass and the step."""
    data = vectors()
    private = private_of(small_net(), data)
    batches = rehearsed(private)
    x, y = next(batches)
    functional.cross_entropy(private.model(x), y).backward()
    row = x[0].numpy().tobytes()
    assert row not in pickle.dumps(copy.deepcopy(private.model))
    assert row not in pickle.dumps(private.model)
    private.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_someone_kept_does_not_show_the_next_sum(mode):
    private = private_of(small_net(), vectors(), steps=2, clipping=mode, physical_batch_size=3)
    kept = None
    while not private.finished:
        for batch in private.loader:
            plain(private, batch)
            if private.optimizer.stepped and kept is None:
                kept = next(private.model.parameters()).grad
                before = kept.clone()
            if kept is not None:
                assert torch.equal(kept, before)
    assert kept is not None
