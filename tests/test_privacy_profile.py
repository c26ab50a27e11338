"""The privacy profile and what it says of attacks: never below an independent likelihood ratio, and close to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

import bandmf
from bandmf.accounting import profile
from bandmf.participation import Single
from bandmf.planning.profile import table
from bandmf.strategies import Identity
from test_first_steps import BINS, SEPARATED, divergences

POISSON = {"epsilon": 4, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 40, "sampling": "cyclic-poisson"}
RATES = np.array([0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0])


@pytest.fixture(scope="module", params=[BINS, SEPARATED], ids=["bins", "b-min-sep"])
def plan(request):
    return bandmf.plan(**request.param)


def test_the_gaussian_mechanism_has_its_profile_and_its_attack_rates():
    plan = bandmf.plan(epsilon=2, delta=1e-5, steps=4, batch_size=2, participation=Single(), strategy=Identity(4))
    mu = 1 / plan.noise_multiplier
    epsilons = np.array([0.0, 0.3, 1.0, 2.0])
    exact = special.ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons) * special.ndtr(-mu / 2 - epsilons / mu)
    found = np.array(plan.privacy_profile(epsilons))
    assert np.all(found >= exact * (1 - 1e-9))
    np.testing.assert_allclose(found, exact, rtol=0.02)
    best = special.ndtr(special.ndtri(RATES) + mu)
    rates = np.array(plan.attack_rates(RATES))
    assert np.all(rates >= best - 1e-9)
    np.testing.assert_allclose(rates, best, atol=0.01)
    assert plan.advantage() == pytest.approx(2 * special.ndtr(mu / 2) - 1, rel=1e-3)


def test_no_delta_is_below_what_plain_sampling_shows(plan):
    for epsilon, delta in table(plan).T[::16]:
        for mean, error in divergences(plan, plan.steps, epsilon, plan.noise_multiplier, samples=5_000):
            assert mean - 4 * error <= delta
    at_half = max(mean for mean, _ in divergences(plan, plan.steps, plan.epsilon / 4, plan.noise_multiplier))
    assert plan.privacy_profile([plan.epsilon / 4])[0] < 1.1 * at_half + 1e-3


def test_a_profile_for_other_noise_is_caught(plan):
    found = divergences(plan, plan.steps, 0.5, plan.noise_multiplier / 1.2)
    assert max(mean - 4 * error for mean, error in found) > plan.privacy_profile([0.5])[0]


@pytest.mark.parametrize("budget", [POISSON, BINS], ids=["cyclic", "bins"])
def test_deltas_fall_and_end_at_the_plan_s(budget):
    plan = bandmf.plan(**budget)
    deltas = plan.privacy_profile(np.linspace(0, 2 * plan.epsilon, 50))
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[-1] <= plan.delta
    assert plan.advantage() == deltas[0]
    rates = plan.attack_rates(RATES)
    assert rates == sorted(rates)
    assert rates[0] <= 2 * plan.delta * math.exp(plan.epsilon)
    assert rates[-1] == 1
    assert max(rates - RATES) <= plan.advantage() + 1e-12


def test_between_two_points_lies_a_line_in_the_exponential():
    grid = np.linspace(0, 3, 7)
    exact = np.array([grid, special.ndtr(0.5 - grid) - np.exp(grid) * special.ndtr(-0.5 - grid)])
    epsilons = np.linspace(0, 3, 101)
    truth = special.ndtr(0.5 - epsilons) - np.exp(epsilons) * special.ndtr(-0.5 - epsilons)
    assert np.all(profile.between(exact, epsilons) >= truth - 1e-12)


@pytest.mark.parametrize("wrong", [[-0.1], [float("nan")], [1.1], []])
def test_rates_that_are_none_are_refused(wrong, plan):
    with pytest.raises(ValueError, match="false_positive_rates"):
        plan.attack_rates(wrong)


def test_without_a_guarantee_there_is_no_profile():
    with pytest.raises(ValueError, match="not enough noise"):
        bandmf.plan(**{**POISSON, "epsilon": None, "noise_multiplier": 0.01, "bands": 4}).privacy_profile([1.0])
