"""A DataLoader that chooses rows: the choice is never dropped in silence, so held-out rows are never trained on."""

from __future__ import annotations

import accelerate.data_loader
import pytest
import torch
from torch.utils import data as torch_data

import bandmf.torch
from training import same_run, simple_plan, small_data, small_model, train, weights

ROWS = list(range(300))  # the other 100 are held out


class EveryOther(torch_data.Sampler):
    """A sampler of the user's own."""

    def __iter__(self):
        return iter(range(0, 400, 2))

    def __len__(self):
        return 200


class Pairs(torch_data.BatchSampler):
    """A batch sampler of the user's own, derived from torch's."""


LOADERS = {
    "subset": lambda data: {"sampler": torch_data.SubsetRandomSampler(ROWS)},
    "weights": lambda data: {"sampler": torch_data.WeightedRandomSampler([1.0] * 300 + [0.0] * 100, 400)},
    "replacement": lambda data: {"sampler": torch_data.RandomSampler(data, replacement=True)},
    "fewer": lambda data: {"sampler": torch_data.RandomSampler(data, num_samples=100)},
    "beginning": lambda data: {"sampler": torch_data.SequentialSampler(ROWS)},
    "own": lambda data: {"sampler": EveryOther()},
    "batches": lambda data: {"batch_sampler": torch_data.BatchSampler(torch_data.SubsetRandomSampler(ROWS), 20, False)},
    "own batches": lambda data: {"batch_sampler": Pairs(torch_data.SequentialSampler(data), 2, False)},
    "lists": lambda data: {"batch_sampler": [ROWS[:20], ROWS[20:40]]},
}


def losses(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def run_of(loader, key=None, **changes):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = simple_plan(**changes)
    return bandmf.torch.Training(model, losses, optimizer, loader, plan, clip_norm=1.0, key=key, verify=False)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_chooses_rows_is_refused(name):
    data = small_data()
    loader = torch_data.DataLoader(data, **LOADERS[name](data))
    with pytest.raises(ValueError, match=r"torch\.utils\.data\.Subset\(dataset, indices\)"):
        run_of(loader)


def test_a_loader_of_ready_made_batches_is_refused():
    loader = torch_data.DataLoader(small_data(), batch_size=None)
    with pytest.raises(ValueError, match="give Training a data set of single examples"):
        run_of(loader)


def test_the_remedy_trains_on_the_chosen_rows_alone():
    """Held-out rows are NaN: any contact with one would be counted."""
    inputs, labels = small_data().tensors
    inputs[300:] = float("nan")
    subset = torch_data.Subset(torch_data.TensorDataset(inputs, labels), ROWS)
    training = run_of(torch_data.DataLoader(subset, batch_size=7, shuffle=True), examples=300)
    assert len(list(training)) == training.plan.steps
    assert training.non_finite_examples() == 0


def of_accelerate(data):
    """As it prepares a loader on one of two processes, with a seed for its order."""
    rows = accelerate.data_loader.SeedableRandomSampler(data)
    return accelerate.data_loader.BatchSamplerShard(torch_data.BatchSampler(rows, 32, False), 2, 0)


# Torch's DistributedSampler would have shared the rows among ranks; the plan's batches are shared as well.
WHOLE = {
    "in order": lambda data: {"batch_size": 32},
    "shuffled": lambda data: {"batch_size": 32, "shuffle": True},
    "drop_last": lambda data: {"batch_size": 32, "shuffle": True, "drop_last": True},
    "random sampler": lambda data: {"sampler": torch_data.RandomSampler(data, num_samples=400)},
    "for ranks": lambda data: {"sampler": torch_data.DistributedSampler(data, num_replicas=2, rank=0)},
    "accelerate": lambda data: {"batch_sampler": of_accelerate(data)},
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_loader_over_all_rows_trains_as_its_data_set_does(name):
    data = small_data()
    loaders = data, torch_data.DataLoader(data, **WHOLE[name](data))
    with same_run():
        bare, loaded = (run_of(each, key=bandmf.Key(bytes(32))) for each in loaders)
    assert torch.equal(weights(train(bare).model), weights(train(loaded).model))
