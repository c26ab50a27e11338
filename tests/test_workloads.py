"""Workloads: every form that a workload knows of itself is the same matrix."""

from __future__ import annotations

import dataclasses
import json
import pickle
from functools import partial

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
AVERAGES = {
    "decay": workloads.exponential(0.8),
    "from the first": workloads.exponential(0.99, start="first"),
    "debiased": workloads.exponential(0.99, start="debiased"),
    "no decay": workloads.exponential(0.0, start="debiased"),
    "tail": workloads.tail(0.4),
    "all": workloads.tail(1),
    "every other": workloads.shares(np.arange(N) % 2 / 2),
}


def averages_matrix(name):
    """Each kept model written out from its definition in words."""
    E = np.zeros((N, N))
    for i in range(N):
        ages = i - np.arange(i + 1)
        if name == "decay":
            E[i, : i + 1] = 0.2 * 0.8**ages
        elif name == "from the first":
            E[i, : i + 1] = np.append(0.99 ** (ages[0]), 0.01 * 0.99 ** ages[1:])
        elif name == "debiased":
            E[i, : i + 1] = 0.99**ages / np.sum(0.99**ages)
        elif name == "no decay":
            E[i, i] = 1
        elif name in ("tail", "all"):
            last = {"tail": 9, "all": 23}[name]
            counted = np.arange(i + 1) >= min(N - last, i)
            E[i, : i + 1] = counted / counted.sum()
        else:
            E[i] = (E[i - 1] + np.eye(N)[i]) / 2 if i % 2 else E[i - 1]
    return E


for name, averaging in AVERAGES.items():
    E = averages_matrix(name)
    matrix = momentum_matrix(SCHEDULE, 0.9, 0.2)
    WORKLOADS[f"prefix, {name}"] = workloads.prefix(N, averaging=averaging), E @ np.tri(N)
    schedule = workloads.momentum(N, 0.9, SCHEDULE, weight_decay=0.2, averaging=averaging)
    WORKLOADS[f"schedule, {name}"] = schedule, E @ matrix
E, full = averages_matrix("decay"), 1 / np.arange(1.0, N + 1)
for name, plain in (
    ("momentum", partial(workloads.momentum, momentum=0.9)),
    ("full", partial(workloads.toeplitz, full)),
):
    WORKLOADS[f"{name}, decay"] = plain(steps=N, averaging=AVERAGES["decay"]), E @ plain(steps=N).materialize()
del name, averaging, plain, E, matrix, schedule, full
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


@every_workload
def test_a_workload_survives_pickling_and_its_recipe_is_plain(workload, matrix):
    if workload.recipe is None:
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(workload)
        return
    again = pickle.loads(pickle.dumps(workload))
    kind, arguments = workload.recipe
    plain = json.dumps(
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    )
    for copy in (again, workloads.from_recipe((kind, json.loads(plain)), N)):
        assert copy.name == workload.name
        assert_allclose(copy.materialize(), matrix, rtol=1e-12, atol=1e-12)


@every_workload
def test_the_last_row_is_that_of_the_matrix(workload, matrix):
    assert_allclose(workload.operator.last_row(N), matrix[-1], rtol=1e-12, atol=1e-12)


def test_an_average_of_constant_share_keeps_a_toeplitz_workload_and_its_limit():
    kept = workloads.momentum(N, 0.9, averaging=workloads.exponential(0.8))
    assert kept.limit == workloads.momentum(N, 0.9).limit
    assert_allclose(kept.coefficients(1000)[-1], kept.limit, rtol=1e-12)
    assert kept.inverse_columns(0, N).shape == (N, 4)
    assert kept.name == "momentum 0.9, averaged with decay 0.8"


@pytest.mark.parametrize("averaging", AVERAGES.values(), ids=AVERAGES.keys())
def test_an_average_of_equal_weights_is_these_weights(averaging):
    """The shares of all weights and of the initial ones add up to one: weights that never change are kept."""
    kept = averaging.operator(N).materialize(N) @ np.ones(N) + np.cumprod(1 - averaging.shares(N))
    assert_allclose(kept, np.ones(N), rtol=1e-13)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: workloads.exponential(1.0), "decay=1.0"),
        (lambda: workloads.exponential(0.9, start="zero"), "start='zero'"),
        (lambda: workloads.tail(0), "fraction=0"),
        (lambda: workloads.tail(1.5), "fraction=1.5"),
        (lambda: workloads.shares([0.5, 1.5]), r"shares\[1\]=1.5"),
        (lambda: workloads.prefix(3, averaging=workloads.shares([0.5])), "steps=3"),
        (lambda: workloads.prefix(3, averaging=0.999), "averaging=0.999.*exponential"),
    ],
)
def test_an_average_that_makes_no_sense_is_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


@pytest.mark.parametrize("planted", ["off by one", "share of the old"])
def test_a_planted_error_in_an_average_is_seen(planted):
    """A mean that starts a step late, and shares swapped between old and new, differ from the matrix by far."""
    good = AVERAGES["tail"]
    wrong = {"off by one": lambda n: np.roll(good.shares(n), 1), "share of the old": lambda n: 1 - good.shares(n)}
    E = dataclasses.replace(good, shares=wrong[planted]).operator(N).materialize(N)
    assert np.abs(E - averages_matrix("tail")).max() > 0.01
