"""An example outside of the others' range must not change their gradients, though no gradient passes between them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bandmf.torch import Training, verify
from training import simple_plan
from verify_cases import each, vectors


def bright_pictures(examples=6):
    """Each has the same largest and smallest value, as many real ones do."""
    generator = torch.Generator().manual_seed(1)
    inner = torch.rand(examples, 4, generator=generator)
    return [(torch.cat([torch.tensor([0.0, 1.0]), inner[n]]), torch.tensor(n % 4)) for n in range(examples)]


def open_net():
    """Nothing in it is bounded."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def refused(model, losses, examples, **options):
    report = verify(model, losses, examples, **options)
    return None if report.ok else " | ".join(map(str, report.problems))


# --- scales of a whole batch ----------------------------------------------------------------------------


def by_largest(model, batch):
    x, y = batch
    return each(model, (x / x.abs().max(), y))


def by_range(model, batch):
    x, y = batch
    return each(model, ((x - x.min()) / (x.max() - x.min()), y))


def by_detached_range(model, batch):
    x, y = batch
    least, most = x.min().detach(), x.max().detach()
    return each(model, ((x - least) / (most - least), y))


class Quantized(nn.Module):
    """Activations of eight bits, with one scale for the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    @staticmethod
    def rounded(x):
        scale = 127 / x.detach().abs().max()
        return x + ((x * scale).round() / scale - x).detach()

    def forward(self, x):
        return self.last(self.rounded(self.first(self.rounded(x)).tanh()))


@pytest.mark.parametrize("losses", [by_largest, by_range])
def test_inputs_divided_by_the_largest_value_of_the_batch_are_refused_even_if_all_have_the_same(losses):
    """By the gradients to the inputs, which are there though no number changes."""
    assert "mixes the inputs of several examples" in refused(open_net(), losses, bright_pictures())


def test_a_detached_range_is_refused_if_one_example_has_another():
    """Where all examples given have the same, nothing shows: it is named in docs/guarantees.md."""
    assert refused(open_net(), by_detached_range, bright_pictures()) is None
    brighter = [*bright_pictures(5), (3 * torch.ones(6), torch.tensor(0))]
    assert "scaled by the maximum" in refused(open_net(), by_detached_range, brighter)


def test_activations_rounded_with_one_scale_for_the_batch_are_refused():
    torch.manual_seed(0)
    assert "scaled by the maximum" in refused(Quantized(), each, vectors())


# --- what examples may be ---------------------------------------------------------------------------------


class Checked(nn.Module):
    """Data may not leave their range: what verify makes of them is what they are."""

    def __init__(self):
        super().__init__()
        self.inner = open_net()

    def forward(self, x):
        assert torch.isclose(x.amax(1), torch.ones(len(x))).all()
        return self.inner(x)


def test_models_may_check_the_values_of_the_data():
    assert refused(Checked(), each, bright_pictures()) is None


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Own(dict):
    pass


OBJECTS = {
    "frozen dataclass": Example,
    "dataclass with slots": Slots,
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "dict of a class of its own": lambda x, y: Own(x=x, y=y),
    "namespace": lambda x, y: SimpleNamespace(x=x, y=y),
}


def part(example, name):
    return example[name] if isinstance(example, dict | UserDict) else getattr(example, name)


def losses_of_objects(model, batch):
    return each(model, (part(batch, "x"), part(batch, "y")))


def scaled_objects(model, batch):
    return by_detached_range(model, (part(batch, "x"), part(batch, "y")))


@pytest.mark.parametrize("kind", OBJECTS)
def test_batches_that_are_objects_are_looked_at_and_left_as_they_are(kind):
    torch.manual_seed(0)
    make, data = OBJECTS[kind], vectors()
    examples, before = [make(x, y) for x, y in data], [x.clone() for x, _ in data]

    def collate(examples):
        return make(*(torch.stack([part(each, name) for each in examples]) for name in "xy"))

    assert refused(open_net(), losses_of_objects, examples, collate=collate) is None
    assert "scaled by the maximum" in refused(open_net(), scaled_objects, examples, collate=collate)
    assert all(torch.equal(part(each, "x"), x) for each, x in zip(examples, before, strict=True))


def test_examples_that_cannot_be_in_one_batch_train_one_at_a_time(caplog):
    """Pictures of different sizes, with micro_batch=1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    data = [(torch.rand(1, 4 + number, 5), torch.tensor(number % 4)) for number in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = simple_plan(steps=2, examples=6, batch_size=3, bands=1)
    assert list(Training(model, each, optimizer, data, plan, clip_norm=1.0, micro_batch=1)) == [1, 2]
    assert "cannot be in one batch, and never are" in caplog.text
    with pytest.raises(RuntimeError, match="equal size"):
        Training(model, each, optimizer, data, plan, clip_norm=1.0)
