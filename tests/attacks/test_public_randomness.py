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

from bandmf.torch import Training
from bandmf.torch.training.generators import generator, seed_torch
from training import simple_plan

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


class Seen:
    """Losses that remember their inputs."""

    def __init__(self):
        self.inputs = []

    def __call__(self, model, batch):
        x, y = batch
        self.inputs.append(x)
        return functional.cross_entropy(model(x), y, reduction="none")


def run_of(model, data, steps=1, **options):
    """Every example is in every batch."""
    seen, optimizer = Seen(), torch.optim.SGD(model.parameters(), lr=0.1)
    plan = simple_plan(examples=EXAMPLES, batch_size=EXAMPLES, bands=1, noise_multiplier=1e-25, steps=steps)
    training = Training(model, seen, optimizer, data, plan, clip_norm=1.0, verify=False, **options)
    seen.inputs.clear()  # copies that were tried
    return training, seen


def vectors():
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(EXAMPLES, 6, generator=generator), torch.arange(EXAMPLES) % 4)


@pytest.mark.parametrize("clipping", ["auto", "vmap"])
def test_dropout_does_not_draw_from_a_public_seed(clipping):
    masks = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        nn.init.ones_(model[0].weight)
        training, _ = run_of(model, vectors(), clipping=clipping)
        seed_publicly()
        before = model[0].weight.detach().clone()
        training.advance()
        masks.append(before - model[0].weight.detach())
    assert not torch.equal(*masks)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_transforms_do_not_draw_from_a_public_seed_nor_from_the_number_of_the_step(workers):
    """Neither torch's numbers, nor NumPy's, nor Python's: in workers, and in the process itself."""
    found = []
    for _ in range(2):
        training, seen = run_of(nn.Linear(6, 4), Augmented(), workers=workers)
        seed_publicly()
        training.advance()
        found += seen.inputs
    for drawn in (slice(0, 2), slice(2, 4), slice(4, 5)):
        first, second = (x[:, drawn] for x in found)
        assert not (first == second).any()
        assert len(first.unique()) == first.numel(), "rows have numbers of their own"


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 1), (2, 2)])
def test_a_restart_repeats_the_random_numbers_of_its_batches(tmp_path, before, after):
    """With another number of workers, too."""
    found = []
    for workers in (before, after):
        model = with_dropout()
        training, seen = run_of(model, Augmented(), 8, folder=tmp_path, save_every=3, workers=workers)
        for step in training:
            if step == 5:
                break
        training._let_go()  # as if it were killed
        found.append((seen.inputs[-2:], model[1].masks[-2:]))
    assert len(seen.inputs) == 2, "steps 4 and 5 were taken again"
    for once, again in zip(*found, strict=True):
        assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_a_stream_that_draws_is_repeated_by_a_restart(tmp_path):
    inputs = []
    for until in (5, 6):
        training, seen = run_of(with_dropout(), Streamed(), 6, folder=tmp_path, save_every=2)
        for step in training:
            if step == until:
                break
        training._let_go()
        inputs.append(seen.inputs)
    assert torch.equal(inputs[0][4], inputs[1][0])


def test_the_numbers_of_the_user_go_on_as_if_nothing_were_trained():
    def draw():
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    seed_publicly()
    expected = [draw() for _ in range(3)]
    training, _ = run_of(with_dropout(), Augmented(), steps=3)
    seed_publicly()
    assert [draw() for _ in training] == expected


def test_after_losses_that_failed_the_numbers_of_the_user_go_on():
    def failing(model, batch):
        torch.rand(5)
        raise ValueError("planted")

    training, _ = run_of(with_dropout(), vectors())
    training._stepper._losses = failing
    seed_publicly()
    expected = torch.rand(3)
    seed_publicly()
    with pytest.raises(ValueError, match="planted"):
        training.advance()
    assert torch.equal(torch.rand(3), expected)


def test_to_seed_torch_within_losses_is_refused():
    training, seen = run_of(with_dropout(), vectors())
    training._stepper._losses = lambda model, batch: (torch.manual_seed(0), seen(model, batch))[1]
    with pytest.raises(RuntimeError, match=r"manual_seed was called .* a torch\.Generator of its own"):
        training.advance()
    assert training.steps_taken == 0


def test_micro_batches_and_steps_have_random_numbers_of_their_own():
    secret = run_of(with_dropout(), vectors())[0]._stepper.generators.secret
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
