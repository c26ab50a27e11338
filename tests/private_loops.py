"""The shipped loop, make_private with loader and optimizer, on data small enough to compare whole runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import make_private
from training import simple_plan, weights

CLIP = 1.0
SILENT = 1e-25  # a noise multiplier whose noise is below all rounding


def run_plan(examples, steps=1):
    """Every example is in every batch, without noise that one could see."""
    return simple_plan(
        examples=examples, batch_size=examples, bands=1, noise_multiplier=SILENT, steps=steps
    )  # fmt: skip


def private_of(model, data, steps=1, learning_rate=1.0, **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=learning_rate)
    options = {"clip_norm": CLIP, "plan": run_plan(len(data), steps), **options}
    return make_private(model, optimizer, data, **options)


def plain(private, batch):
    """The loop as everybody writes it."""
    x, y = batch
    private.optimizer.zero_grad()
    functional.cross_entropy(private.model(x), y).backward()
    private.optimizer.step()


@dataclass
class Outcome:
    refused: str | None
    total: torch.Tensor | None  # the sum of clipped gradients, in float64


def outcome(model, data, mode, loop=plain, **options):
    """One step on all data: the sum that it released, or the sentence it was refused with."""
    model = copy.deepcopy(model)
    try:
        private = private_of(model, data, clipping=mode, **options)
        for batch in private.loader:
            loop(private, batch)
    except (RuntimeError, ValueError) as error:
        return Outcome(str(error), None)
    assert private.finished
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return Outcome(None, len(data) * torch.cat([g.flatten().double() for g in gradients]))


class Rows(list):
    """Examples in a list, as a data set."""


def with_one_replaced(data, example, number=0):
    return Rows([example if index == number else one for index, one in enumerate(data)])


def vectors(examples=8, features=6, classes=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, features, generator=generator)
    y = torch.randint(0, classes, (examples,), generator=generator)
    return Rows([(x[i], y[i]) for i in range(examples)])


def small_net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def trained_weights(private, loop=plain):
    while not private.finished:
        for batch in private.loader:
            loop(private, batch)
    return weights(private.model)
