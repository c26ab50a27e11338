"""Plans certify what engines do: their numbers are float32, and the C in effect has no larger Gram matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bandmf
from bandmf.accounting.bins import gram_matrix
from bandmf.noise.schedule import Schedule
from bandmf.participation import Single
from bandmf.strategies import Banded, BandedInverse, BandedToeplitz, BufferedToeplitz, Scaled, lambda_cgd, stamping
from bandmf.strategies.single_precision import MARGIN, in_float32

SMALL = {"epsilon": 8.0, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 80, "certify_seconds": 3}
ONCE = {"participation": Single(), "batch_size": 12.5}
FALLING = 1 / np.sqrt(np.arange(1, 9))


def upwards(numbers):
    """Numbers that rounding to float32 makes larger."""
    nearest = np.asarray(numbers, np.float32)
    return nearest.astype(np.float64) - 0.4 * np.spacing(nearest).astype(np.float64)


STRATEGIES = {
    "lambda-CGD": lambda_cgd(80, float(upwards(0.97))),
    "banded inverse": BandedInverse([1.0, *-upwards([0.51, 0.3, 0.18])], 80),
    "BLT": BufferedToeplitz(upwards([0.2, 0.1]), upwards([0.98, 0.51]), 80),
    "Toeplitz": BandedToeplitz(FALLING, 80, normalize_columns=False),
    "normalized": BandedToeplitz(FALLING, 80),
    "stamped": stamping(lambda_cgd(20, float(upwards(0.9))), 4),
}
STRATEGIES |= {
    f"scaled {name}": Scaled(STRATEGIES[name], 1 / upwards(np.linspace(1, 3, 80)))
    for name in ("lambda-CGD", "BLT", "Toeplitz")
}


def in_effect(strategy, scale=1.0):
    """The C that an engine has in effect: its linear forms with float32 numbers, computed in float64."""
    n, schedule = strategy.steps, Schedule(strategy, lookahead=1)
    history, outputs, z = np.zeros((schedule.slots, n)), [], np.eye(n)
    for i in range(n):
        step = schedule.step(i)
        y = sum(float(np.float32(feed)) * z[d] for d, feed in step.draws)
        y = y + sum(float(np.float32(weight)) * history[slot] for slot, weight in step.reads)
        for slot, decay in enumerate(step.decays):
            history[slot] = float(np.float32(decay)) * history[slot] + y
        if step.store is not None:
            history[step.store] = y
        # Plans have one deviation: what rounding makes of its product with a gain is the step's own.
        outputs.append(y * schedule.scale(i, scale) / float(np.float32(scale)))
    return np.linalg.inv(np.array(outputs))


def gram_in_effect(plan):
    """Of |C| / the deviation that an engine multiplies by."""
    C, m = np.abs(in_effect(plan.strategy, plan.noise_scale)), []
    for position in range(plan.cycle):
        m.append(C[:, position :: plan.cycle].sum(axis=1))
    return np.array(m) @ np.array(m).T / float(np.float32(plan.noise_scale)) ** 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_gram_matrix_in_effect_is_not_above_the_certified_one(name):
    plan = bandmf.plan(**SMALL, strategy=STRATEGIES[name], sampling="balls-in-bins")
    certified = gram_matrix(plan.strategy, plan.cycle) / plan.certificate.sigma**2
    assert (gram_in_effect(plan) <= certified * (1 + 1e-12) + 1e-13).all()


@pytest.mark.parametrize("name", ["lambda-CGD", "banded inverse", "BLT"])
def test_it_would_be_above_with_parameters_in_float64(name):
    """What the test above looks for is there if it is planted."""
    strategy = STRATEGIES[name]
    largest = np.abs(in_effect(strategy)).sum() / np.abs(strategy.materialize()).sum()
    assert largest > MARGIN


def test_columns_of_b_min_sep_in_effect_are_not_above_the_certified_ones():
    plan = bandmf.plan(**{**SMALL, "certify_seconds": 5}, bands=3, sampling="b-min-sep")
    C = np.abs(in_effect(plan.strategy)) / float(np.float32(plan.noise_scale))
    certified = np.abs(plan.strategy.materialize()) / plan.certificate.sigma
    assert (certified * (1 + 1e-12) + 1e-13 >= C).all()


@pytest.mark.parametrize("name", STRATEGIES)
def test_rounding_twice_is_rounding_once(name):
    once = in_float32(STRATEGIES[name])
    assert in_float32(once) is once


def test_a_banded_strategy_is_kept_and_one_beyond_float32_is_refused():
    mine = Banded([[1.0, 0.1], [1.0, 0.0]])
    assert in_float32(mine) is mine
    with pytest.raises(ValueError, match=r"inverse_coefficients\[0\]\|=1e\+40: .*float32: scale it"):
        in_float32(BandedInverse([1e40, -1e39], 3))


def test_a_plan_whose_parameters_float32_does_not_hold_is_refused():
    """A file from elsewhere could have a certificate for a C that no engine has: delta was 1, not 1e-5."""
    plan = bandmf.plan(**SMALL, sampling="balls-in-bins", mechanism="blt")
    T = plan.strategy.strategy
    other = Scaled(BufferedToeplitz(upwards(T.scales), T.decays, plan.steps), plan.strategy.scales)
    for changes in ({"strategy": other}, {"noise_multiplier": plan.certificate.sigma}):
        with pytest.raises(ValueError, match="float32 does not hold"):
            replace(plan, **changes)


@pytest.mark.parametrize(
    "strategy",
    [
        BufferedToeplitz([2.0**24, -(2.0**24)], [0.9, float(np.nextafter(np.float32(0.9), np.float32(0)))], 80),
        BandedInverse(np.poly([0.7] * 12), 80),
    ],
    ids=["BLT", "banded inverse"],
)
@pytest.mark.parametrize("more", [{"sampling": "balls-in-bins"}, ONCE])
def test_large_numbers_that_cancel_are_refused(strategy, more):
    """In float32 their noise has so few values that a sum could be read off."""
    with pytest.raises(ValueError, match=r"rounding error of the noise=.*could be read off"):
        bandmf.plan(**{**SMALL, **more}, strategy=strategy)


def test_plans_without_sampling_have_parameters_of_float32_too():
    given = STRATEGIES["lambda-CGD"]
    plan = bandmf.plan(**{**SMALL, **ONCE}, strategy=given)
    assert plan.strategy is in_float32(plan.strategy)
    assert not np.array_equal(plan.strategy.inverse_coefficients, given.inverse_coefficients)
