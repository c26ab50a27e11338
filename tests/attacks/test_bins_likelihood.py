"""The likelihood-ratio attack on the shipped loop with bins, fixed and redrawn: never more than (epsilon, delta).

Every example has a coordinate of its own, to which it adds its whole clip norm; as many coordinates have no example.
Places and noise of different coordinates are independent, so one run is a thousand attacks with the example and a
thousand without. The attacker knows everything but places and noise, and decides by the likelihood ratio, which is
optimal. delta is large, so that it can be measured.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import bandmf
from bandmf import strategies
from bandmf.torch import Training
from sweeps import some_long

EPSILON, DELTA = 1.0, 0.02
EXAMPLES, STEPS, CYCLE = 1_500, 12, 4
RUNS = 8


class Coordinates(nn.Module):
    """Its loss for example e is weight[e] times a sign, so that the gradient is the unit vector e or its negative."""

    def __init__(self, adaptive):
        super().__init__()
        self.weight = nn.Linear(2 * EXAMPLES, 1, bias=False)
        self.adaptive = adaptive
        nn.init.zeros_(self.weight.weight)

    def forward(self, x):
        losses = self.weight(x)[:, 0]
        if self.adaptive:  # follow what has been released: the sign of the sum so far
            losses = losses * torch.where(losses.detach() >= 0, 1.0, -1.0)
        return losses


def one_hot():
    return torch.utils.data.TensorDataset(torch.eye(EXAMPLES, 2 * EXAMPLES))


def losses(model, batch):
    return model(batch[0])


def releases(plan, adaptive, noise=1.0):
    """(coordinates with an example, steps) and the same without: noisy sums of one run."""
    model = Coordinates(adaptive)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = Training(model, losses, optimizer, one_hot(), plan, clip_norm=1.0, verify=False)
    training._stepper.scale *= noise
    found, before = [], np.zeros(2 * EXAMPLES)
    for _ in training:
        after = model.weight.weight[0].detach().numpy().astype(float)
        found.append(plan.batch_size * (before - after))  # a learning rate of one
        before = after
    found = np.array(found).T
    return found[:EXAMPLES], found[EXAMPLES:]


def signs(released, adaptive):
    """The sign that an example's gradient had at every step, as the attacker computes it."""
    before = np.cumsum(released, axis=1) - released
    return np.where(-before >= 0, 1.0, -1.0) if adaptive else np.ones_like(released)


def sets_of_steps(plan):
    """What an example may take part in, all equally likely."""
    if plan.sampling == "balls-in-bins":
        return [list(range(place, STEPS, CYCLE)) for place in range(CYCLE)]
    return [list(steps) for steps in itertools.product(*np.arange(STEPS).reshape(-1, CYCLE).tolist())]


def log_ratio(plan, released, adaptive, noise):
    """log of P(released with the example) / P(released without it), of every coordinate."""
    C = plan.strategy.materialize()
    x, sigma = released @ C.T, noise * plan.noise_scale
    gradient, terms = signs(released, adaptive), []
    for steps in sets_of_steps(plan):
        taken = np.zeros_like(released)
        taken[:, steps] = gradient[:, steps]
        mean = taken @ C.T
        terms.append((x * mean).sum(1) / sigma**2 - (mean**2).sum(1) / (2 * sigma**2))
    return np.logaddexp.reduce(terms, axis=0) - math.log(len(terms))


def advantages(plan, adaptive, noise=1.0):
    """The two divergences as the attack reaches them, with their standard errors."""
    pairs = [releases(plan, adaptive, noise) for _ in range(RUNS)]
    present, absent = (
        np.concatenate([log_ratio(plan, r, adaptive, noise) for r in side]) for side in zip(*pairs, strict=True)
    )
    found = []
    for first, second, flip in ((present, absent, 1), (absent, present, -1)):
        p, q = (np.mean(flip * each > EPSILON) for each in (first, second))
        error = math.sqrt((p * (1 - p) + math.exp(2 * EPSILON) * q * (1 - q)) / len(first))
        found.append((p - math.exp(EPSILON) * q, error))
    return found


def planned(strategy, sampling="balls-in-bins"):
    return bandmf.plan(
        epsilon=EPSILON,
        delta=DELTA,
        examples=EXAMPLES,
        batch_size=EXAMPLES / CYCLE,
        steps=STEPS,
        sampling=sampling,
        strategy=strategy,
    )


INVERSE = strategies.BandedInverse([1.0, -0.4, -0.2], STEPS)
SIGNED = strategies.BandedToeplitz([1.0, -0.6, 0.3], STEPS)  # C has negative entries: |C| counts


@pytest.mark.parametrize(
    ("strategy", "adaptive"),
    some_long(
        [(INVERSE, False), (INVERSE, True), (SIGNED, False), (SIGNED, True)],
        lambda case: case in ((INVERSE, True), (SIGNED, False)),
    ),
    ids=["constant", "adaptive", "signed C, constant", "signed C, adaptive"],
)
def test_the_best_attack_on_the_loop_stays_within_epsilon_and_delta(strategy, adaptive):
    for reached, error in advantages(planned(strategy), adaptive):
        assert reached <= DELTA + 3.5 * error


def test_constant_gradients_reach_nearly_all_of_delta():
    """So the attack is a strong one, and the certified noise is not wasted."""
    (remove, error), _ = advantages(planned(INVERSE), adaptive=False)
    assert remove >= 0.8 * DELTA - 3.5 * error


def test_the_attack_finds_too_little_noise():
    """Planted: less noise than the plan asks for."""
    (remove, error), _ = advantages(planned(INVERSE), adaptive=False, noise=0.7)
    assert remove > DELTA + 3.5 * error


REDRAWN = "balls-in-bins-redrawn"
WIDE = strategies.BandedInverse([1.0, -0.3], STEPS)  # columns longer than an epoch: what is beyond is bounded


@pytest.mark.parametrize(
    ("strategy", "adaptive"),
    some_long([(SIGNED, True), (SIGNED, False), (WIDE, True)], lambda case: case == (SIGNED, True)),
    ids=["signed C, adaptive", "signed C, constant", "inverse, adaptive"],
)
def test_redrawn_bins_stay_within_epsilon_and_delta(strategy, adaptive):
    for reached, error in advantages(planned(strategy, REDRAWN), adaptive):
        assert reached <= DELTA + 3.5 * error


def test_redrawn_bins_use_nearly_all_of_delta_and_no_less_noise_would_do():
    plan = planned(strategies.BandedToeplitz([1.0, 0.6, 0.3], STEPS), REDRAWN)
    (remove, error), _ = advantages(plan, adaptive=False)
    assert 0.8 * DELTA - 3.5 * error <= remove <= DELTA + 3.5 * error
    (remove, error), _ = advantages(plan, adaptive=False, noise=0.7)  # planted
    assert remove > DELTA + 3.5 * error
