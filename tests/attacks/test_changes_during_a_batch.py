"""What changes while a batch is processed, by the data and without noise, is refused however it is done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from private_loops import plain, private_of, small_net, vectors

FIRST_CHANGE = 8  # forward passes: the self-test has seen nothing by then


class Changing(nn.Module):
    """A model with two small modules, a buffer and a frozen parameter, which `change` alters by the data."""

    def __init__(self, change):
        super().__init__()
        self.net, self.calls, self.change = small_net(), 0, change
        self.one, self.two = nn.Identity(), nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("empty", None)
        self.one.register_buffer("own", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.calls > FIRST_CHANGE:
            self.change(self, x.detach().mean())
        return self.net(x)


def twice(model, mean):
    """The second may get the place in memory that the first had."""
    model.seen = model.seen + mean
    model.seen = model.seen + mean


def emptied(model, mean):
    model.seen = None
    model.seen = mean


def registered_again(model, mean):
    del model.seen
    model.register_buffer("seen", mean)


def moved(model, mean):
    model.empty, model.seen = model.seen, None


def moved_to_another_module(model, mean):
    model.two.register_buffer("own", model.one._buffers.pop("own"))


def new_parameter(model, mean):
    model.location = nn.Parameter(mean.view(1), requires_grad=False)


def other_buffers(model, mean):
    model.__dict__["_buffers"] = {"seen": mean, "empty": None}


def other_modules(model, mean):
    again = nn.Identity()
    again.register_buffer("own", mean)
    model.__dict__["_modules"] = {**model._modules, "one": again}


def made_again(model, mean):
    del model.one
    model.one = nn.Identity()
    model.one.register_buffer("own", mean)


def swapped(model, mean):
    torch.utils.swap_tensors(model.seen, mean.clone())


CHANGES = [
    twice, emptied, registered_again, moved, moved_to_another_module, new_parameter, other_buffers, other_modules,
    made_again, swapped,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("self_test", [True, False])
def test_a_change_that_begins_later_is_refused(change, self_test):
    private = private_of(Changing(change), vectors(), steps=12, self_test=self_test)

    def train():
        while not private.finished:
            for batch in private.loader:
                plain(private, batch)

    with pytest.raises(RuntimeError, match=r"changed between the start of a batch|its modules are others"):
        train()
    assert private.steps_taken <= FIRST_CHANGE


def test_what_does_not_change_is_not_refused():
    private = private_of(Changing(lambda model, mean: None), vectors(), steps=12)
    while not private.finished:
        for batch in private.loader:
            plain(private, batch)
    assert private.steps_taken == 12
