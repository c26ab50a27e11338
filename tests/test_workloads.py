"""Workloads: every form that a workload knows of itself is the same matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from bandmf import streaming, workloads
from oracles import banded_matrix, momentum_matrix, toeplitz_matrix

N = 23
SCHEDULE = workloads.cooldown(N)
WITH_ZERO = np.where(np.arange(N) == 5, 0.0, SCHEDULE)

# name -> (workload, its matrix)
WORKLOADS = {
    "prefix": (workloads.prefix(N), np.tri(N)),
    "momentum": (workloads.momentum(N, 0.9), momentum_matrix(np.ones(N), 0.9, 0.0)),
    "no momentum": (workloads.momentum(N, 0.0), np.tri(N)),
    "weight decay": (workloads.momentum(N, 0.8, weight_decay=0.3), momentum_matrix(np.ones(N), 0.8, 0.3)),
    "decay alone": (workloads.momentum(N, 0, weight_decay=1.5), momentum_matrix(np.ones(N), 0, 1.5)),
    "schedule": (workloads.momentum(N, 0.9, SCHEDULE), momentum_matrix(SCHEDULE, 0.9, 0.0)),
    "schedule and decay": (workloads.momentum(N, 0.9, SCHEDULE, weight_decay=0.2), momentum_matrix(SCHEDULE, 0.9, 0.2)),
    "a rate of zero": (workloads.momentum(N, 0.9, WITH_ZERO), momentum_matrix(WITH_ZERO, 0.9, 0.0)),
    "toeplitz": (workloads.toeplitz([1.0, 0.5, -0.25], N), toeplitz_matrix([1.0, 0.5, -0.25], N)),
    "one coefficient": (workloads.toeplitz([2.0], N), 2 * np.eye(N)),
    "full toeplitz": (workloads.toeplitz(1 / np.arange(1.0, N + 1), N), toeplitz_matrix(1 / np.arange(1.0, N + 1), N)),
    "oscillating": (workloads.toeplitz(np.cos(np.arange(N)), N), toeplitz_matrix(np.cos(np.arange(N)), N)),
    "unstable inverse": (workloads.toeplitz([1.0, 3.0], N), toeplitz_matrix([1.0, 3.0], N)),
    "operator": (workloads.streaming_operator(streaming.prefix() @ streaming.prefix(), N), np.tri(N) @ np.tri(N)),
}
every_workload = pytest.mark.parametrize(("workload", "matrix"), WORKLOADS.values(), ids=WORKLOADS.keys())


@every_workload
def test_a_workload_is_its_matrix(workload, matrix):
    assert workload.steps == N
    assert_allclose(workload.materialize(), matrix, rtol=1e-12, atol=1e-12)


@every_workload
def test_the_first_column_stands_for_the_whole_matrix(workload, matrix):
    if workload.coefficients is None:
        toeplitz = all(np.ptp(np.diag(matrix, -r)) < 1e-12 for r in range(N))
        assert not toeplitz or workload.name == "operator"
    else:
        assert_allclose(toeplitz_matrix(workload.coefficients(N), N), matrix, rtol=1e-12, atol=1e-12)


@every_workload
def test_the_inverse_columns_are_those_of_the_inverse(workload, matrix):
    if workload.inverse_columns is None:
        return_to_state_space = workload.name == "operator" or not np.all(np.diag(matrix))
        assert return_to_state_space or np.abs(np.linalg.inv(matrix)).max() > 1e6
    else:
        inverse = banded_matrix(workload.inverse_columns(0, N))
        assert_allclose(inverse @ matrix, np.eye(N), atol=1e-11 * np.linalg.norm(inverse))
        pieces = [workload.inverse_columns(i, min(i + 4, N)) for i in range(0, N, 4)]
        assert_allclose(np.concatenate(pieces), workload.inverse_columns(0, N), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["prefix", "momentum", "no momentum", "weight decay", "toeplitz"])
def test_a_workload_with_a_limit_settles_there(name):
    workload = WORKLOADS[name][0]
    assert_allclose(workload.coefficients(1000)[-1], workload.limit, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["full toeplitz", "oscillating"])
def test_a_workload_given_in_full_claims_no_limit(name):
    assert WORKLOADS[name][0].limit is None


def test_prefix_and_momentum_have_inverses_of_two_and_three_diagonals():
    widths = {name: WORKLOADS[name][0].inverse_columns(0, N).shape[1] for name in ("prefix", "momentum", "schedule")}
    assert widths == {"prefix": 2, "momentum": 3, "schedule": 3}


@given(rates=st.lists(st.floats(0.01, 2), min_size=1, max_size=9), beta=st.floats(0, 0.95), decay=st.floats(0, 0.5))
def test_the_inverse_of_any_schedule_without_zeros_is_banded(rates, beta, decay):
    workload = workloads.momentum(len(rates), beta, np.array(rates), decay)
    A, inverse = momentum_matrix(rates, beta, decay), banded_matrix(workload.inverse_columns(0, len(rates)))
    assert_allclose(A @ inverse, np.eye(len(rates)), atol=1e-12 * np.abs(A).max() * np.abs(inverse).max())


def test_a_constant_schedule_of_one_is_no_schedule():
    with_schedule = workloads.momentum(N, 0.7, np.ones(N), weight_decay=0.1)
    without = workloads.momentum(N, 0.7, weight_decay=0.1)
    assert_allclose(with_schedule.materialize(), without.materialize(), rtol=1e-13)


def test_cooldown_is_one_and_then_a_straight_line_to_the_final_rate():
    rates = workloads.cooldown(8, final=0.2, fraction=0.5)
    assert_allclose(rates, [1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2], rtol=1e-14)
    assert_allclose(workloads.cooldown(5, final=0.3, fraction=0.0), np.ones(5), rtol=0)
    assert_allclose(workloads.cooldown(4, final=0.0, fraction=1.0), [0.75, 0.5, 0.25, 0.0], atol=1e-15)


def test_cosine_goes_from_one_towards_the_final_rate():
    rates = workloads.cosine(4, final=0.5)
    assert_allclose(rates, 0.5 + 0.25 * (1 + np.cos(np.pi * np.arange(4) / 4)), rtol=1e-14)
    assert rates[0] == 1
    assert np.all(np.diff(rates) < 0)
    assert np.all(workloads.cosine(100) > 0)  # so that the workload stays invertible


@every_workload
def test_a_workload_of_another_length_is_refused(workload, matrix):
    with pytest.raises(ValueError, match=f"steps={N}.*steps={N + 1}"):
        workload.require_steps(N + 1)


@pytest.mark.parametrize("steps", [4096, 10**12])
def test_prefix_costs_nothing_before_it_is_used(steps):
    assert_allclose(workloads.prefix(steps).inverse_columns(steps - 2, steps), [[1, -1], [1, 0]])
