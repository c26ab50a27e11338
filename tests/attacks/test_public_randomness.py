"""Random numbers of training that others know let one example change what all of its batch contribute.

Which mask of dropout, or which crop, a row gets depends on how many rows come before it. Secret numbers, alike for
every row, leave nothing to compare: so those of a batch come from the run's key, whatever was seeded before.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from bandmf.torch import make_private
from bandmf.torch.training.generators import generator, seed_torch
from one_at_a_time import MODES
from private_loops import plain, private_of, run_plan, vectors

EXAMPLES = 12


def seed_publicly():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


class Noted(nn.Module):
    """Dropout that remembers its masks."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, x):
        dropped = functional.dropout(torch.ones_like(x), 0.5, self.training)
        if len(x) == EXAMPLES and self.training:
            self.masks.append(dropped.detach())
        return x * dropped


def with_dropout():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), Noted(), nn.Linear(8, 4))


class Augmented(Dataset):
    """Examples are what the three global generators draw, as transforms do."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        drawn = [torch.rand(2), torch.tensor(np.random.rand(2)), torch.tensor([random.random(), 0.0])]
        return torch.cat([each.float() for each in drawn]), torch.tensor(index % 4)


class Streamed(IterableDataset):
    def __iter__(self):
        return ((index, Augmented()[index]) for index in range(EXAMPLES))


def batches_of(private, steps=1):
    """The inputs of so many steps; nothing of the rehearsals."""
    found = []
    for x, y in private.loader:
        plain(private, (x, y))
        if private.optimizer.stepped:
            found.append(x)
        if private.steps_taken == steps:
            break
    return found


@pytest.mark.parametrize("mode", MODES)
def test_dropout_does_not_draw_from_a_public_seed(mode):
    masks = []
    for _ in range(2):
        private = private_of(with_dropout(), vectors(EXAMPLES), clipping=mode, self_test=False)
        seed_publicly()
        batches_of(private)
        masks += private.model[1].masks
    assert len(masks) == 2
    assert not torch.equal(*masks)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_transforms_do_not_draw_from_a_public_seed_nor_from_the_number_of_the_step(workers):
    """Neither torch's numbers, nor NumPy's, nor Python's: in workers, and in the process itself."""
    found = []
    for _ in range(2):
        private = private_of(nn.Linear(6, 4), Augmented(), loader_options={"num_workers": workers})
        seed_publicly()
        found += batches_of(private)
    for drawn in (slice(0, 2), slice(2, 4), slice(4, 5)):
        first, second = (x[:, drawn] for x in found)
        assert not (first == second).any()
        assert len(first.unique()) == first.numel(), "rows have numbers of their own"


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 1), (2, 2)])
def test_a_restart_repeats_the_random_numbers_of_its_batches(tmp_path, before, after):
    """In the middle of an epoch, and with another number of workers."""
    model, found = with_dropout(), []
    for workers in (before, after):
        private = private_of(
            model, Augmented(), steps=8, epoch_steps=8, run_folder=tmp_path, save_every=3,
            loader_options={"num_workers": workers},
        )  # fmt: skip
        private.resume()
        model[1].masks.clear()
        inputs = batches_of(private, steps=5)
        private.close()
        found.append((inputs[-2:], model[1].masks[-2:]))
    assert len(inputs) == 2, "steps 3 and 4 were taken again"
    for once, again in zip(*found, strict=True):
        assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_a_stream_that_draws_is_repeated_by_a_restart(tmp_path):
    """The ledger would refuse other sums of the steps that are taken again."""
    model, plan = with_dropout(), run_plan(EXAMPLES, 6)
    totals = []
    for until in (5, 6):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = make_private(
            model, optimizer, Streamed(), plan, clip_norm=1.0, epoch_steps=6, run_folder=tmp_path, save_every=2
        )  # fmt: skip
        private.resume()
        totals.append(batches_of(private, until))
        private.close()
    assert torch.equal(totals[0][4], totals[1][0])


def test_one_batch_from_an_iterator_of_its_own_has_secret_numbers_too():
    masks = []
    for _ in range(2):
        private = private_of(with_dropout(), vectors(EXAMPLES), self_test=False)
        seed_publicly()
        plain(private, next(iter(private.loader)))
        masks += private.model[1].masks
    assert not torch.equal(*masks)


def test_the_numbers_of_the_user_go_on_as_if_nothing_were_trained():
    def draw():
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    seed_publicly()
    expected = [draw() for _ in range(3)]
    private = private_of(with_dropout(), Augmented(), steps=3, epoch_steps=3)
    seed_publicly()
    found = []
    for batch in private.loader:
        plain(private, batch)
        if private.optimizer.stepped:
            found.append(draw())
    assert found == expected


@pytest.mark.parametrize("self_test", [True, False])
def test_after_a_loop_that_failed_the_numbers_of_the_user_go_on(self_test):
    private = private_of(with_dropout(), vectors(EXAMPLES), self_test=self_test)
    seed_publicly()
    expected = torch.rand(3)
    seed_publicly()
    for _ in private.loader:
        torch.rand(5)
        break  # as an error would
    private.stepper.abandon()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("self_test", [True, False])
def test_to_seed_torch_within_a_batch_is_refused(self_test):
    private = private_of(with_dropout(), vectors(EXAMPLES), self_test=self_test)
    batch = next(batches := iter(private.loader))
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"manual_seed was called .* a torch\.Generator of its own"):
        plain(private, batch)
    batches.close()


def test_pieces_and_steps_have_random_numbers_of_their_own():
    secret = private_of(with_dropout(), vectors()).stepper.generators.secret
    calls = [("load", 0, 0), ("model", 0, 0), ("model", 1, 0), ("model", 0, 1), ("load", 1, 0)]
    assert len({secret(*call) for call in calls}) == len(calls)


def test_all_of_the_state_on_the_cpu_is_secret_and_not_a_seed_of_32_bits():
    """Where torch keeps the twister's words is known: NumPy's has the same ones for the same seed."""
    state = torch.Generator().manual_seed(1234).get_state().numpy().view(np.uint64)
    twister = np.random.RandomState(1234).get_state()[1]
    assert np.array_equal(state[3 : 3 + 624], twister)
    before = torch.get_rng_state()
    seed = seed_torch(bytes(32))
    secret = torch.get_rng_state()
    torch.set_rng_state(before)
    assert not (secret[24:5016] == torch.Generator().manual_seed(seed).get_state()[24:5016]).all()
    assert torch.equal(generator(bytes(32)).get_state(), secret)
    assert 0.45 < float(torch.rand(10000, generator=generator(bytes(32))).mean()) < 0.55
