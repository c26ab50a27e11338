"""What a forward pass changes by the data, without noise, is refused however it is done, and put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import verify_cases as cases
from bandmf.torch import verify


class Changing(nn.Module):
    """A model with two small modules, two buffers and an empty one, which `change` alters by the data."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.change = cases.net(), change
        self.one, self.two = nn.Identity(), nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("empty", None)
        self.one.register_buffer("own", torch.zeros(()))

    def forward(self, x):
        self.change(self, x.detach().mean())
        return self.net(x)


def in_place(model, mean):
    model.seen += mean


def through_data(model, mean):
    model.seen.data.add_(mean)


def exchanged(model, mean):
    model.seen = model.seen + mean


def emptied(model, mean):
    model.seen = None
    model.seen = mean


def registered_again(model, mean):
    del model.seen
    model.register_buffer("seen", mean)


def filled(model, mean):
    model.empty = mean


def registered_new(model, mean):
    model.two.register_buffer("own", mean)


def new_parameter(model, mean):
    model.location = nn.Parameter(mean.view(1), requires_grad=False)


def swapped(model, mean):
    torch.utils.swap_tensors(model.seen, mean.clone())


def a_weight(model, mean):
    with torch.no_grad():
        model.net[0].bias.add_(mean)


def another_shape(model, mean):
    model.seen = mean.view(1)


CHANGES = [
    in_place, through_data, exchanged, emptied, registered_again, filled, registered_new, new_parameter, swapped,
    a_weight, another_shape,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_by_the_data_is_refused_and_put_back(change):
    model = Changing(change)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = verify(model, cases.each, cases.vectors())
    assert any("changes in the forward pass by the data" in each.reason for each in found.problems)
    after = {name: value for name, value in model.state_dict().items() if name in before}
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def counted(model, _):
    model.seen += 1


def from_weights(model, _):
    model.seen = model.net[0].weight.detach().norm()


@pytest.mark.parametrize("change", [lambda model, mean: None, counted, from_weights])
def test_what_does_not_follow_the_data_is_not_refused(change):
    assert verify(Changing(change), cases.each, cases.vectors()).ok
