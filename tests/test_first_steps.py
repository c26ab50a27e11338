"""The epsilon of the first steps of a certified run: never below an independent estimate, whole at the end."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import bandmf
from bandmf import accounting
from bandmf.accounting import first_steps
from bandmf.accounting.bins import gram_matrix
from bandmf.planning import spent
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Identity, stamping
from bandmf.strategies.scaled import Scaled

DELTA = 1e-3  # that plain sampling reaches
BINS = {
    "epsilon": 4, "delta": DELTA, "examples": 120, "batch_size": 20, "steps": 18,
    "sampling": "balls-in-bins", "mechanism": "banded-inverse", "inverse_bands": 3, "certify_seconds": 5,
}  # fmt: skip
SEPARATED = {**{name: BINS[name] for name in ("epsilon", "delta", "examples", "batch_size", "steps")},
             "sampling": "b-min-sep", "bands": 3, "certify_seconds": 15}  # fmt: skip


# --- the law --------------------------------------------------------------------------------------------


FAMILIES = [
    Identity(11),
    BandedToeplitz([1.0, 0.5, 0.2], 11),
    BandedToeplitz([1.0, -0.5, 0.2], 11, normalize_columns=False),
    BandedInverse([1.0, -0.5, 0.3], 11),
    BufferedToeplitz([0.1, 0.2], [0.9, 0.5], 11),
    Scaled(BandedToeplitz([1.0, 0.5], 11, normalize_columns=False), np.linspace(1, 2, 11)),
    stamping(BandedInverse([1.0, -0.5], 4), 3),
]


@pytest.mark.parametrize("strategy", FAMILIES, ids=repr)
def test_the_gram_matrix_of_the_first_steps_is_that_of_the_leading_block(strategy):
    n, cycle = strategy.steps, 4
    C = np.abs(strategy.materialize())
    for count, gram in first_steps.leading_grams(strategy, cycle, range(1, n + 1)):
        sets = np.array([[s % cycle == j for s in range(count)] for j in range(cycle)], dtype=float)
        means = sets @ C[:count, :count].T
        exact = means @ means.T
        assert np.all(gram >= exact * (1 - 1e-15))
        assert_allclose(gram, exact, rtol=1e-10, atol=2e-9 * exact.max())
        assert_allclose(
            first_steps.leading_block(strategy, count).materialize(), strategy.materialize()[:count, :count]
        )
    assert_allclose(gram, gram_matrix(strategy, cycle), rtol=1e-10)


# --- against plain sampling -----------------------------------------------------------------------------


def law(plan, count):
    """Every set of steps before `count` in which an example may take part, as zeros and ones, with its probability."""
    if plan.sampling == "balls-in-bins":
        sets = [np.arange(count) % plan.cycle == place for place in range(plan.cycle)]
        return np.array(sets, float), np.full(plan.cycle, 1 / plan.cycle)
    b, p = plan.separation, plan.sampling_probability
    found = [((), wait, (p if wait else 1) / (1 + (b - 1) * p)) for wait in range(b)]
    for _ in range(count):
        waiting = [((*steps, 0), wait - 1, share) for steps, wait, share in found if wait]
        free = [(steps, share) for steps, wait, share in found if not wait]
        joined = [((*steps, 1), b - 1, share * p) for steps, share in free]
        found = [*waiting, *joined, *(((*steps, 0), 0, share * (1 - p)) for steps, share in free)]
    return np.array([steps for steps, _, _ in found], float), np.array([share for _, _, share in found])


def divergences(plan, count, epsilon, noise, samples=20_000, pieces=50):
    """(remove, add) with their standard errors, from the likelihood ratio written out."""
    generator, block = np.random.default_rng(count), np.abs(plan.strategy.materialize())[:count, :count]
    sets, share = law(plan, count)
    assert share.sum() == pytest.approx(1)
    means, removed, added = sets @ block.T / noise, [], []
    for _ in range(pieces):
        rows = samples // pieces
        x = generator.standard_normal((rows, count))
        chosen = means[generator.choice(len(means), size=rows, p=share / share.sum())]
        for shift, sign, found in ((chosen, -1, removed), (0, 1, added)):
            ratio = np.exp((x + shift) @ means.T - (means**2).sum(axis=1) / 2) @ share
            found.extend(np.maximum(1 - np.exp(epsilon) * ratio**sign, 0))
    return [(float(np.mean(found)), float(np.std(found)) / samples**0.5) for found in (removed, added)]


def holds(plan, count, epsilon, noise):
    """Whether plain sampling does not contradict epsilon."""
    return all(mean - 4 * error <= plan.delta for mean, error in divergences(plan, count, epsilon, noise))


@pytest.fixture(scope="module", params=[BINS, SEPARATED], ids=["bins", "b-min-sep"])
def plan(request):
    return bandmf.plan(**request.param)


def test_no_epsilon_is_below_what_plain_sampling_shows(plan):
    for count, epsilon in spent.curve(plan)[::2]:
        assert holds(plan, count, epsilon, plan.noise_multiplier)
        assert not holds(plan, count, 0.75 * epsilon, plan.noise_multiplier)  # nor far above


def test_a_curve_for_other_noise_is_caught(plan):
    count, epsilon = spent.curve(plan)[len(spent.curve(plan)) // 2]
    assert not holds(plan, count, epsilon, plan.noise_multiplier / 1.3)


def test_what_is_spent_increases_and_is_all_at_the_end(plan):
    found = [plan.spent_after(steps) for steps in range(plan.steps + 1)]
    assert found[0] == 0 < found[1]
    assert found == sorted(found)
    assert found[-1] == plan.spent() == plan.epsilon
    assert found[1] < 0.5 * plan.epsilon
    known = dict(spent.curve(plan))
    assert all(found[steps] == known[min(count for count in known if count >= steps)] for steps in range(1, plan.steps))


def test_the_first_step_is_a_poisson_sampled_one():
    strategy, sigma, delta = Identity(40), 1.1, 1e-5
    ((_, law),) = first_steps.in_bins(strategy, 20, sigma, [1])
    exact = accounting.spent(accounting.Event(1 / 20, 1), sigma, delta)
    found = first_steps.certified_epsilon(law(), delta, 1e-3 * delta, 8.0, 2**17)
    assert exact < found < 1.5 * exact  # where epsilon is small, few samples show it


def test_the_curve_is_computed_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    made, told = bandmf.plan(**BINS), []
    computed, original = [], first_steps.certified_curve

    def counting(*arguments):
        computed.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(first_steps, "certified_curve", counting)
    first = [made.spent_after(steps, told.append) for steps in range(made.steps + 1)]
    assert len(told) == len(spent.points(made.steps))
    assert all("epsilon of the first" in text for text in told)
    spent._known.clear()  # as another process
    assert [made.spent_after(steps) for steps in range(made.steps + 1)] == first
    assert len(computed) == 1


def test_where_parts_cannot_be_certified_the_whole_counts(plan, monkeypatch):
    monkeypatch.setattr(spent, "_known", {})
    monkeypatch.setattr(spent._cache, "once", lambda kind, question, compute, read: read(compute()))
    monkeypatch.setattr(spent, "_laws", lambda plan: [])
    assert plan.spent_after(1) == plan.spent_after(plan.steps - 1) == plan.epsilon
