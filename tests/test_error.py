"""Error: every path to the squared row norms of A C^-1 against the dense formula."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.signal import lfilter

from bandmf import band_columns, error, streaming, workloads
from bandmf.error import (
    last_row,
    last_squared_error,
    max_error,
    max_squared_error,
    mean_squared_error,
    per_step_error,
    per_step_error_by_response,
    per_step_error_by_rows,
)
from bandmf.error.band_covariance import BandCovariance
from bandmf.error.toeplitz import ToeplitzError
from bandmf.optimize import banded_toeplitz
from bandmf.participation import FixedEpochs, MinSeparation
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    Identity,
    Scaled,
    banded_inverse_square_root,
    stamping,
    tree_aggregation,
)
from bandmf.streaming import Matrices, StreamingOperator
from oracles import banded_matrix, errors, normalized, random_columns, rmse, square_root_coefficients, toeplitz_matrix
from test_workloads import WORKLOADS
from test_workloads import N as STEPS

THETA = np.array([1.0, 0.6, 0.3, 0.2])
SIGNED = np.array([0.9, -0.4, 0.0, 0.3, 0.1])
COLUMNS = random_columns(np.random.default_rng(8), STEPS, 5)
SCALES = np.sqrt(np.linspace(1.5, 0.3, STEPS)) + 0.2 * np.cos(np.arange(STEPS))
FULL = banded_matrix(random_columns(np.random.default_rng(9), STEPS, STEPS))

# name -> (strategy, its matrix), all of them for every workload in WORKLOADS
STRATEGIES = {
    "identity": (Identity(STEPS), np.eye(STEPS)),
    "toeplitz": (BandedToeplitz(THETA, STEPS, normalize_columns=False), toeplitz_matrix(THETA, STEPS)),
    "normalized": (BandedToeplitz(THETA, STEPS), normalized(toeplitz_matrix(THETA, STEPS))),
    "signed": (BandedToeplitz(SIGNED, STEPS, normalize_columns=False), toeplitz_matrix(SIGNED, STEPS)),
    "normalized signed": (BandedToeplitz(SIGNED, STEPS), normalized(toeplitz_matrix(SIGNED, STEPS))),
    "normalized, one band": (BandedToeplitz([3.0], STEPS), np.eye(STEPS)),
    "normalized, all bands": (
        BandedToeplitz(0.5 ** np.arange(STEPS), STEPS),
        normalized(toeplitz_matrix(0.5 ** np.arange(STEPS), STEPS)),
    ),
    "banded": (Banded(COLUMNS), banded_matrix(COLUMNS)),
    "dense": (Dense(FULL), FULL),
    "scaled": (Scaled(BandedToeplitz(THETA, STEPS), SCALES), normalized(toeplitz_matrix(THETA, STEPS)) * SCALES),
    "scaled inverse": (
        Scaled(BandedInverse([1.0, -0.4, -0.1], STEPS), SCALES),
        np.linalg.inv(toeplitz_matrix([1.0, -0.4, -0.1], STEPS)) * SCALES,
    ),
    "scaled, one band": (Scaled(BandedInverse([0.5], STEPS), SCALES), np.diag(2 * SCALES)),
    "scaled blt": (
        Scaled(BufferedToeplitz([0.3, 0.1], [0.9, 0.5], STEPS), SCALES),
        BufferedToeplitz([0.3, 0.1], [0.9, 0.5], STEPS).materialize() * SCALES,
    ),
}


def nesterov(beta):
    """Nesterov momentum, y_i = y_{i-1} + beta m_i + z_i with m_i = beta m_{i-1} + z_i: no banded inverse."""
    F = np.array([[beta, 0.0], [beta**2, 1.0]])
    step = Matrices(F, np.array([1.0, 1 + beta]), F[1], 1 + beta)
    return streaming.state_space(lambda i: step, 2)


def nesterov_matrix(beta, n):
    velocity = toeplitz_matrix(beta ** np.arange(n), n)
    return np.tri(n) @ (beta * velocity + np.eye(n))


def check_errors(strategy, C, workload, A):
    """All four aggregates, from whichever path is taken, against the dense formula."""
    expected = errors(C, A)
    tolerance = 1e-13 * np.linalg.cond(C) * np.linalg.cond(np.tri(len(C)))
    assert tolerance < 1e-7
    assert_allclose(per_step_error(strategy, workload=workload), expected, rtol=tolerance)
    assert_allclose(mean_squared_error(strategy, workload=workload), expected.mean(), rtol=tolerance)
    assert_allclose(max_squared_error(strategy, workload=workload), expected.max(), rtol=tolerance)
    assert_allclose(last_squared_error(strategy, workload=workload), expected[-1], rtol=tolerance)
    assert_allclose(error.rmse(strategy, workload=workload), rmse(C, A), rtol=tolerance)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("workload_name", WORKLOADS)
def test_every_strategy_on_every_workload_has_the_error_of_the_dense_formula(name, workload_name):
    (strategy, C), (workload, A) = STRATEGIES[name], WORKLOADS[workload_name]
    check_errors(strategy, C, workload, A)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_operator_without_banded_inverse_is_measured_through_its_state(name):
    strategy, C = STRATEGIES[name]
    workload = workloads.streaming_operator(nesterov(0.9), STEPS)
    check_errors(strategy, C, workload, nesterov_matrix(0.9, STEPS))


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_operator_without_state_space_form_is_measured_by_its_rows(name):
    strategy, C = STRATEGIES[name]
    last_two = StreamingOperator(1, np.zeros, lambda before, z: (z + before, z))
    A = np.eye(STEPS) + np.eye(STEPS, k=-1)
    check_errors(strategy, C, workloads.streaming_operator(last_two, STEPS), A)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("workload_name", WORKLOADS)
def test_the_papers_streaming_rows_have_the_error_of_the_dense_formula(name, workload_name):
    (strategy, C), (workload, A) = STRATEGIES[name], WORKLOADS[workload_name]
    by_rows = per_step_error_by_rows(strategy.inverse(), workload.operator, STEPS)
    assert_allclose(by_rows, errors(C, A), rtol=1e-9)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 70), normalize=st.booleans(), data=st.data())
def test_the_toeplitz_closed_form_is_the_dense_formula(seed, n, normalize, data):
    bands = data.draw(st.integers(1, n))
    generator = np.random.default_rng(seed)
    theta = np.append(1.0, generator.uniform(-0.9, 0.9, bands - 1) / bands)
    C = toeplitz_matrix(theta, n)
    strategy = BandedToeplitz(theta, n, normalize_columns=normalize)
    check_errors(strategy, normalized(C) if normalize else C, None, np.tri(n))


@given(seed=st.integers(0, 10**6), n=st.integers(1, 70), data=st.data())
def test_the_covariance_recursion_is_the_dense_formula_whatever_the_blocks(seed, n, data):
    bands = data.draw(st.integers(1, n))
    columns = random_columns(np.random.default_rng(seed), n, bands)
    columns[:, 1:] /= bands
    check_errors(Banded(columns), banded_matrix(columns), None, np.tri(n))


@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), data=st.data())
def test_the_gradient_of_the_covariance_recursion_is_the_slope_of_the_errors(seed, n, data):
    width = data.draw(st.integers(1, n))
    generator = np.random.default_rng(seed)
    M = random_columns(generator, n, width)
    M[:, 1:] /= width
    weights, direction = generator.uniform(0, 1, n), generator.normal(size=M.shape)
    direction[np.add.outer(np.arange(n), np.arange(width)) >= n] = 0
    gradient, _ = BandCovariance(M).gradient(weights)

    def along(t):
        return weights @ errors(banded_matrix(M + t * direction), np.eye(n))

    h = 1e-3  # five-point difference: h^4 and 1e-16 / h are both far below the tolerance
    numeric = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    assert np.sum(gradient * direction) == pytest.approx(numeric, rel=1e-6, abs=1e-8 * along(0) * n)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), data=st.data())
def test_the_banded_product_is_the_matrix_product(seed, n, data):
    generator = np.random.default_rng(seed)
    left = random_columns(generator, n, data.draw(st.integers(1, n)))
    right = random_columns(generator, n, data.draw(st.integers(1, n)))
    product = banded_matrix(left) @ banded_matrix(right)
    assert_allclose(banded_matrix(band_columns.product(left, right)), product, rtol=1e-12, atol=1e-13)


def full_sum(theta, steps, coefficients=None):
    """(mean, last) squared error with every one of the n terms computed."""
    w = lfilter([1.0], theta, np.ones(steps) if coefficients is None else coefficients)
    per_step = np.cumsum(w**2)
    return per_step.mean(), per_step[-1]


@pytest.mark.parametrize("steps", [999, 20_000, 10**6])
@pytest.mark.parametrize("bands", [2, 16, 300])
def test_the_settled_tail_is_the_full_sum(steps, bands):
    theta = 1 / np.arange(1, bands + 1) + 0.1
    strategy = BandedToeplitz(theta, steps, normalize_columns=False)
    mean, last = full_sum(theta, steps)
    assert_allclose(mean_squared_error(strategy), mean, rtol=1e-9)
    assert_allclose(max_squared_error(strategy), last, rtol=1e-9)


@pytest.mark.parametrize(("beta", "decay"), [(0.9, 0.0), (0.99, 0.0), (0.9, 0.01), (0.0, 0.5)])
def test_the_settled_tail_is_the_full_sum_with_momentum(beta, decay):
    steps, theta = 200_000, 1 / np.arange(1.0, 9.0)
    workload = workloads.momentum(steps, beta, weight_decay=decay)
    impulse = np.eye(1, steps)[0]
    lambdas = lfilter([1.0], [1.0, -beta], lfilter([1.0], [1.0, -(1 - decay)], impulse))
    strategy = BandedToeplitz(theta, steps, normalize_columns=False)
    mean, last = full_sum(theta, steps, lambdas)
    assert_allclose(mean_squared_error(strategy, workload=workload), mean, rtol=1e-9)
    assert_allclose(max_squared_error(strategy, workload=workload), last, rtol=1e-9)


def test_an_oscillating_workload_is_summed_in_full():
    steps, theta = 50_000, np.array([1.0, 0.5])
    wave = np.cos(np.arange(steps))
    strategy = BandedToeplitz(theta, steps, normalize_columns=False)
    mean, last = full_sum(theta, steps, wave)
    workload = workloads.toeplitz(wave, steps)
    assert_allclose([mean_squared_error(strategy, workload=workload)], [mean], rtol=1e-9)
    assert_allclose([max_squared_error(strategy, workload=workload)], [last], rtol=1e-9)


@pytest.mark.parametrize("name", ["identity", "toeplitz", "normalized"])
def test_a_workload_that_comes_back_after_a_long_gap_is_not_taken_for_settled(name):
    steps, gap = 600, 400
    coefficients = np.eye(1, gap + 1)[0] + 5 * np.eye(1, gap + 1, gap)[0]
    C = toeplitz_matrix([1.0] if name == "identity" else [1.0, 0.5], steps)
    strategy = {
        "identity": Identity(steps),
        "toeplitz": BandedToeplitz([1.0, 0.5], steps, normalize_columns=False),
        "normalized": BandedToeplitz([1.0, 0.5], steps),
    }[name]
    expected = errors(normalized(C) if name == "normalized" else C, toeplitz_matrix(coefficients, steps))
    assert_allclose(per_step_error(strategy, workload=workloads.toeplitz(coefficients, steps)), expected, rtol=1e-9)


@pytest.mark.parametrize(("steps", "bands"), [(10**9, 16), (10**12, 16)])
def test_the_error_of_slowly_settling_coefficients_is_exact_at_any_length(steps, bands):
    theta = banded_toeplitz(steps, bands, normalize_columns=False).strategy.coefficients
    # By the exact sum of the first terms and the limit after them; the slowest root says how many.
    rho = np.abs(np.roots(theta)).max()
    m = int(np.log(1e-18) / np.log(rho))
    w = lfilter([1.0], theta, np.ones(m))
    beyond = steps - m
    mean = (np.sum((steps - np.arange(m)) * w**2) + beyond * (beyond + 1) / 2 / theta.sum() ** 2) / steps
    strategy = BandedToeplitz(theta, steps, normalize_columns=False)
    assert_allclose(mean_squared_error(strategy), mean, rtol=1e-9)


@pytest.mark.parametrize("bands", [2, 16, 40])
@pytest.mark.parametrize("workload", [None, workloads.momentum(5000, 0.9)], ids=["prefix", "momentum"])
def test_the_normalized_tail_at_many_steps_is_the_general_recursion(bands, workload):
    strategy = BandedToeplitz(1 / np.arange(1, bands + 1) + 0.1, 5000)
    general = per_step_error(Banded(strategy.columns()), workload=workload)
    assert_allclose(per_step_error(strategy, workload=workload), general, rtol=1e-9)
    assert_allclose(mean_squared_error(strategy, workload=workload), general.mean(), rtol=1e-9)
    assert_allclose(max_squared_error(strategy, workload=workload), general.max(), rtol=1e-9)


def test_normalizing_columns_only_changes_the_last_bands_minus_one_steps():
    theta = THETA / np.linalg.norm(THETA)
    plain = per_step_error(BandedToeplitz(theta, 50, normalize_columns=False))
    scaled = per_step_error(BandedToeplitz(theta, 50))
    assert_allclose(plain[:47], scaled[:47], rtol=1e-12)
    assert np.all(scaled[47:] < plain[47:])


def test_with_normalized_columns_the_largest_error_is_not_the_last():
    strategy = banded_toeplitz(1024, 16, normalize_columns="after").strategy
    per_step = per_step_error(strategy)
    assert int(np.argmax(per_step)) == 1008
    assert per_step.max() / per_step[-1] == pytest.approx(1.04, abs=0.005)  # "4 percent", to its digits
    assert max_squared_error(strategy) == pytest.approx(per_step.max(), rel=1e-12)


def test_the_error_includes_the_sensitivity_of_the_participation():
    strategy = BandedToeplitz([1.0, 0.5], 12, normalize_columns=False)
    alone = error.rmse(strategy)
    assert error.rmse(strategy, participation=MinSeparation(4, 3)) == pytest.approx(2 * alone, rel=1e-12)
    four = max_error(strategy, participation=FixedEpochs(4))
    assert four == pytest.approx(2 * max_error(strategy), rel=1e-12)


def test_scaling_a_strategy_changes_nothing():
    once = BandedToeplitz(THETA, 50, normalize_columns=False)
    twice = BandedToeplitz(2 * THETA, 50, normalize_columns=False)
    assert error.rmse(once) == pytest.approx(error.rmse(twice), rel=1e-13)
    assert max_error(once) == pytest.approx(max_error(twice), rel=1e-13)


def test_the_reference_errors(reference):
    value = per_step_error(Dense([[1.0, 0.0], [0.5, 1.0]]))
    assert_allclose(value, reference["per_step_error"]["value"], rtol=1e-15)
    for (steps, bands), expected in reference["banded_square_root_rmse"].items():
        assert error.rmse(square_root(steps, bands)) == pytest.approx(expected, rel=1e-9)
    for steps, expected in reference["square_root_rmse_and_max"].items():
        found = [error.rmse(square_root(steps, steps)), max_error(square_root(steps, steps))]
        assert_allclose(found, expected, atol=0.51e-4)  # printed to four digits


def square_root(steps, bands):
    """(Banded) square root: the coefficients of (1 - x)^(-1/2)."""
    return BandedToeplitz(square_root_coefficients(bands), steps, normalize_columns=False)


def weighted_sum(theta, weights):
    return float(np.sum(weights * lfilter([1.0], theta, np.ones(len(weights))) ** 2))


def test_the_planted_weighting_by_i_of_the_papers_appendix_is_caught():
    n, theta = 1024, 1 / np.arange(1, 17) + 0.1
    ours = n * mean_squared_error(BandedToeplitz(theta, n, normalize_columns=False))
    as_printed = weighted_sum(theta, np.arange(1, n + 1))  # erratum 4
    as_proved = weighted_sum(theta, n - np.arange(n))
    assert (round(as_printed), round(as_proved)) == (21156, 22178)
    assert ours == pytest.approx(as_proved, rel=1e-12)
    assert ours != pytest.approx(as_printed, rel=1e-2)


def algorithm_3(columns, as_printed):
    """Total squared error on the prefix workload, streaming rows; C's columns are normalized on the way.

    The recursion solves the un-normalized matrix; a normalized C = Theta diag(1/c) has rows c_i times those
    of Theta^-1. As printed (erratum 3) the scaled rows are fed back into the recursion.
    """
    Theta, n = banded_matrix(columns), len(columns)
    norms = np.linalg.norm(Theta, axis=0)
    rows, total, row_sum = [], 0.0, np.zeros(n)
    for i in range(n):
        row = (np.eye(n)[i] - sum(Theta[i, j] * rows[j] for j in range(i))) / Theta[i, i]
        scaled = norms[i] * row
        rows.append(scaled if as_printed else row)
        row_sum = row_sum + scaled
        total += row_sum @ row_sum
    return total


def test_the_planted_recursion_on_normalized_rows_is_caught():
    columns = random_columns(np.random.default_rng(4), 9, 3)
    C = normalized(banded_matrix(columns))
    ours = per_step_error(Dense(C)).sum()
    assert algorithm_3(columns, as_printed=False) == pytest.approx(ours, rel=1e-12)
    assert algorithm_3(columns, as_printed=True) != pytest.approx(ours, rel=1e-2)


def test_the_planted_tail_of_one_term_too_many_is_caught():
    steps, theta = 20_000, 1 / np.arange(1, 17) + 0.1
    found = ToeplitzError(theta, workloads.prefix(steps), normalize=False)
    m, limit = len(found.response.head), found.response.limit
    head = float(np.sum(found.response.head**2))
    _, last = full_sum(theta, steps)
    assert m < steps
    assert head + (steps - m) * limit**2 == pytest.approx(last, rel=1e-12)
    assert found.maximum() == pytest.approx(last, rel=1e-12)
    assert found.maximum() != pytest.approx(head + (steps - m + 1) * limit**2, rel=1e-6)  # erratum 5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("measure", [error.rmse, max_error, per_step_error])
def test_an_error_that_overflows_is_said_and_not_returned(measure, normalize):
    unstable = BandedToeplitz([1.0, 3.0], 2000, normalize_columns=normalize)  # C^-1 grows like 3^n
    with pytest.raises(ValueError, match=r"overflow|finite|stable"):
        measure(unstable)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 70), normalize=st.booleans(), data=st.data())
def test_all_columns_of_a_response_are_the_papers_streaming_rows(seed, n, normalize, data):
    """In blocks of columns, the last of them cut off."""
    bands = data.draw(st.integers(1, n))
    theta = np.append(1.0, np.random.default_rng(seed).uniform(-0.9, 0.9, bands - 1) / bands)
    strategy = BandedToeplitz(theta, n, normalize_columns=normalize)
    if data.draw(st.booleans(), label="scaled"):
        strategy = Scaled(strategy, np.linspace(2, 0.5, n))
    workload = workloads.streaming_operator(nesterov(0.9), n).operator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error, "_COLUMNS", 16)
        found = per_step_error_by_response(strategy, workload)
    assert_allclose(found, per_step_error_by_rows(strategy.inverse(), workload, n), rtol=1e-9)


def test_very_many_bands_that_fall_slowly_take_no_minutes():
    """Once thirteen, row by row; the closed form loses digits here."""
    start = time.perf_counter()
    strategy = BandedToeplitz([1.0, *[0.000123456789] * 2_999], 3_000)
    found = per_step_error(strategy)
    assert time.perf_counter() - start < 30
    last = np.cumsum(np.linalg.solve(strategy.materialize(), np.eye(3_000, 40)), axis=0)
    assert found[39] == pytest.approx(np.sum(last[39] ** 2), rel=1e-9)


# --- the model that is kept ---------------------------------------------------------------------------

WITH_A_SMALL_STATE = {
    "tree": tree_aggregation(STEPS),
    "stamped": stamping(BandedToeplitz([1.0, 0.5], 5), 4),
    "inverse": banded_inverse_square_root(STEPS, 6),
    "blt": BufferedToeplitz([0.3, 0.1], [0.9, 0.99], STEPS),
}


@pytest.mark.parametrize("name", [*STRATEGIES, *WITH_A_SMALL_STATE])
@pytest.mark.parametrize("averaging", [None, workloads.exponential(0.9), workloads.tail(0.5)])
def test_the_last_error_is_that_of_the_dense_formula_and_its_row_that_of_the_matrix(name, averaging):
    strategy = WITH_A_SMALL_STATE[name] if name in WITH_A_SMALL_STATE else STRATEGIES[name][0]
    for workload in (
        workloads.prefix(strategy.steps, averaging=averaging),
        workloads.momentum(strategy.steps, 0.9, workloads.cosine(strategy.steps), averaging=averaging),
    ):
        B = workload.materialize() @ strategy.inverse().materialize(strategy.steps)
        assert_allclose(last_row(strategy, workload=workload), B[-1], atol=1e-12 * np.abs(B).max())
        assert_allclose(last_squared_error(strategy, workload=workload), B[-1] @ B[-1], rtol=1e-10)
        assert_allclose(per_step_error(strategy, workload=workload), np.sum(B**2, axis=1), rtol=1e-10)


def test_the_last_error_includes_the_sensitivity_and_equals_the_objective_that_was_minimized():
    kept = workloads.prefix(64, averaging=workloads.exponential(0.9))
    taking_part = MinSeparation(4, 16)
    solution = banded_toeplitz(64, 8, workload=kept, participation=taking_part, objective="last")
    last = error.last_error(solution.strategy, workload=kept, participation=taking_part)
    assert_allclose(last, solution.objective, rtol=1e-12)
    mean = banded_toeplitz(64, 8, workload=kept, participation=taking_part).strategy
    assert last < error.last_error(mean, workload=kept, participation=taking_part)


@pytest.mark.parametrize("objective", ["mean", "max", "last", np.arange(STEPS)], ids=str)
def test_every_objective_is_that_aggregate_of_the_per_step_errors(objective):
    strategy, workload = STRATEGIES["normalized"][0], WORKLOADS["schedule, tail"][0]
    errors = per_step_error(strategy, workload=workload)
    by_name = {"mean": errors.mean(), "max": errors.max(), "last": errors[-1]}
    expected = by_name[objective] if isinstance(objective, str) else np.average(errors, weights=objective)
    assert_allclose(error.squared_error(strategy, workload=workload, objective=objective), expected, rtol=1e-12)


@pytest.mark.parametrize("objective", ["least", [1.0], np.zeros(STEPS), -np.ones(STEPS)], ids=str)
def test_an_objective_that_is_none_is_refused(objective):
    with pytest.raises(ValueError, match="objective="):
        error.squared_error(STRATEGIES["identity"][0], objective=objective)
