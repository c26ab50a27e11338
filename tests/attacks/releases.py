"""What an attacker sees of a run, beside what is true: for tests that replay attacks."""

from __future__ import annotations

import torch
from torch import nn

from bandmf.torch import Training
from training import simple_plan, small_data, weights

PLAN = simple_plan(steps=12, noise_multiplier=1.0)
RATE, CLIP = 0.25, 0.5


def losses(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def open_run(folder=None, data=None, plan=PLAN, model=None, **options):
    """A run whose released sums can be read off the weights: a linear model and plain SGD."""
    torch.manual_seed(3)
    model = nn.Linear(8, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"clip_norm": CLIP, "verify": False, **options}
    return Training(model, losses, optimizer, small_data() if data is None else data, plan, folder=folder, **options)


def other_data():
    """A neighbor: one row is another."""
    data = small_data()
    data.tensors[0][7] += 3
    return data


def stepper(training):
    """The inner state of a run, which users never see."""
    return training._stepper


class Watch:
    """Records, step by step, the clipped sums (`true`) and what the loop released (`released`), flat."""

    def __init__(self, training):
        self.training, self.true, self.released = training, [], []
        record = stepper(training)._record

        def watched(step):
            record(step)
            views = stepper(training).sums.views
            self.true.append(torch.cat([view.flatten() for view in views.values()]).clone())

        stepper(training)._record = watched

    def train(self, until=None):
        training = self.training
        while not training.finished and training.steps_taken != until:
            before = weights(training.model).double()
            training.advance()
            moved = before - weights(training.model).double()
            self.released.append((moved / RATE * training.plan.batch_size).float())
        return self

    @property
    def noise(self):
        return [released - true for released, true in zip(self.released, self.true, strict=True)]


def cancels(one, two):
    """Whether the noise of a step of one run is that of the same step of another: their difference is bare."""
    return any(float((a - b).norm()) < 0.01 * float(a.norm()) for a, b in zip(one.noise, two.noise, strict=False))
