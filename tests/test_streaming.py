"""Streaming linear operators: each is the matrix it stands for, in every form it has."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from bandmf import streaming
from bandmf.streaming import Matrices, StreamingOperator
from oracles import banded_matrix, momentum_matrix, random_columns, state_vectors

N = 11
RATES = np.linspace(1.0, 0.2, N)


def matrix_rows(C, bands):
    """row(i)[r] = C[i, i - r]."""
    return lambda i: np.array([C[i, i - r] if r <= i else 0.0 for r in range(bands)])


def nested(F):
    """A two-number state with every entry of (F, G, H, D) in use and changing from step to step."""
    return lambda i: Matrices(F / (1 + i), np.array([1.0, -0.5]), np.array([0.3, 0.1 * i]), 2.0 - 0.1 * i)


def nested_matrix(n):
    """The same operator from its definition: T[i, j] = H_i F_{i-1} ... F_{j+1} G_j, T[i, i] = D_i."""
    T = np.zeros((n, n))
    for j in range(n):
        x = nested(FULL)(j).input
        T[j, j] = nested(FULL)(j).feedthrough
        for i in range(j + 1, n):
            T[i, j] = nested(FULL)(i).output @ x
            x = nested(FULL)(i).transition @ x
    return T


FULL = np.array([[0.5, -0.2], [0.4, 0.9]])
C4 = banded_matrix(random_columns(np.random.default_rng(0), N, 4))
C1 = np.diag(np.diag(C4))
CN = banded_matrix(random_columns(np.random.default_rng(1), N, N))
PREFIX, MOMENTUM = np.tri(N), momentum_matrix(RATES, 0.9, 0.1)

# name -> (operator, its matrix, the buffers it may keep)
OPERATORS = {
    "prefix": (streaming.prefix(), PREFIX, 1),
    "diagonal": (streaming.diagonal(RATES), np.diag(RATES), 0),
    "momentum": (streaming.momentum(RATES, 0.9, 0.1), MOMENTUM, 2),
    "banded": (streaming.banded(matrix_rows(C4, 4), 4, N), C4, 3),
    "banded inverse": (streaming.banded_inverse(matrix_rows(C4, 4), 4, N), np.linalg.inv(C4), 3),
    "one band": (streaming.banded_inverse(matrix_rows(C1, 1), 1, N), np.linalg.inv(C1), 0),
    "all bands": (streaming.banded_inverse(matrix_rows(CN, N), N, N), np.linalg.inv(CN), N - 1),
    "state space": (streaming.state_space(nested(FULL), 2, N), nested_matrix(N), 2),
    "composed": (
        streaming.momentum(RATES, 0.9, 0.1) @ streaming.banded_inverse(matrix_rows(C4, 4), 4, N),
        MOMENTUM @ np.linalg.inv(C4),
        5,
    ),
}
every_operator = pytest.mark.parametrize(("operator", "matrix", "buffers"), OPERATORS.values(), ids=OPERATORS.keys())


@every_operator
def test_an_operator_is_its_matrix(operator, matrix, buffers):
    assert_allclose(operator.materialize(N), matrix, rtol=1e-10, atol=1e-12)


@every_operator
def test_the_state_space_form_is_the_same_operator(operator, matrix, buffers):
    rebuilt = streaming.state_space(operator.matrices, operator.buffers, N)
    assert_allclose(rebuilt.materialize(), matrix, rtol=1e-10, atol=1e-12)


@every_operator
def test_exactly_the_stated_number_of_buffers_is_kept(operator, matrix, buffers):
    shape = (3, 5)
    state = operator.init(shape)
    assert operator.buffers == buffers == state_vectors(state, shape)
    for _ in range(N):
        _, state = operator.step(state, np.ones(shape))
        assert state_vectors(state, shape) == buffers


@every_operator
def test_the_inverse_undoes_the_operator_and_is_of_the_same_size(operator, matrix, buffers):
    inverse = operator.inverse()
    assert inverse.buffers == buffers
    assert_allclose(inverse.materialize(N) @ matrix, np.eye(N), atol=1e-9)
    assert_allclose((inverse @ operator).materialize(N), np.eye(N), atol=1e-9)


@every_operator
def test_every_coordinate_is_treated_alike(operator, matrix, buffers):
    stream = np.random.default_rng(2).normal(size=(N, 2, 3))
    outputs = np.array(list(operator.apply(stream)))
    assert_allclose(outputs, np.tensordot(matrix, stream, axes=1), rtol=1e-10, atol=1e-10)


@every_operator
def test_a_step_never_changes_the_state_it_was_given(operator, matrix, buffers):
    state, z = operator.init((2,)), np.array([1.0, -2.0])
    for _ in range(N - 1):  # so many that every buffer is in use
        kept = copy.deepcopy(state)
        output, following = operator.step(state, z)
        again, _ = operator.step(state, z)
        from_copy, _ = operator.step(kept, z)
        assert_array_equal(output, again)
        assert_array_equal(output, from_copy)
        state = following


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"prefix"}))
def test_past_its_last_step_an_operator_refuses(name):
    with pytest.raises(ValueError, match=f"step={N}.*steps={N}"):
        list(OPERATORS[name][0].apply(np.ones((N + 1, 1))))


@given(rates=st.lists(st.floats(-2, 2), min_size=1, max_size=7), beta=st.floats(0, 0.99), decay=st.floats(0, 1.5))
def test_momentum_is_the_update_rule_for_any_schedule(rates, beta, decay):
    operator = streaming.momentum(np.array(rates), beta, decay)
    expected = momentum_matrix(rates, beta, decay)
    assert_allclose(operator.materialize(), expected, rtol=1e-10, atol=1e-10 * (1 + abs(expected).max()))


@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), data=st.data())
def test_banded_and_banded_inverse_undo_each_other(seed, n, data):
    bands = data.draw(st.integers(1, n))
    C = banded_matrix(random_columns(np.random.default_rng(seed), n, bands))
    row = matrix_rows(C, bands)
    both = streaming.banded(row, bands, n) @ streaming.banded_inverse(row, bands, n)
    scale = np.linalg.cond(C)
    assert_allclose(both.materialize(), np.eye(n), atol=1e-13 * n * scale)


@given(first=st.sampled_from(sorted(OPERATORS)), second=st.sampled_from(sorted(OPERATORS)))
def test_composition_is_the_matrix_product_in_both_forms(first, second):
    (f, F, size_f), (s, S, size_s) = OPERATORS[first], OPERATORS[second]
    composed = s @ f
    assert composed.buffers == size_f + size_s
    product, tolerance = S @ F, 1e-12 * np.abs(S).sum() * np.abs(F).max()
    assert_allclose(composed.materialize(N), product, atol=tolerance)
    rebuilt = streaming.state_space(composed.matrices, composed.buffers)
    assert_allclose(rebuilt.materialize(N), product, atol=tolerance)


def test_a_composition_is_as_long_as_its_shorter_part():
    short, long = streaming.diagonal(np.ones(3)), streaming.diagonal(np.ones(5))
    assert (short @ long).steps == (long @ short).steps == 3
    assert (streaming.prefix() @ long).steps == 5
    assert (streaming.prefix() @ streaming.prefix()).steps is None


def test_a_zero_on_the_diagonal_has_no_inverse():
    operator = streaming.diagonal(np.array([1.0, 0.0])).inverse()
    with pytest.raises(ValueError, match="step 1 is zero"):
        operator.materialize()


def test_an_operator_without_state_space_form_is_not_inverted():
    plain = StreamingOperator(0, lambda shape: (), lambda state, z: (z, state))
    with pytest.raises(ValueError, match="state-space"):
        plain.inverse()
    assert_array_equal((streaming.prefix() @ plain).materialize(3), np.tri(3))


def test_an_operator_of_any_length_needs_a_length_to_become_a_matrix():
    with pytest.raises(ValueError, match="steps=None"):
        streaming.prefix().materialize()
