"""Rounds of different weight: cyclic Poisson sampling of strategies with step scales, against every round by itself."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st

import bandmf
from bandmf import accounting, sampling
from bandmf.accounting import Event, estimate
from bandmf.accounting.events import ADJACENCIES, levels_of
from bandmf.randomness.key import Key
from bandmf.strategies import BandedToeplitz, Scaled

RELATIONS = dict(zip(ADJACENCIES, ("ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL", "REPLACE_ONE"), strict=True))
FALLING = np.linspace(1.0, 0.1, 20)
WARMING = np.concatenate([np.linspace(0.2, 1.0, 6), np.linspace(1.0, 0.1, 15)])


def oracle(norms, bands, q, sigma, delta, adjacency="add-remove", interval=1e-3):
    """Epsilon of the worst part, by dp_accounting, each of its rounds composed by itself with its own norm."""
    found = []
    for part in range(bands):
        composed = None
        for norm in norms[part::bands] / norms.max():
            one = privacy_loss_distribution.from_gaussian_mechanism(
                sigma / norm,
                sampling_prob=q,
                value_discretization_interval=interval,
                neighboring_relation=getattr(NeighboringRelation, RELATIONS[adjacency]),
            )
            composed = one if composed is None else composed.compose(one)
        found.append(composed.get_epsilon_for_delta(delta))
    return max(found)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("norms", "bands"), [(FALLING, 4), (WARMING, 3), (FALLING[::2], 1)])
def test_the_event_covers_every_part_composed_round_by_round(norms, bands, adjacency):
    """It is the composition of the largest norm of each turn, which for falling norms is what the first part has."""
    event = Event(0.2, -(-len(norms) // bands), adjacency, levels=levels_of(norms, bands))
    found = accounting.spent(event, 0.9, 1e-6)
    assert found >= oracle(norms, bands, 0.2, 0.9, 1e-6, adjacency) * (1 - 1e-3)
    largest = np.array([norms[i : i + bands].max() for i in range(0, len(norms), bands)])
    assert found == pytest.approx(oracle(largest, 1, 0.2, 0.9, 1e-6, adjacency), rel=1e-3)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_few_levels_cost_epsilon_but_never_hide_any(most):
    exact = oracle(FALLING, 4, 0.2, 0.9, 1e-6)
    event = Event(0.2, 5, levels=levels_of(FALLING, 4, most))
    assert len(event.kinds) == most
    assert accounting.spent(event, 0.9, 1e-6) >= exact * (1 - 1e-3)


@pytest.mark.parametrize("planted", ["rounded down", "a turn late"])
def test_planted_levels_that_hide_something_are_seen(planted):
    exact = oracle(FALLING, 4, 0.2, 0.9, 1e-6)
    hidden = {"rounded down": np.floor(4 * FALLING[::4]) / 4 + 0.01, "a turn late": np.append(FALLING[4::4], 0.01)}
    levels = tuple((float(min(level, 1)), 1) for level in hidden[planted])
    assert accounting.spent(Event(0.2, 5, levels=levels), 0.9, 1e-6) < exact * (1 - 1e-2)


@given(norms=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), bands=st.integers(1, 5), most=st.integers(1, 6))
def test_no_part_contributes_more_than_the_levels_say(norms, bands, most):
    norms = np.array(norms)
    event = Event(0.5, -(-len(norms) // bands), levels=levels_of(norms, bands, most))
    runs = event.levels or ((1.0, event.rounds),)
    in_turn = np.repeat([level for level, _ in runs], [count for _, count in runs])
    contributions = norms / norms.max()
    assert np.all(contributions <= np.repeat(in_turn, bands)[: len(norms)])
    assert len(event.kinds) <= most
    assert in_turn.max() == 1


@given(values=st.lists(st.integers(1, 64), min_size=1, max_size=9), most=st.integers(1, 4))
def test_the_levels_are_those_of_least_weight(values, most):
    norms = np.array(values) / 64.0 * 64 / max(values)
    norms = np.ceil(norms * 2**10) / 2**10
    choices = itertools.combinations(np.unique(norms), min(most, len(np.unique(norms))))
    best = min(
        (sum(min(level for level in levels if level >= norm) ** 2 for norm in norms))
        for levels in choices
        if levels[-1] == norms.max()
    )
    event = Event(0.5, len(norms), levels=levels_of(norms, 1, most))
    assert event.weight == pytest.approx(best, rel=1e-9)


def test_the_same_norms_are_the_same_event_as_without_levels():
    assert levels_of(np.ones(12), 4) is None
    assert levels_of(np.ones(12) * (1 + 1e-13 * np.arange(12)), 4) is None
    assert Event(0.1, 3, levels=((1.0, 2), (1.0, 1))) == Event(0.1, 3)


def test_two_rounds_by_quadrature():
    """Independent of any accountant: both directions on a grid of two noises."""
    q, sigma, levels, epsilon = 0.3, 1.1, (1.0, 0.4), 1.0
    x = np.linspace(-9, 9, 1201)
    cells = np.exp(-(x**2) / 2) / np.exp(-(x**2) / 2).sum()

    def ratio(level, shift):
        return 1 - q + q * np.exp((sigma * x + shift) * level / sigma**2 - (level / sigma) ** 2 / 2)

    # Remove: under the mixture, noise alone with 1 - q, shifted by the level with q.
    def mixture(level):
        return [(1 - q, ratio(level, 0.0)), (q, ratio(level, level))]

    remove = sum(
        a * b * (cells @ np.maximum(1 - math.exp(epsilon) / np.multiply.outer(u, v), 0) @ cells)
        for a, u in mixture(levels[0])
        for b, v in mixture(levels[1])
    )
    both = np.multiply.outer(ratio(levels[0], 0.0), ratio(levels[1], 0.0))
    add = cells @ np.maximum(1 - math.exp(epsilon) * both, 0) @ cells
    event = Event(q, 2, levels=tuple((level, 1) for level in levels))
    assert accounting.spent(event, sigma, max(remove, add)) == pytest.approx(epsilon, rel=2e-3)


def test_releases_without_sampling_add_up_to_one():
    levels = ((1.0, 4), (0.5, 16))
    together = accounting.spent(Event(1.0, 20, levels=levels), 5.0, 1e-6)
    assert together == pytest.approx(accounting.spent(Event(1.0, 1), 5.0 / math.sqrt(8), 1e-6), rel=1e-9)


def test_the_first_rounds_of_an_event_are_its_first_levels():
    event = Event(0.1, 10, levels=((0.5, 3), (1.0, 5), (0.5, 2)))
    assert event.after(2).levels == ((0.5, 2),)
    assert event.after(4).levels == ((0.5, 3), (1.0, 1))
    assert event.after(10) == event
    spent = [accounting.spent(event.after(rounds), 1.0, 1e-5) for rounds in (2, 4, 8, 10)]
    assert spent == sorted(spent)
    assert event.kinds == ((1.0, 5), (0.5, 5))


@pytest.mark.parametrize("levels", [((1.0, 2),), ((1.5, 3),), ((0.0, 3),), ((1.0, 0), (0.5, 3))])
def test_levels_that_make_no_sense_are_refused(levels):
    with pytest.raises(ValueError, match="level"):
        Event(0.1, 3, levels=levels)


@pytest.mark.parametrize("event", [Event(0.1, 64, levels=levels_of(np.linspace(1, 0.05, 64), 1, 16))])
def test_sigma_meets_epsilon_closely(event):
    sigma = accounting.calibrated(event, 4.0, 1e-6)
    assert 4.0 * (1 - 2e-4) <= accounting.spent(event, sigma, 1e-6) <= 4.0
    plain = accounting.calibrated(replace(event, levels=None), 4.0, 1e-6)
    assert sigma < 0.9 * plain
    kinds = estimate.round_losses(event, sigma)
    assert estimate._estimate(kinds, 1e-6, 1e-3) == pytest.approx(4.0, rel=5e-3)


# --- plans --------------------------------------------------------------------------------------------

SCALED = Scaled(BandedToeplitz([1.0, 0.5, 0.4, 0.3], 40), np.linspace(2.0, 0.2, 40))
SETTING = {"delta": 1e-6, "examples": 1000, "batch_size": 20, "steps": 40, "sampling": "cyclic-poisson"}


def test_a_plan_of_a_scaled_strategy_accounts_for_its_scales(tmp_path):
    plan = bandmf.plan(**SETTING, epsilon=6, strategy=SCALED)
    (event,) = plan.events
    assert event.levels == levels_of(SCALED.column_norms(), 4)
    assert plan.sensitivity == pytest.approx(2.0)
    exact = oracle(SCALED.column_norms(), 4, 0.08, plan.noise_multiplier, 1e-6)
    assert 6 * 0.98 <= exact <= 6 * (1 + 1e-3)
    unscaled = bandmf.plan(**SETTING, epsilon=6, strategy=SCALED.strategy)
    assert plan.noise_multiplier < 0.9 * unscaled.noise_multiplier
    assert bandmf.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    spent = [plan.spent_after(steps) for steps in (0, 10, 40)]
    assert spent == sorted(spent)
    assert spent[-1] == plan.spent() <= 6
    assert sampling.sampler_of(plan, Key(bytes(32))).batch(3).size >= 0
    assert json.loads((tmp_path / "plan.json").read_text())["strategy"]


def test_a_fixed_noise_multiplier_says_what_a_scaled_strategy_costs():
    free = bandmf.plan(**SETTING, noise_multiplier=1.0, strategy=SCALED)
    plain = bandmf.plan(**SETTING, noise_multiplier=1.0, strategy=SCALED.strategy)
    assert free.epsilon < 0.9 * plain.epsilon


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_scales_go_with_every_adjacency_and_with_capped_batches(adjacency):
    options = {**SETTING, "adjacency": adjacency, "epsilon": 6, "max_batch_size": 30}
    scaled, plain = (bandmf.plan(**options, strategy=each) for each in (SCALED, SCALED.strategy))
    assert scaled.noise_multiplier < plain.noise_multiplier
    assert all(event.levels for event in scaled.events)
