"""Optimized dense strategies: between what is provably impossible and what is known, for any epochs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_allclose

from bandmf import error, workloads
from bandmf.optimize import banded, dense
from bandmf.optimize.dense import Problem
from bandmf.optimize.objectives import parse
from bandmf.participation import FixedEpochs
from bandmf.sensitivities import certified_sensitivity
from bandmf.strategies import Dense
from oracles import certificate, epoch_patterns, errors, lags, nuclear_norm_bound, sensitivity_bounds
from test_optimize_toeplitz import square_root

solve = cache(dense)
EPOCHS = [(8, 1), (8, 2), (8, 4), (8, 8), (12, 3), (9, 3)]


def test_the_nuclear_norm_bound_is_that_of_the_reference(reference):
    for steps, expected in reference["nuclear_norm_lower_bound_rmse"].items():
        assert nuclear_norm_bound(steps) == pytest.approx(expected, abs=0.51e-4)
    singular_values = np.linalg.svd(np.tri(40), compute_uv=False)
    assert nuclear_norm_bound(40) == pytest.approx(singular_values.sum() / 40, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 16, 64, 256])
def test_it_lies_between_the_nuclear_norm_bound_and_the_normalized_square_root(steps):
    solution, known = solve(steps), error.rmse(square_root(steps, steps, normalize=True))
    assert solution.converged
    assert nuclear_norm_bound(steps) * (1 - 1e-12) <= solution.rmse <= known * (1 + 1e-9)
    if steps > 2:
        assert nuclear_norm_bound(steps) < solution.rmse < known


@pytest.mark.parametrize("steps", [1, 2, 16, 64])
def test_it_is_the_banded_optimum_of_as_many_bands_as_steps(steps):
    full, all_bands = solve(steps), banded(steps, steps)
    assert full.rmse <= all_bands.rmse * (1 + full.optimality_gap + 1e-12)
    assert all_bands.rmse <= full.rmse * (1 + all_bands.optimality_gap + 1e-12)


@pytest.mark.parametrize(("steps", "epochs"), EPOCHS)
def test_the_sensitivity_of_k_epochs_is_exactly_root_k(steps, epochs):
    C = solve(steps, epochs=epochs).strategy.materialize()
    by_signs, by_vectors, never_exceeded = sensitivity_bounds(C, epoch_patterns(steps, epochs))
    assert_allclose([by_signs, by_vectors, never_exceeded], np.sqrt(epochs), rtol=1e-9)
    claim = certified_sensitivity(solve(steps, epochs).strategy, FixedEpochs(epochs))
    assert claim.value == pytest.approx(np.sqrt(epochs), rel=1e-9)


@pytest.mark.parametrize(("steps", "epochs"), EPOCHS)
def test_what_is_reported_is_the_error_of_the_strategy_that_is_returned(steps, epochs):
    solution = solve(steps, epochs)
    C = solution.strategy.materialize()
    assert isinstance(solution.strategy, Dense)
    assert_allclose(C, np.tril(C), atol=0)
    assert solution.rmse**2 == pytest.approx(epochs * errors(C, np.tri(steps)).mean(), rel=1e-9)
    assert solution.rmse == pytest.approx(
        error.rmse(solution.strategy, participation=FixedEpochs(epochs)), rel=1e-9
    )
    assert solution.objective == solution.rmse


@pytest.mark.parametrize(("steps", "epochs"), [(64, 2), (64, 8), (60, 3)])
def test_more_epochs_are_within_the_proved_gap_of_the_best(steps, epochs):
    loose, tight = dense(steps, epochs=epochs, gap=1e-2), dense(steps, epochs=epochs, gap=1e-5)
    assert loose.optimality_gap <= 1e-2
    assert tight.optimality_gap <= 1e-5
    assert loose.rmse <= tight.rmse * (1 + loose.optimality_gap)
    assert tight.rmse <= loose.rmse * (1 + tight.optimality_gap)


@pytest.mark.parametrize(("epochs", "bands"), [(1, 3), (1, 23), (2, 23), (4, 23), (3, 5)])
def test_the_proved_bound_is_that_of_the_dense_formula(epochs, bands):
    solution = dense(24, epochs=epochs, bands=bands, gap=1e-2)
    C, weights = solution.strategy.materialize(), np.full(24, 1 / 24)
    free = ((lags(24) % (24 // epochs) > 0) & (lags(24) < bands)) | np.eye(24, dtype=bool)
    assert_allclose(C.T @ C * ~free, 0, atol=1e-12)
    total, lower = certificate(C, np.tri(24), weights, free)
    assert solution.rmse**2 == pytest.approx(epochs * total, rel=1e-9)
    assert solution.optimality_gap == pytest.approx(np.sqrt(total / lower) - 1, rel=1e-6)


def test_no_strategy_with_as_many_bands_as_an_epoch_is_better():
    # Its columns are disjoint over the epochs, so it is one of those that the dense optimizer chooses among.
    steps, epochs = 48, 4
    competitor = banded(steps, steps // epochs).strategy
    best = dense(steps, epochs=epochs)
    assert best.rmse < error.rmse(competitor, participation=FixedEpochs(epochs))


def test_as_many_epochs_as_steps_leave_nothing_to_choose():
    solution = solve(8, 8)
    assert_allclose(solution.strategy.materialize(), np.eye(8), atol=1e-12)
    assert solution.optimality_gap == 0


@pytest.mark.parametrize("bands", [1, 2, 5, 16])
def test_with_bands_the_strategy_is_banded(bands):
    C = dense(16, bands=bands).strategy.materialize()
    assert_allclose(np.tril(C, -bands), 0, atol=1e-12)
    assert_allclose(np.linalg.norm(C, axis=0), 1, rtol=1e-9)


def test_more_freedom_is_never_worse():
    by_bands = [dense(32, bands=bands, gap=1e-7).rmse for bands in (1, 2, 4, 8, 16, 32)]
    assert np.all(np.diff(by_bands) < 0)


@pytest.mark.parametrize(
    "workload",
    [
        workloads.momentum(32, 0.9),
        workloads.momentum(32, 0.9, workloads.cosine(32), weight_decay=0.1),
        workloads.momentum(32, 0.9, np.where(np.arange(32) == 7, 0.0, 1.0)),
        workloads.momentum(32, 0.9, np.linspace(1, 0, 32)),
        workloads.toeplitz(np.cos(np.arange(32)), 32),
        workloads.toeplitz([1.0, 3.0], 32),
    ],
    ids=["momentum", "schedule", "a rate of zero", "rates down to zero", "oscillating", "nearly singular"],
)
def test_any_workload_is_proved_and_no_competitor_is_below_the_bound(workload):
    solution = dense(32, workload=workload)
    assert solution.optimality_gap <= 1e-4
    assert solution.rmse == pytest.approx(error.rmse(solution.strategy, workload=workload), rel=1e-9)
    lower, generator = solution.rmse / (1 + solution.optimality_gap), np.random.default_rng(0)
    C = solution.strategy.materialize()
    for noise in np.geomspace(1e-6, 1, 40):
        other = np.tril(C * (1 + noise * generator.normal(size=C.shape)))
        assert error.rmse(Dense(other / np.linalg.norm(other, axis=0)), workload=workload) >= lower


def test_weights_are_respected():
    weights = np.geomspace(1, 20, 32)
    weights /= weights.sum()
    for_weights, for_mean = dense(32, objective=weights, gap=1e-7), solve(32)

    def weighted(solution):
        return np.sqrt(weights @ error.per_step_error(solution.strategy))

    assert for_weights.objective == pytest.approx(weighted(for_weights), rel=1e-9)
    assert weighted(for_weights) < weighted(for_mean)
    assert for_mean.rmse < for_weights.rmse


@pytest.mark.parametrize(("steps", "epochs"), [(16, 1), (16, 4), (30, 5), (64, 8)])
def test_the_fixed_point_ends_where_descent_over_all_entries_ends(steps, epochs):
    """Two methods that share nothing: iteration on the dual variables, and L-BFGS over the entries of X."""
    fast = dense(steps, epochs=epochs)
    free = (lags(steps) % (steps // epochs)) > 0
    problem, goal = Problem(np.tri(steps), free), parse("mean", steps)
    descent = problem.minimize(goal, np.zeros(len(problem.rows)), 1e-6, 2000, None)
    found, _ = problem.errors(descent.x)
    assert fast.rmse == pytest.approx(np.sqrt(epochs * np.mean(found)), rel=2e-6)
    assert fast.optimality_gap <= 1e-6
