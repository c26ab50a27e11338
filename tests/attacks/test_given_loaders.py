"""A DataLoader that chooses rows: the choice is never dropped in silence, so held-out rows are never trained on."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils import data as torch_data  # noqa: E402

import bandmf.torch  # noqa: E402
from training import simple_plan, small_data, small_model  # noqa: E402

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


def run_of(loader, **changes):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bandmf.torch.Training(model, losses, optimizer, loader, simple_plan(**changes), clip_norm=1.0, verify=False)


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
    """Held-out rows are NaN: any contact with one would show."""
    inputs, labels = small_data().tensors
    inputs[300:] = float("nan")
    subset = torch_data.Subset(torch_data.TensorDataset(inputs, labels), ROWS)
    training = run_of(torch_data.DataLoader(subset, batch_size=7, shuffle=True), examples=300)
    assert len(list(training)) == training.plan.steps
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
def test_a_loader_over_all_rows_is_taken(options):
    training = run_of(torch_data.DataLoader(small_data(), batch_size=32, **options))
    assert len(list(training)) == training.plan.steps


def test_all_rows_in_random_order_by_an_explicit_sampler_are_taken():
    data = small_data()
    loader = torch_data.DataLoader(data, sampler=torch_data.RandomSampler(data, num_samples=400))
    assert len(list(run_of(loader))) == simple_plan().steps


def test_a_sampler_that_shares_rows_among_ranks_is_taken():
    """Torch's DistributedSampler would have shared all rows among the ranks; the plan's batches are shared as well."""
    data = small_data()
    loader = torch_data.DataLoader(data, sampler=torch_data.DistributedSampler(data, num_replicas=2, rank=0))
    assert len(list(run_of(loader))) == simple_plan().steps
