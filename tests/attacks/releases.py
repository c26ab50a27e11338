"""What an attacker sees of a run, beside what is true: for tests that replay attacks."""

from __future__ import annotations

import torch
from torch import nn

from bandmf.torch import make_private
from training import simple_plan, small_data

PLAN = simple_plan(steps=12, noise_multiplier=1.0)
RATE, CLIP = 0.25, 0.5


def open_run(folder=None, data=None, plan=PLAN, **options):
    """A run whose released sums can be read off the weights: a linear model and plain SGD."""
    torch.manual_seed(3)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"clip_norm": CLIP, "criterion": nn.CrossEntropyLoss(), **options}
    data = small_data() if data is None else data
    return make_private(model, optimizer, data, plan, run_folder=folder, **options)


def other_data():
    """A neighbor: one row is another."""
    data = small_data()
    data.tensors[0][7] += 3
    return data


class Watch:
    """Records, step by step, the clipped sums (`true`) and what the loop released (`released`), flat."""

    def __init__(self, private):
        self.private, self.true, self.released = private, [], []
        record = private.stepper._record

        def watched(piece):
            record(piece)
            views = private.stepper.sums.views
            self.true.append(
                torch.cat([views[name].flatten() for name in private.stepper.parameters]).clone()
            )

        private.stepper._record = watched

    def train(self, until=None):
        private = self.private
        while not private.finished:
            for x, y in private.loader:
                private.optimizer.zero_grad()
                private.criterion(private.model(x), y).backward()
                private.optimizer.step()
                if not private.optimizer.stepped:  # the self-test releases nothing
                    continue
                parameters = private.stepper.parameters.values()
                gradient = torch.cat([p.grad.flatten() for p in parameters])
                self.released.append(gradient * private.plan.batch_size)
                if private.steps_taken == until:
                    return self
        return self

    @property
    def noise(self):
        return [released - true for released, true in zip(self.released, self.true, strict=True)]


def cancels(one, two):
    """Whether the noise of a step of one run is that of the same step of another: their difference is bare."""
    return any(
        float((a - b).norm()) < 0.01 * float(a.norm()) for a, b in zip(one.noise, two.noise, strict=False)
    )
