"""A cap on the batch: what it really costs, by enumerating every batch of both neighbors, against the claim."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import optimize, stats

import bandmf
from bandmf import Key, accounting
from bandmf.accounting import Event
from bandmf.sampling import sampler

DELTA = 1e-5


def sums(values: tuple[float, ...], probability: float, cap: int) -> dict[float, float]:
    """The distribution of the sum over a Poisson sample that is cut to `cap` at random: every case by itself."""
    found: dict[float, float] = {}
    for size in range(len(values) + 1):
        for sample in itertools.combinations(values, size):
            chance = probability**size * (1 - probability) ** (len(values) - size)
            kept = list(itertools.combinations(sample, min(size, cap)))
            for batch in kept:
                total = sum(batch)
                found[total] = found.get(total, 0.0) + chance / len(kept)
    return found


def exact_epsilon(first: dict[float, float], second: dict[float, float], sigma: float) -> float:
    """The epsilon at DELTA of these two distributions of sums with Gaussian noise, the worse of both orders."""
    x = np.linspace(-9 - 12 * sigma, 9 + 12 * sigma, 40_001)
    p, q = (sum(w * stats.norm.pdf(x, s, sigma) for s, w in sums.items()) for sums in (first, second))

    def epsilon(p, q):
        def excess(epsilon):
            return np.maximum(p - np.exp(epsilon) * q, 0).sum() * (x[1] - x[0]) - DELTA

        return optimize.brentq(excess, 0, 100) if excess(0) > 0 else 0.0

    return max(epsilon(p, q), epsilon(q, p))


def worst_neighbor(examples: int, probability: float, cap: int, sigma: float) -> float:
    """The largest epsilon between `examples` contributions of -1, 0 or 1 and the same with one more or one less."""
    worst = 0.0
    for smaller in (examples - 1, examples):
        for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), smaller):
            pair = [sums(values, probability, cap) for values in (others, (*others, 1.0))]
            worst = max(worst, exact_epsilon(*pair, sigma))
    return worst


@pytest.mark.parametrize(
    ("examples", "probability", "cap", "sigma"),
    [(3, 0.5, 2, 1.0), (4, 0.5, 2, 1.5), (4, 0.3, 3, 0.8), (5, 0.9, 5, 1.0), (5, 0.2, 1, 1.0), (4, 1.0, 4, 2.0)],
)
def test_a_capped_batch_costs_no_more_than_claimed_for_either_neighbor(examples, probability, cap, sigma):
    claimed = accounting.epsilon(sigma, DELTA, probability, 1, max_batch_size=cap, examples=examples)
    assert worst_neighbor(examples, probability, cap, sigma) <= claimed * (1 + 1e-6)


@pytest.mark.parametrize(("probability", "cap", "sigma"), [(0.9, 5, 1.0), (1.0, 5, 2.0)])
def test_the_claim_for_the_smaller_neighbor_is_exceeded_by_the_larger_one(probability, cap, sigma):
    """The check above would catch an accountant that forgets the neighbor with one example more."""
    smaller_only = accounting.spent(Event(probability, 1, "add-remove", cap, 5), sigma, DELTA)
    assert worst_neighbor(5, probability, cap, sigma) > smaller_only * 1.005


@pytest.mark.parametrize("cap", [30, 40])
def test_a_plan_with_a_cap_counts_the_neighbor_with_one_example_more(cap):
    plan = bandmf.plan(epsilon=4, delta=DELTA, examples=40, batch_size=30, steps=10, bands=1, max_batch_size=cap)
    assert sampler(plan, Key()).events == plan.events
    assert plan.events[-1].examples == 41
    larger = Event(0.75, 10, "add-remove", cap, 41)
    assert accounting.spent(larger, plan.noise_multiplier, DELTA) <= 4


def test_under_zero_out_no_example_is_added():
    plan = bandmf.plan(
        epsilon=4, delta=DELTA, examples=40, batch_size=5, steps=10, bands=2, max_batch_size=8, adjacency="zero-out"
    )
    assert sampler(plan, Key()).events == plan.events == (Event(0.25, 5, "zero-out", 8, 20),)
