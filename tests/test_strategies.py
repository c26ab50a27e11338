"""Strategies: one conformance list; every guarantee is tested on all of it, in every form that C has."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from bandmf.band_columns import row_of
from bandmf.strategies import Banded, BandedToeplitz, Dense, Identity, OutputRecurrence, load, save
from oracles import banded_matrix, normalized, random_columns, square_root_coefficients, state_vectors, toeplitz_matrix

N = 9
DECREASING, SIGNED = [1.0, 0.5, 0.25], [0.8, -0.3, 0.0, 0.6]
COLUMNS = random_columns(np.random.default_rng(5), N, 4)
LOWER = banded_matrix(random_columns(np.random.default_rng(6), N, N))
ROOT = square_root_coefficients(N)

# name -> (strategy, its matrix, its bands). A new family buys all tests by being listed here.
STRATEGIES = {
    "identity": (Identity(N), np.eye(N), 1),
    "toeplitz": (BandedToeplitz(DECREASING, N, normalize_columns=False), toeplitz_matrix(DECREASING, N), 3),
    "normalized toeplitz": (BandedToeplitz(DECREASING, N), normalized(toeplitz_matrix(DECREASING, N)), 3),
    "signed toeplitz": (BandedToeplitz(SIGNED, N, normalize_columns=False), toeplitz_matrix(SIGNED, N), 4),
    "normalized signed toeplitz": (BandedToeplitz(SIGNED, N), normalized(toeplitz_matrix(SIGNED, N)), 4),
    "one band": (BandedToeplitz([2.0], N, normalize_columns=False), 2 * np.eye(N), 1),
    "as many bands as steps": (BandedToeplitz(ROOT, N), normalized(toeplitz_matrix(ROOT, N)), N),
    "banded": (Banded(COLUMNS), banded_matrix(COLUMNS), 4),
    "banded, one band": (Banded(COLUMNS[:, :1]), np.diag(COLUMNS[:, 0]), 1),
    "dense": (Dense(LOWER), LOWER, N),
    "one step": (BandedToeplitz([0.5], 1), np.eye(1), 1),
    "one dense step": (Dense([[0.5]]), 0.5 * np.eye(1), 1),
}
every_strategy = pytest.mark.parametrize(("strategy", "matrix", "bands"), STRATEGIES.values(), ids=STRATEGIES.keys())


@every_strategy
def test_materialize_is_the_matrix(strategy, matrix, bands):
    assert strategy.steps == len(matrix)
    assert strategy.materialize().dtype == np.float64
    assert_allclose(strategy.materialize(), matrix, rtol=1e-14)


@every_strategy
def test_columns_are_those_of_the_matrix(strategy, matrix, bands):
    columns = strategy.columns()
    assert columns.shape == (len(matrix), bands)
    assert_allclose(banded_matrix(columns), matrix, rtol=1e-14)
    beyond = np.add.outer(np.arange(len(matrix)), np.arange(bands)) >= len(matrix)
    assert not columns[beyond].any()


@every_strategy
def test_some_of_the_columns_are_a_slice_of_all(strategy, matrix, bands):
    n = len(matrix)
    for start in range(n):
        for stop in range(start, n + 1):
            assert_array_equal(strategy.columns(start, stop), strategy.columns()[start:stop])


@every_strategy
def test_the_rows_of_the_recurrence_are_those_of_the_matrix(strategy, matrix, bands):
    recurrence = strategy.recurrence
    assert isinstance(recurrence, OutputRecurrence)
    assert recurrence.bands == bands
    for i, row in enumerate(matrix):
        newest_first = [row[i - r] if r <= i else 0.0 for r in range(bands)]
        assert_allclose(recurrence.row(i), newest_first, rtol=1e-14)
        assert_allclose(row_of(strategy.columns(), i), newest_first, rtol=1e-14)


@every_strategy
def test_the_inverse_undoes_the_matrix(strategy, matrix, bands):
    inverse = strategy.inverse()
    assert inverse.steps == len(matrix)
    assert_allclose(inverse.materialize() @ matrix, np.eye(len(matrix)), atol=1e-12)


@every_strategy
def test_the_streaming_inverse_keeps_exactly_one_buffer_less_than_bands(strategy, matrix, bands):
    assert strategy.bands == bands
    assert strategy.buffers == strategy.inverse().buffers == bands - 1
    assert state_vectors(strategy.inverse().init((7,)), (7,)) == bands - 1


@every_strategy
def test_past_the_last_step_there_is_no_noise_to_be_had(strategy, matrix, bands):
    n = len(matrix)
    with pytest.raises(ValueError, match=f"step={n}.*steps={n}"):
        list(strategy.inverse().apply(np.ones((n + 1, 2))))


@every_strategy
def test_the_column_norms_are_those_of_the_matrix(strategy, matrix, bands):
    norms = np.linalg.norm(matrix, axis=0)
    assert_allclose(strategy.column_norms(), norms, rtol=1e-14)
    assert_allclose(strategy.largest_column_norm(), norms.max(), rtol=1e-14)
    assert strategy.equal_column_norms() == (np.ptp(norms) < 1e-14)


@every_strategy
def test_a_strategy_cannot_be_changed(strategy, matrix, bands):
    for field in fields(strategy):
        with pytest.raises(FrozenInstanceError):
            setattr(strategy, field.name, None)
        value = getattr(strategy, field.name)
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                value.flat[0] = 7.0


@every_strategy
def test_what_a_strategy_hands_out_does_not_reach_back_into_it(strategy, matrix, bands):
    for copy in (strategy.columns(), strategy.materialize(), strategy.recurrence.row(0)):
        if copy.flags.writeable:
            copy[...] = 99.0
    assert_allclose(strategy.materialize(), matrix, rtol=1e-14)
    assert_allclose(strategy.inverse().materialize() @ matrix, np.eye(len(matrix)), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "argument"),
    [(lambda c: BandedToeplitz(c, 3), [1.0, 0.5]), (Banded, [[1.0, 0.5], [1.0, 0.0]]), (Dense, np.eye(2))],
    ids=["toeplitz", "banded", "dense"],
)
def test_a_strategy_keeps_its_own_copy_of_what_it_was_given(make, argument):
    given = np.array(argument)
    strategy = make(given)
    before = strategy.materialize().copy()
    given[...] = 99.0
    assert_array_equal(strategy.materialize(), before)


def test_whole_numbers_of_any_type_are_accepted_as_steps():
    for steps in (4, 4.0, np.int64(4), np.float32(4)):
        strategy = BandedToeplitz(np.array([1, 2], dtype=np.int8), steps)
        assert strategy.steps == 4
        assert isinstance(strategy.steps, int)
        assert strategy.coefficients.dtype == np.float64


def test_a_toeplitz_strategy_of_a_million_million_steps_costs_nothing():
    strategy = BandedToeplitz(DECREASING, 10**12)
    assert strategy.buffers == 2
    assert strategy.largest_column_norm() == 1.0
    tail = normalized(toeplitz_matrix(DECREASING, 3))
    assert_allclose(banded_matrix(strategy.columns(10**12 - 3)), tail, rtol=1e-14)
    assert_allclose(strategy.recurrence.row(10**12 - 1), tail[-1, ::-1], rtol=1e-14)


@every_strategy
def test_a_saved_strategy_is_loaded_as_it_was(strategy, matrix, bands, tmp_path):
    loaded = load(save(strategy, tmp_path / "strategy"))
    assert type(loaded) is type(strategy)
    assert loaded.bands == bands
    assert_array_equal(loaded.materialize(), strategy.materialize())


def test_a_damaged_file_is_refused(tmp_path):
    path = save(Identity(3), tmp_path / "strategy")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="not a strategy file"):
        load(path)
