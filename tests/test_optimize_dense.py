"""Optimized dense strategies: between what is provably impossible and what is known, for any epochs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_allclose

from bandmf import error, workloads
from bandmf.optimize import banded, dense
from bandmf.optimize.dense import BandSearch, Classes, last_step, squared_errors
from bandmf.optimize.descent import descend
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
    claim = certified_sensitivity(solve(steps, epochs=epochs).strategy, FixedEpochs(epochs))
    assert claim.value == pytest.approx(np.sqrt(epochs), rel=1e-9)


@pytest.mark.parametrize(("steps", "epochs"), EPOCHS)
def test_what_is_reported_is_the_error_of_the_strategy_that_is_returned(steps, epochs):
    solution = solve(steps, epochs=epochs)
    C = solution.strategy.materialize()
    assert isinstance(solution.strategy, Dense)
    assert_allclose(C, np.tril(C), atol=0)
    assert solution.rmse**2 == pytest.approx(epochs * errors(C, np.tri(steps)).mean(), rel=1e-9)
    assert solution.rmse == pytest.approx(error.rmse(solution.strategy, participation=FixedEpochs(epochs)), rel=1e-9)
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
    if epochs == 1:
        assert solution.optimality_gap == pytest.approx(np.sqrt(total / lower) - 1, rel=1e-6)
    best = dense(24, epochs=epochs, bands=bands, gap=1e-6)
    assert solution.rmse / (1 + solution.optimality_gap) <= best.rmse <= solution.rmse * (1 + 1e-12)


def test_no_strategy_with_as_many_bands_as_an_epoch_is_better():
    # Its columns are disjoint over the epochs, so it is one of those that the dense optimizer chooses among.
    steps, epochs = 48, 4
    competitor = banded(steps, steps // epochs).strategy
    best = dense(steps, epochs=epochs)
    assert best.rmse < error.rmse(competitor, participation=FixedEpochs(epochs))


def test_as_many_epochs_as_steps_leave_the_shares_of_the_diagonal_to_choose():
    """X is diagonal, and sum_i (n - i) / d_i is least, for sum d_i = n, at d_i ~ (n - i)^(1/2)."""
    solution = dense(16, epochs=16, gap=1e-9)
    expected = np.arange(16, 0, -1) ** 0.25
    expected *= 4 / np.linalg.norm(expected)
    assert_allclose(solution.strategy.materialize(), np.diag(expected), atol=1e-4)
    assert solution.rmse == pytest.approx(np.sqrt(np.arange(1, 17)).sum() / 4, rel=1e-8)


@pytest.mark.parametrize(("steps", "epochs", "better_by"), [(16, 2, 0.016), (16, 4, 0.028), (64, 8, 0.032)])
def test_columns_of_unequal_norm_are_better_with_several_epochs(steps, epochs, better_by):
    """Once every column was forced to norm one, and that optimum certified with a gap of zero."""
    best = dense(steps, epochs=epochs)
    equal = equal_norm_optimum(steps, epochs)
    assert equal / best.rmse - 1 == pytest.approx(better_by, abs=1e-3)
    assert best.rmse / (1 + best.optimality_gap) < equal


def equal_norm_optimum(steps, epochs):
    """The least error with X_ii = 1: a descent over the entries of X that may differ from zero."""
    rows, columns = np.nonzero(np.tril(lags(steps) % (steps // epochs) > 0))

    def loss(values):
        X = np.eye(steps)
        X[rows, columns] = X[columns, rows] = values
        if np.linalg.eigvalsh(X)[0] <= 0:
            return np.inf, np.zeros_like(values)
        B = np.tri(steps) @ np.linalg.inv(X)
        return float(np.sum(B * np.tri(steps))), -2 * (B.T @ B)[rows, columns]

    return np.sqrt(epochs * descend(loss, np.zeros(len(rows)), max_iterations=3000, memory=30).loss / steps)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_the_best_last_error_is_in_closed_form_and_no_competitor_is_below_it(epochs):
    """Once 1.018 was certified with a gap of zero for dense(16, objective="last"); 1.0002 is within reach."""
    solution = dense(16, objective="last", epochs=epochs)
    assert solution.converged
    assert solution.objective == pytest.approx(epochs, rel=1e-4)
    C = 0.01 * np.eye(16)
    C[-1] = np.sqrt(1 - 1e-4)
    C[-1, -1] = 1.0
    if epochs == 1:
        competitor = error.per_step_error(Dense(C / np.linalg.norm(C, axis=0)))[-1] ** 0.5
        assert solution.objective / (1 + solution.optimality_gap) <= competitor < 1.0005


@pytest.mark.parametrize("seed", range(20))
def test_no_feasible_gram_matrix_is_below_the_bound_on_the_last_error(seed):
    generator = np.random.default_rng(seed)
    epochs, row = generator.choice([1, 2, 3, 4]), generator.normal(size=12) * generator.integers(0, 2, 12)
    row[0] += 1
    classes = Classes(12, int(epochs))
    found = last_step(row, classes, 1e-3)
    assert row @ np.linalg.solve(found.X, row) <= found.lower * 1.003
    for _ in range(20):
        M = generator.normal(size=(12, 12))
        X = M @ M.T + 1e-3 * np.eye(12)
        blocks = classes.of(X)
        T = np.zeros((12, 12))
        share = classes.shares(generator.uniform(0.1, 1, classes.steps.shape))
        T[classes.steps[:, :, None], classes.steps[:, None, :]] = np.sqrt(share)[:, :, None] * classes.power(
            blocks, -0.5
        )
        X = T @ X @ T.T
        assert row @ np.linalg.solve(X, row) >= found.lower * (1 - 1e-9)


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
    slow = BandSearch(np.tri(steps), Classes(steps, epochs), steps, None)(parse("mean", steps), 1e-7, 3000)
    assert fast.rmse == pytest.approx(np.sqrt(epochs * np.mean(squared_errors(np.tri(steps), slow.X))), rel=2e-6)
    assert fast.optimality_gap <= 1e-6
    assert slow.lower <= fast.rmse**2 / epochs * (1 + 1e-12)
