"""Optimized banded strategies: the paper's example, the reference optima, and a proof that can be trusted."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from bandmf import error, workloads
from bandmf.optimize import banded, banded_toeplitz, dense, horizon, parameterized
from bandmf.optimize import certificate as certificates
from bandmf.optimize.banded import NormalizedLoss, _ProofSchedule
from bandmf.optimize.certificate import optimality_gap
from bandmf.optimize.objectives import parse
from bandmf.strategies import Banded, BandedToeplitz
from oracles import banded_matrix, certificate, errors, lags, nuclear_norm_bound, random_columns, slope
from sweeps import in_turn
from test_optimize_toeplitz import square_root

# Example A.1 of the paper: the optimal three-banded C for nine steps, every digit that is printed.
PAPER_EXAMPLE = np.array(
    [
        [0.740, 0, 0, 0, 0, 0, 0, 0, 0],
        [0.500, 0.822, 0, 0, 0, 0, 0, 0, 0],
        [0.450, 0.492, 0.876, 0, 0, 0, 0, 0, 0],
        [0, 0.286, 0.395, 0.821, 0, 0, 0, 0, 0],
        [0, 0, 0.278, 0.462, 0.855, 0, 0, 0, 0],
        [0, 0, 0, 0.335, 0.442, 0.882, 0, 0, 0],
        [0, 0, 0, 0, 0.272, 0.403, 0.892, 0, 0],
        [0, 0, 0, 0, 0, 0.243, 0.409, 0.936, 0],
        [0, 0, 0, 0, 0, 0, 0.194, 0.353, 1.000],
    ]
)
GRID = [(1, 1), (2, 1), (2, 2), (7, 1), (7, 3), (7, 7), (40, 40), (100, 10), (300, 1), (1000, 4), (1024, 16)]
solve = cache(banded)


def unit_columns(columns):
    return columns / np.linalg.norm(columns, axis=1, keepdims=True)


def gap_of(columns, workload, objective="mean"):
    """The proved gap of a strategy as it is, and its objective (the root)."""
    strategy, goal = Banded(columns), parse(objective, len(columns))
    per_step = error.per_step_error(strategy, workload=workload)
    return optimality_gap(strategy, workload, per_step, goal), np.sqrt(goal.value(per_step))


def near(columns, generator, noise, shrink=0.0):
    """A strategy with relative noise on every entry and columns of norm between 1 - shrink and one."""
    columns = columns * (1 + noise * generator.normal(size=columns.shape))
    return unit_columns(columns) * generator.uniform(1 - shrink, 1, (len(columns), 1))


# --- optima -------------------------------------------------------------------------------------------


def test_the_papers_example_is_found_to_every_printed_digit():
    solution = solve(9, 3)
    C = solution.strategy.materialize() * np.sign(np.diag(solution.strategy.materialize()))
    assert np.abs(C - PAPER_EXAMPLE).max() <= 0.5e-3
    assert solution.rmse == pytest.approx(1.6626907595, abs=0.5e-10)
    assert solution.converged


def test_every_reference_optimum_is_reached(reference):
    for (steps, bands), expected in reference["banded_mean_rmse"].items():
        solution = solve(steps, bands)
        assert solution.rmse == pytest.approx(expected, rel=1e-6), (steps, bands)
        assert solution.rmse >= expected * (1 - 1e-9), (steps, bands)
        assert solution.rmse <= expected * (1 + solution.optimality_gap), (steps, bands)
        assert solution.optimality_gap <= 1e-4, (steps, bands)
        assert solution.converged, (steps, bands)
    example = reference["paper_example"]
    assert solve(example["steps"], example["bands"]).rmse == pytest.approx(example["rmse"], abs=0.5e-10)


@pytest.mark.parametrize(("steps", "bands"), GRID)
def test_over_the_grid_toeplitz_is_never_better_and_banded_square_root_neither(steps, bands):
    solution = solve(steps, bands)
    assert solution.converged
    assert solution.optimality_gap is not None
    assert np.isfinite(solution.strategy.columns()).all()
    assert solution.strategy.bands == bands
    assert_allclose(solution.strategy.column_norms(), 1, rtol=1e-12)
    assert solution.rmse == pytest.approx(error.rmse(solution.strategy), rel=1e-12)
    assert solution.rmse <= banded_toeplitz(steps, bands).rmse * (1 + 1e-9)
    assert solution.rmse <= error.rmse(square_root(steps, bands, normalize=True)) * (1 + 1e-9)
    assert solution.rmse >= nuclear_norm_bound(steps) * (1 - 1e-12)


WORKLOADS = {
    "prefix": workloads.prefix(24),
    "momentum": workloads.momentum(24, 0.9),
    "schedule": workloads.momentum(24, 0.9, workloads.cooldown(24)),
    "cosine and decay": workloads.momentum(24, 0.7, workloads.cosine(24), weight_decay=0.1),
    "toeplitz": workloads.toeplitz([1.0, 0.8, 0.3], 24),
}


@pytest.mark.parametrize(("name", "bands", "objective"), in_turn(list(WORKLOADS), [1, 3, 24], ["mean", "weighted"]))
def test_it_converges_to_the_optimum_of_the_explicit_convex_problem(name, bands, objective):
    objective = np.geomspace(1, 9, 24) if objective == "weighted" else objective
    implicit = banded(24, bands, workload=WORKLOADS[name], objective=objective)
    explicit = dense(24, workload=WORKLOADS[name], objective=objective, bands=bands, gap=1e-7)
    assert implicit.optimality_gap <= 1e-4
    assert implicit.objective <= explicit.objective * (1 + implicit.optimality_gap + 1e-12)
    assert explicit.objective <= implicit.objective * (1 + explicit.optimality_gap + 1e-12)
    assert implicit.objective == pytest.approx(explicit.objective, rel=1e-6)


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_reported_is_the_error_of_the_strategy_that_is_returned(name):
    weights = np.linspace(1, 2, 24) / np.linspace(1, 2, 24).sum()
    solution = banded(24, 4, workload=WORKLOADS[name], objective=weights)
    per_step = errors(solution.strategy.materialize(), WORKLOADS[name].materialize())
    assert solution.objective**2 == pytest.approx(weights @ per_step, rel=1e-9)
    assert solution.rmse**2 == pytest.approx(per_step.mean(), rel=1e-9)


def test_equal_weights_are_the_mean():
    assert banded(64, 4, objective=np.full(64, 3.0)).rmse == pytest.approx(solve(64, 4).rmse, rel=1e-9)


def test_momentum_is_proved_too():
    solution = banded(512, 8, workload=workloads.momentum(512, 0.9))
    assert solution.converged
    assert solution.optimality_gap <= 1e-4


def test_iterations_go_on_until_the_gap_that_was_asked_for_is_proved():
    for gap in (1e-2, 1e-3, 1e-5):
        assert banded(200, 8, gap=gap).optimality_gap <= gap


def test_a_run_that_was_cut_short_says_so():
    short = banded(256, 16, max_iterations=3)
    assert not short.converged
    assert "LIMIT" in short.message.upper()
    assert short.optimality_gap > solve(256, 16).optimality_gap
    assert short.rmse <= solve(256, 16).rmse * (1 + short.optimality_gap)


def test_a_watcher_can_end_the_run():
    seen = []

    def watch(iteration, loss, x):
        seen.append(loss)
        return iteration == 5

    solution = banded(256, 16, watch=watch)
    assert len(seen) == solution.iterations == 5
    assert seen == sorted(seen, reverse=True)


# --- loss and gradient --------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), n=st.integers(1, 20), data=st.data())
def test_the_gradient_is_the_slope_of_the_loss(seed, n, data):
    bands = data.draw(st.integers(1, min(n, 5)))
    workload = data.draw(st.sampled_from([workloads.prefix(n), workloads.momentum(n, 0.8)]))
    generator = np.random.default_rng(seed)
    entries = random_columns(generator, n, bands)
    goal = parse(generator.uniform(0.1, 1, n), n)
    inside = np.add.outer(np.arange(n), np.arange(bands)) < n

    def dense_loss(x):
        C = banded_matrix(np.where(inside, x, 0))
        return np.log(goal.weights @ errors(C / np.linalg.norm(C, axis=0), workload.materialize()))

    value, gradient = NormalizedLoss(workload)(entries, goal)
    assert value == pytest.approx(dense_loss(entries), rel=1e-9, abs=1e-9)
    assert_allclose(gradient * inside, slope(dense_loss, entries), rtol=1e-5, atol=1e-7)


# --- the certificate ----------------------------------------------------------------------------------


def check_bound(columns, workload, weights):
    """The proved gap of a strategy is that of the dense formula, which must say something."""
    steps, bands = columns.shape
    total, lower = certificate(banded_matrix(columns), workload.materialize(), weights, lags(steps) < bands)
    gap, objective = gap_of(columns, workload, weights)
    assert lower > 0
    assert objective**2 == pytest.approx(total, rel=1e-9)
    assert gap == pytest.approx(np.sqrt(total / lower) - 1, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("bands", [1, 2, 4])
def test_the_proved_bound_is_that_of_the_dense_formula(name, bands):
    workload, generator = WORKLOADS[name], np.random.default_rng(bands)
    weights = np.linspace(1, 2, 24) / np.linspace(1, 2, 24).sum()
    optimum = banded(24, bands, workload=workload, objective=weights).strategy.columns()
    for noise, shrink in [(0.0, 0.0), (1e-4, 0.0), (0.0, 1e-3), (1e-3, 1e-3)]:
        check_bound(near(optimum, generator, noise, shrink), workload, weights)


@pytest.mark.parametrize(("steps", "bands"), [(64, 11), (100, 17), (129, 8)])
def test_the_proved_bound_carries_the_whole_bandwidth_through_the_inversion(steps, bands):
    columns = near(solve(steps, bands).strategy.columns(), np.random.default_rng(0), noise=1e-4, shrink=1e-4)
    check_bound(columns, workloads.prefix(steps), np.full(steps, 1 / steps))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0, 0.05),
    shrink=st.floats(0, 0.2),
    bands=st.integers(1, 4),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_the_proved_bound_never_exceeds_the_true_optimum(seed, noise, shrink, bands, momentum):
    workload, best = momentum_optimum(bands, momentum)
    columns = near(best.strategy.columns(), np.random.default_rng(seed), noise, shrink)
    gap, objective = gap_of(columns, workload)
    assert objective >= best.objective / (1 + best.optimality_gap) * (1 - 1e-12)
    assert objective / (1 + gap) <= best.objective * (1 + 1e-12)


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), noise=st.floats(1e-6, 1.0), bands=st.integers(1, 4))
def test_no_feasible_competitor_is_below_the_proved_bound(seed, noise, bands):
    workload, claimed = momentum_optimum(bands, 0.9)
    competitor = Banded(near(claimed.strategy.columns(), np.random.default_rng(seed), noise))
    assert error.rmse(competitor, workload=workload) >= claimed.rmse / (1 + claimed.optimality_gap) * (1 - 1e-12)


@cache
def momentum_optimum(bands, momentum):
    workload = workloads.momentum(16, momentum)
    return workload, banded(16, bands, workload=workload, gap=1e-6)


def test_at_the_optimum_the_proof_is_tight():
    solution = banded(256, 16, gap=1e-5)
    assert solution.optimality_gap <= 1e-5
    assert "proved within" in solution.message


def bound_violations(diagonal):
    """How often, in a hundred strategies with columns shorter than one, the bound is above the optimum."""
    n, bands, weights = 8, 2, np.full(8, 1 / 8)
    best, count = solve(n, bands), 0
    for seed in range(100):
        columns = near(best.strategy.columns(), np.random.default_rng(seed), noise=0.01, shrink=0.1)
        free = (lags(n) < bands) & (diagonal | (lags(n) > 0))
        _, lower = certificate(banded_matrix(columns), np.tri(n), weights, free)
        count += lower > best.rmse**2 * (1 + 1e-9)
    return count


def test_the_planted_bound_without_its_diagonal_terms_is_caught():
    assert bound_violations(diagonal=True) == 0
    assert bound_violations(diagonal=False) > 0


def changed(change, original, *arguments):
    return change(np.array(original(*arguments)))


@pytest.mark.parametrize(
    "change",
    [lambda S: S * 1.001, lambda S: np.roll(S, 1, axis=0), lambda S: S * (np.arange(S.shape[1]) < 1)],
    ids=["scale", "shift", "band"],
)
def test_a_planted_error_in_the_covariance_is_caught_by_the_self_test(monkeypatch, change):
    columns = near(solve(64, 4).strategy.columns(), np.random.default_rng(0), noise=0.05, shrink=0.05)
    assert gap_of(columns, workloads.prefix(64))[0] > 0
    planted = partial(changed, change, certificates._band_of_covariance)
    monkeypatch.setattr(certificates, "_band_of_covariance", planted)
    assert gap_of(columns, workloads.prefix(64))[0] == np.inf  # nothing is proved


# --- families -----------------------------------------------------------------------------------------


def test_the_horizon_family_lies_between_the_optimum_and_normalized_toeplitz(reference):
    for steps, bands in [(256, 16), (1024, 16)]:
        solution = horizon(steps, bands)
        assert solution.rmse >= reference["banded_mean_rmse"][steps, bands]
        assert solution.rmse < banded_toeplitz(steps, bands).rmse
        assert solution.rmse == pytest.approx(error.rmse(solution.strategy), rel=1e-12)
        assert_allclose(solution.strategy.column_norms(), 1, rtol=1e-12)


def test_the_horizon_family_is_within_a_thousandth_of_the_optimum_at_4096_steps():
    found, best = horizon(4096, 16).rmse, banded(4096, 16, gap=1e-2).rmse
    assert found / best - 1 == pytest.approx(0.00048, abs=0.5e-5)  # "0.048 percent", to its digits


@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (2, 2), (5, 1), (9, 9), (50, 7)])
def test_the_horizon_family_exists_at_every_size(steps, bands):
    solution = horizon(steps, bands)
    assert solution.strategy.bands == bands
    assert solution.rmse >= solve(steps, bands).rmse * (1 - 1e-9)


def toeplitz_family(steps, bands):
    """The Toeplitz strategies as a user's own family: entries, and the gradient through them."""
    inside = np.add.outer(np.arange(steps), np.arange(bands)) < steps
    return lambda theta: np.where(inside, theta, 0.0), lambda theta, gradient: (gradient * inside).sum(axis=0)


@pytest.mark.parametrize(("steps", "bands"), [(9, 3), (64, 4), (200, 8)])
def test_a_family_of_ones_own_reaches_its_optimum(steps, bands):
    entries, pullback = toeplitz_family(steps, bands)
    solution = parameterized(entries, pullback, 1 / np.arange(1.0, bands + 1))
    assert solution.converged
    assert solution.rmse == pytest.approx(banded_toeplitz(steps, bands).rmse, rel=1e-9)
    assert solution.rmse / (1 + solution.optimality_gap) <= solve(steps, bands).rmse


def test_a_family_of_ones_own_serves_any_workload_and_objective():
    entries, pullback = toeplitz_family(64, 4)
    workload, weights = workloads.momentum(64, 0.9), np.linspace(1, 3, 64)
    solution = parameterized(entries, pullback, np.array([1.0, 0.5, 0.3, 0.2]), workload=workload, objective=weights)
    assert solution.objective == pytest.approx(
        banded_toeplitz(64, 4, workload=workload, objective=weights).objective, rel=1e-9
    )


def test_the_family_of_everything_is_banded_itself():
    inside = np.add.outer(np.arange(9), np.arange(3)) < 9
    solution = parameterized(
        lambda p: p.reshape(9, 3) * inside,
        lambda p, gradient: (gradient * inside).ravel(),
        np.array(BandedToeplitz([1.0, 0.5, 0.3], 9).columns()).ravel(),
    )
    assert solution.rmse == pytest.approx(1.6626907595, abs=0.5e-10)


def test_proofs_are_tried_when_they_are_expected_to_succeed():
    schedule = _ProofSchedule(goal=1e-4, first=50)
    tried = []
    while not tried or 4.0 / tried[-1] ** 2 > 1e-4:  # a gap that falls like 1 / iteration^2: proved from 200 on
        tried.append(schedule.next)
        schedule.note(tried[-1], 4.0 / tried[-1] ** 2)
    assert tried[:2] == [50, 60]
    slow = _ProofSchedule(goal=1e-9, first=50)
    slow.note(50, 1.0)
    slow.note(60, 1.0 - 1e-16)
    slow.note(72, 0.999)
    assert slow.next == 87  # a gap that hardly falls promises nothing
    assert 200 <= tried[-1] <= 206
    assert len(tried) <= 9
