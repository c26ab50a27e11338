"""BLT: closed forms at any n against sums over all steps; an optimizer that meets the published optima."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

import bandmf
from bandmf import optimize, workloads
from bandmf.error import max_squared_error, mean_squared_error, per_step_error
from bandmf.optimize.buffered import _Loss, _spread, geometric, partial_fractions, to_logs, weighted_geometric
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.sensitivities import certified_sensitivity
from bandmf.strategies import BufferedToeplitz
from oracles import slope, toeplitz_matrix

STRATEGY = BufferedToeplitz([0.02, 0.1, 0.3], [0.9999, 0.99, 0.5], 5000)


def first_column(strategy):
    t = np.arange(strategy.steps - 1)
    powers = strategy.decays[:, None] ** t
    return np.append(1.0, strategy.scales @ powers)


def test_the_closed_forms_are_the_sums_over_all_steps():
    n, c = STRATEGY.steps, first_column(STRATEGY)
    w = np.array(list(STRATEGY.inverse().apply(np.ones((n, 1))))).ravel()  # A C^-1 has column C^-1 1
    errors = np.cumsum(w**2)
    assert STRATEGY.largest_column_norm() == pytest.approx(np.linalg.norm(c), rel=1e-12)
    assert mean_squared_error(STRATEGY) == pytest.approx(errors.mean(), rel=1e-11)
    assert max_squared_error(STRATEGY) == pytest.approx(errors[-1], rel=1e-11)
    assert_allclose(per_step_error(STRATEGY), errors, rtol=1e-10)


@pytest.mark.parametrize("participation", [MinSeparation(7, 600), MinSeparation(100, 77), FixedEpochs(50)], ids=str)
def test_the_closed_sensitivity_is_that_of_evenly_spaced_columns(participation):
    n, c = STRATEGY.steps, first_column(STRATEGY)
    separation = participation.separation(n) if isinstance(participation, FixedEpochs) else participation.separation
    count = n // separation if isinstance(participation, FixedEpochs) else participation.count(n)
    total = np.zeros(n)
    for m in range(count):
        total[m * separation :] += c[: n - m * separation]
    claim = certified_sensitivity(STRATEGY, participation)
    assert claim.exact
    assert claim.value == pytest.approx(np.linalg.norm(total), rel=1e-11)


def test_a_hundred_million_steps_cost_nothing():
    strategy = BufferedToeplitz([1e-5, 1e-3, 0.1], [1 - 1e-8, 1 - 1e-5, 0.9], 10**8)
    assert 1 < bandmf.sensitivity(strategy) < 10
    assert certified_sensitivity(strategy, MinSeparation(100, 10**6)).exact
    assert bandmf.rmse(strategy) < bandmf.max_error(strategy)
    assert mean_squared_error(strategy, workload=workloads.momentum(10**8, 0.9)) > mean_squared_error(strategy)


def test_geometric_sums_are_right_where_they_are_nearly_arithmetic_too():
    for n in (1, 2, 1000):
        for log_ratio in (0.0, -1e-14, -1e-9, -1e-7, -1e-4, -0.3, -20.0):
            powers = np.exp(log_ratio * np.arange(n))
            assert float(geometric(np.array(log_ratio), n)) == pytest.approx(math.fsum(powers), rel=1e-12)
            weighted = math.fsum(powers * (1 - np.arange(n) / n))
            assert float(weighted_geometric(np.array(log_ratio), n)) == pytest.approx(weighted, rel=1e-10)


@pytest.mark.parametrize("largest", [False, True])
def test_the_loss_is_the_error_of_the_strategy_and_its_gradient_is_right(largest):
    loss, x = _Loss(500, 120, 4, largest), _spread(500, 3)
    a, _, omega, _ = partial_fractions(to_logs(x))
    strategy = BufferedToeplitz(omega, 1 - a, 500)
    measure = bandmf.max_error if largest else bandmf.rmse
    value, gradient = loss(x)
    assert math.exp(value / 2) == pytest.approx(measure(strategy, participation=MinSeparation(4, 120)), rel=1e-11)
    assert_allclose(gradient, slope(lambda y: loss(y)[0], x), atol=1e-9)
    with pytest.raises(AssertionError):  # planted: a factor of 3/2
        assert_allclose(1.5 * gradient, slope(lambda y: loss(y)[0], x), atol=1e-9)


def test_two_buffers_for_a_hundred_thousand_steps_are_the_published_ones():
    strategy = optimize.buffered_toeplitz(100_000, 2, objective="max").strategy
    assert_allclose(strategy.scales, [0.0122853, 0.1878394], atol=1e-6)
    assert_allclose(strategy.decays, [0.9999529, 0.9857069], atol=1e-6)


@pytest.mark.parametrize(("steps", "buffers", "within"), [(10**4, 4, 0.03), (10**7, 5, 0.05)])
def test_a_few_buffers_come_close_to_the_best_possible(steps, buffers, within):
    solution = optimize.buffered_toeplitz(steps, buffers, objective="max")
    assert solution.converged
    assert solution.objective <= (1 + within) * (1 + math.log(steps) / math.pi)


def test_more_buffers_are_never_worse_and_none_is_used_for_nothing():
    values = [optimize.buffered_toeplitz(1000, buffers).rmse for buffers in (1, 2, 3, 4)]
    assert np.all(np.diff(values) < 0)
    assert values[-1] > bandmf.rmse(bandmf.strategies.square_root(1000, normalize_columns=True)) * 0.98
    solution = optimize.buffered_toeplitz(64, 6, participation=FixedEpochs(4))
    assert solution.strategy.buffers < 6
    assert "enough" in solution.message


@pytest.mark.parametrize("participation", [Single(), FixedEpochs(4), MinSeparation(3, 100)], ids=str)
@pytest.mark.parametrize("objective", ["mean", "max"])
def test_nothing_near_the_solution_is_better(participation, objective):
    solution = optimize.buffered_toeplitz(400, 2, participation=participation, objective=objective)
    measure = bandmf.max_error if objective == "max" else bandmf.rmse
    assert solution.objective == pytest.approx(measure(solution.strategy, participation=participation), rel=1e-12)
    assert certified_sensitivity(solution.strategy, participation).exact
    generator = np.random.default_rng(0)
    for _ in range(30):
        other = BufferedToeplitz(
            solution.strategy.scales * np.exp(0.01 * generator.normal(size=2)),
            1 - (1 - solution.strategy.decays) * np.exp(0.01 * generator.normal(size=2)),
            400,
        )
        assert measure(other, participation=participation) >= solution.objective * (1 - 1e-9)


def test_the_matrix_of_the_optimum_is_what_the_closed_forms_say():
    solution = optimize.buffered_toeplitz(60, 2)
    C = toeplitz_matrix(first_column(solution.strategy), 60)
    B = np.tri(60) @ np.linalg.inv(C)
    assert solution.rmse == pytest.approx(np.linalg.norm(C[:, 0]) * np.linalg.norm(B) / np.sqrt(60), rel=1e-11)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [((100, 0), "buffers=0"), ((100, 11), "buffers=11"), ((0, 1), "steps=0"), ((100, 2), "epochs=3")],
)
def test_bad_arguments_are_refused_with_their_value(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        optimize.buffered_toeplitz(*arguments, participation=FixedEpochs(3))
