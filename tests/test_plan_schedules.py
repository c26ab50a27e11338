"""Plans with cyclic Poisson sampling for schedules and averages: step scales, searched and accounted for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import bandmf
from bandmf import optimize, workloads
from bandmf.participation import MinSeparation
from bandmf.planning.search.candidates import without_schedule
from bandmf.planning.search.scales import best_power, scaled
from bandmf.strategies import Scaled
from oracles import banded_matrix, rmse
from test_workloads import WORKLOADS, every_workload

N = 96
SETTING = {"epsilon": 8, "delta": 1e-5, "examples": 1200, "batch_size": 100, "steps": N}
WARM = np.minimum(np.arange(N) / 10, 1) * workloads.cosine(N)
SCHEDULES = {
    "cosine": workloads.momentum(N, 0.0, workloads.cosine(N)),
    "Adam with warm-up from zero": workloads.adam(N, 0.9, WARM),
    "mean of the last half": workloads.prefix(N, averaging=workloads.tail(0.5)),
}


@every_workload
def test_the_column_norms_of_a_workload_are_those_of_its_matrix(workload, matrix):
    norms = workload.operator.column_norms(len(matrix))
    assert_allclose(norms, np.linalg.norm(matrix, axis=0), rtol=1e-10)


@pytest.fixture(scope="module")
def ignorant():
    """The best plan that knows nothing of a schedule."""
    return bandmf.plan(**SETTING, sampling="cyclic-poisson")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_that_knows_the_schedule_has_less_error_on_it(name, ignorant):
    workload = SCHEDULES[name]
    plan = bandmf.plan(**SETTING, workload=workload, sampling="cyclic-poisson")
    before = ignorant.noise_multiplier * bandmf.rmse(ignorant.strategy, workload=workload)
    assert plan.rmse < before * (0.95 if name == "cosine" else 1)
    exact = rmse(plan.strategy.materialize(), workload.materialize())
    assert_allclose(plan.rmse, plan.noise_multiplier * exact, rtol=1e-9)
    assert plan.spent() <= 8
    assert isinstance(plan.strategy, Scaled)
    assert all(event.levels for event in plan.events)


def test_a_schedule_raises_no_error_whatever_else_is_asked():
    workload = SCHEDULES["cosine"]
    fixed = bandmf.plan(**SETTING, workload=workload, bands=4)
    assert fixed.bands == 4
    nesterov = workloads.momentum(N, 0.9, workloads.cosine(N), nesterov=True)
    assert bandmf.plan(**SETTING, workload=nesterov, bands=4).bands == 4
    assert bandmf.plan(**SETTING, workload=workload, bands=1, sampling="cyclic-poisson").bands == 1
    noise = {**SETTING, "epsilon": None, "noise_multiplier": 1.0}
    assert bandmf.plan(**noise, workload=workload, bands=4).epsilon < 20
    federated = {"epsilon": 8, "delta": 1e-5, "batch_size": 100, "steps": N, "participation": MinSeparation(4, 24)}
    assert bandmf.plan(**federated, workload=workload).bands == 24


def test_the_scales_are_exact_levels_for_the_accountant():
    strategy = optimize.banded_toeplitz(N, 4).strategy
    found = scaled(strategy, SCHEDULES["cosine"].operator.column_norms(), 0.5)
    norms = found.column_norms().reshape(-1, 4)
    assert_allclose(norms, norms[:, :1] * np.ones(4), rtol=1e-12)  # a turn has one norm
    assert len(np.unique(norms.round(12))) <= 16
    assert norms.max() == pytest.approx(1)


def test_the_power_is_near_the_best_of_many():
    """Against the accountant's own noise for powers on a grid."""
    strategy, workload = optimize.banded_toeplitz(N, 4).strategy, SCHEDULES["cosine"]
    norms = workload.operator.column_norms()

    def error(power):
        return bandmf.plan(
            **SETTING, strategy=scaled(strategy, norms, power), workload=workload, sampling="cyclic-poisson"
        ).rmse

    plain = bandmf.plan(**SETTING, strategy=strategy, sampling="cyclic-poisson").noise_multiplier
    chosen = error(best_power(strategy, workload, norms, plain))
    assert chosen <= 1.01 * min(error(power) for power in (0.15, 0.3, 0.6))
    assert chosen < 0.97 * error(1.0)


@every_workload
def test_strategies_are_optimized_for_a_toeplitz_workload_with_a_banded_inverse(workload, matrix):
    toeplitz = without_schedule(workload)
    assert toeplitz.steps == workload.steps
    assert toeplitz.coefficients is not None
    assert banded_matrix(toeplitz.inverse_columns(0, len(matrix))).shape == matrix.shape
    assert (toeplitz is workload) == (workload.coefficients is not None and workload.inverse_columns is not None)


def test_momentum_is_kept_where_a_schedule_is_left_out():
    assert without_schedule(WORKLOADS["schedule"][0]).name == "momentum 0.9"
    assert without_schedule(WORKLOADS["prefix, tail"][0]).is_prefix
