"""Sensitivity: never below the truth, and exact where it says so; by brute force over all patterns.

`check` compares a claim with three numbers per participation: what +-1 contributions attain, what unit
vectors attain (both below the true sensitivity, or equal), and sum |X_ij| (above it, or equal).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.sensitivities import Sensitivity, certified_sensitivity, sensitivity
from bandmf.strategies import Banded, BandedToeplitz, Dense, Identity
from oracles import (
    absolute_value,
    banded_matrix,
    epoch_patterns,
    normalized,
    random_columns,
    sensitivity_bounds,
    separated_patterns,
    signs_value,
    toeplitz_matrix,
    vectors_value,
)
from sweeps import some_long
from test_strategies import STRATEGIES

ROUNDING = 1e-10
HARD = [1.0, 0.0, 0.8]  # not monotone: the peers' formula is wrong here


def all_patterns(participation, steps):
    """Every permitted pattern, from the definition of each kind of participation."""
    if isinstance(participation, Single):
        return [(i,) for i in range(steps)]
    if isinstance(participation, FixedEpochs):
        return epoch_patterns(steps, participation.epochs)
    return list(separated_patterns(steps, participation.max_participations, participation.separation))


def check(claim, C, participation):
    """Fail unless the claimed sensitivity is certified, as exact as it says, and not absurdly large."""
    patterns = all_patterns(participation, len(C))
    by_signs, by_vectors, never_exceeded = sensitivity_bounds(C, patterns)
    assert claim.value >= by_vectors * (1 - ROUNDING), "below what an example can really do"
    if claim.exact:
        assert claim.value <= by_signs * (1 + ROUNDING), "called exact, but nothing attains it"
    if not isinstance(participation, MinSeparation):  # few patterns: each can be looked at
        assert claim.value <= never_exceeded * (1 + ROUNDING), "above sum |X| of every pattern"
    most = max(len(p) for p in patterns)
    largest = np.linalg.norm(C, axis=0).max()
    assert claim.value <= most * largest * (1 + ROUNDING), "above the triangle inequality"


def monotone_formula(theta, steps, separation, count):
    """The norm of the sum of evenly spaced columns: right for non-increasing theta >= 0 only."""
    return np.linalg.norm(toeplitz_matrix(theta, steps)[:, : count * separation : separation].sum(axis=1))


participations = st.one_of(
    st.just(Single()),
    st.builds(MinSeparation, st.integers(1, 4), st.integers(1, 6)),
    st.builds(MinSeparation, st.integers(3, 5), st.integers(1, 2)),
    st.sampled_from([FixedEpochs(1), FixedEpochs(2), FixedEpochs(3), FixedEpochs(4)]),
)


def steps_for(data, participation):
    """A small number of steps that the participation accepts."""
    if isinstance(participation, FixedEpochs):
        return participation.epochs * data.draw(st.integers(1, 8 // participation.epochs), label="epoch")
    return data.draw(st.integers(1, 9), label="steps")


@settings(max_examples=200)
@given(participation=participations, seed=st.integers(0, 10**6), data=st.data())
def test_random_signed_banded_strategies_are_certified(participation, seed, data):
    n = steps_for(data, participation)
    columns = random_columns(np.random.default_rng(seed), n, data.draw(st.integers(1, n), label="bands"))
    check(certified_sensitivity(Banded(columns), participation), banded_matrix(columns), participation)


coefficient = st.sampled_from([-1.0, -0.7, -0.1, 0.0, 0.1, 0.5, 0.8, 1.0])


@settings(max_examples=200)
@given(
    participation=participations,
    rest=st.lists(coefficient, max_size=6),
    first=st.sampled_from([1.0, -0.5, 0.3]),
    normalize=st.booleans(),
    data=st.data(),
)
def test_signed_non_monotone_toeplitz_strategies_are_certified(participation, rest, first, normalize, data):
    n = steps_for(data, participation)
    theta = [first, *rest][:n]
    C = toeplitz_matrix(theta, n)
    claim = certified_sensitivity(BandedToeplitz(theta, n, normalize_columns=normalize), participation)
    check(claim, normalized(C) if normalize else C, participation)


@settings(max_examples=200)
@given(participation=participations, seed=st.integers(0, 10**6), data=st.data())
def test_random_dense_strategies_are_certified(participation, seed, data):
    n = steps_for(data, participation)
    C = np.tril(np.random.default_rng(seed).normal(size=(n, n)))
    check(certified_sensitivity(Dense(C), participation), C, participation)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "participation",
    [Single(), FixedEpochs(3), *(MinSeparation(k, s) for k, s in [(2, 1), (3, 2), (3, 4), (9, 5)])],
    ids=str,
)
def test_every_listed_strategy_is_certified(name, participation):
    strategy, matrix, _ = STRATEGIES[name]
    if isinstance(participation, FixedEpochs) and strategy.steps % participation.epochs:
        participation = FixedEpochs(1)
    check(certified_sensitivity(strategy, participation), matrix, participation)


@given(participation=participations, theta=st.lists(st.floats(0, 1), max_size=5), data=st.data())
def test_it_is_exact_for_non_negative_non_increasing_toeplitz(participation, theta, data):
    n = steps_for(data, participation)
    theta = sorted([1.0, *theta], reverse=True)[:n]
    strategy = BandedToeplitz(theta, n, normalize_columns=False)
    claim = certified_sensitivity(strategy, participation)
    assert claim.exact
    check(claim, toeplitz_matrix(theta, n), participation)


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 8),
    bands=st.integers(1, 8),
    times=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_it_is_exact_for_banded_strategies_separated_by_at_least_the_bands(seed, n, bands, times, more):
    columns = random_columns(np.random.default_rng(seed), n, min(n, bands))
    participation = MinSeparation(times, min(n, bands) + more)
    claim = certified_sensitivity(Banded(columns), participation)
    assert claim.exact
    check(claim, banded_matrix(columns), participation)


@given(seed=st.integers(0, 10**6), n=st.integers(2, 8), separation=st.integers(1, 7))
def test_it_is_exact_for_two_participations_whatever_the_strategy(seed, n, separation):
    C = np.tril(np.random.default_rng(seed).normal(size=(n, n)))
    participation = MinSeparation(2, separation)
    claim = certified_sensitivity(Dense(C), participation)
    assert claim.exact
    check(claim, C, participation)


def test_the_reference_case_of_non_monotone_coefficients(reference):
    values = reference["min_separation_sensitivity_squared"]
    claim = certified_sensitivity(BandedToeplitz(HARD, 6, normalize_columns=False), MinSeparation(2, 1))
    assert claim.exact
    assert claim.value**2 == pytest.approx(values["exact"], rel=1e-12)
    assert monotone_formula(HARD, 6, 1, 2) ** 2 == pytest.approx(values["monotone_formula_wrong"], rel=1e-12)
    majorant = monotone_formula([1.0, 0.8, 0.8], 6, 1, 2) ** 2
    assert majorant == pytest.approx(values["majorant_upper_bound"], rel=1e-12)


def test_the_planted_monotone_formula_on_non_monotone_coefficients_is_caught():
    wrong = Sensitivity(float(monotone_formula(HARD, 6, 1, 2)), True, "planted")
    with pytest.raises(AssertionError, match="below what an example can really do"):
        check(wrong, toeplitz_matrix(HARD, 6), MinSeparation(2, 1))


def test_the_planted_majorant_called_exact_is_caught():
    wrong = Sensitivity(float(monotone_formula([1.0, 0.8, 0.8], 6, 1, 2)), True, "planted")
    with pytest.raises(AssertionError, match="nothing attains it"):
        check(wrong, toeplitz_matrix(HARD, 6), MinSeparation(2, 1))


def test_the_planted_norm_of_one_for_unnormalized_columns_is_caught():
    wrong = Sensitivity(1.0, True, "planted")
    with pytest.raises(AssertionError, match="below what an example can really do"):
        check(wrong, toeplitz_matrix([1.0, 0.9, 0.8], 6), Single())


def test_vectors_can_do_more_than_signs_and_that_is_never_overlooked():
    # Three columns whose pairwise products have signs +, +, -: no choice of signs suits all pairs.
    X = np.full((3, 3), 0.45) + 0.55 * np.eye(3)
    X[1, 2] = X[2, 1] = -0.45
    C = np.linalg.cholesky(X[::-1, ::-1]).T[::-1, ::-1]
    pattern = (0, 1, 2)
    assert signs_value(X, pattern) < vectors_value(X, pattern) < absolute_value(X, pattern)
    for participation in (FixedEpochs(3), MinSeparation(3, 1)):
        claim = certified_sensitivity(Dense(C), participation)
        assert not claim.exact
        check(claim, C, participation)


@pytest.mark.parametrize("times", [3, 4, 5])
def test_it_is_never_above_the_triangle_inequality(times):
    # Columns that all but coincide: every pair interacts fully, so k of them add up to k and to no more.
    C = 0.01 * np.eye(8)
    C[-1] = 1.0
    check(certified_sensitivity(Dense(C), MinSeparation(times, 1)), C, MinSeparation(times, 1))
    theta = [1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    assert sensitivity(BandedToeplitz(theta, 40), MinSeparation(times, 1)) <= times


def test_more_freedom_never_lowers_the_sensitivity():
    strategy = Banded(random_columns(np.random.default_rng(3), 40, 4))
    by_times = [sensitivity(strategy, MinSeparation(k, 4)) for k in range(1, 8)]
    by_separation = [sensitivity(strategy, MinSeparation(3, s)) for s in range(12, 3, -1)]
    assert np.all(np.diff(by_times) >= 0)
    assert np.all(np.diff(by_separation) >= 0)
    assert sensitivity(strategy, FixedEpochs(4)) <= sensitivity(strategy, MinSeparation(4, 10)) * (1 + 1e-15)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_sensitivity_is_that_of_the_columns_as_they_are_used(scale):
    theta = scale * np.array([0.8, 0.6])
    plain = BandedToeplitz(theta, 10, normalize_columns=False)
    assert sensitivity(plain) == pytest.approx(scale, rel=1e-14)
    assert sensitivity(BandedToeplitz(theta, 10)) == 1.0  # the norm of theta has been divided out already
    assert sensitivity(plain, MinSeparation(4, 2)) == pytest.approx(2 * scale, rel=1e-14)


def test_it_is_root_k_for_k_disjoint_participations_at_any_size():
    n = 10**12
    for strategy in (Identity(n), BandedToeplitz([0.8, 0.6], n)):
        claim = certified_sensitivity(strategy, MinSeparation(9, 100))
        assert claim.exact
        assert claim.value == pytest.approx(3.0, rel=1e-14)
        assert sensitivity(strategy) == 1.0


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(10, 24),
    bands=st.integers(2, 6),
    times=st.integers(2, 4),
    separation=st.integers(1, 6),
)
@settings(max_examples=25)
def test_it_never_lies_below_patterns_drawn_at_random(seed, n, bands, times, separation):
    generator = np.random.default_rng(seed)
    columns = random_columns(generator, n, bands)
    X = banded_matrix(columns).T @ banded_matrix(columns)
    claim = sensitivity(Banded(columns), MinSeparation(times, separation))
    for _ in range(40):
        steps = np.cumsum(generator.integers(separation, 2 * separation + 1, times)) - separation
        pattern = tuple(int(i) for i in steps[steps < n])
        if pattern:
            assert claim**2 >= signs_value(X, pattern) * (1 - ROUNDING)


@pytest.mark.parametrize("seed", some_long(range(60), lambda seed: seed < 4))
def test_bounds_under_minimum_separation_are_never_looser_than_a_peers(seed):
    """Those of the peer were tighter in 23 of 100 random cases, by up to 29 percent."""
    peer = pytest.importorskip("jax_privacy.matrix_factorization.sensitivity")
    generator = np.random.default_rng(seed)
    n, count = int(generator.integers(6, 30)), int(generator.integers(2, 6))
    C = np.tril(generator.choice([0.1, 0.5, 1.0]) * generator.normal(size=(n, n))) + 2 * np.eye(n)
    separation = int(generator.integers(1, max(2, n // count)))
    theirs = peer.get_min_sep_sensitivity_upper_bound_for_X(C.T @ C, separation, count)
    assert sensitivity(Dense(C), MinSeparation(count, separation)) <= theirs * (1 + 1e-5)  # float32 there
