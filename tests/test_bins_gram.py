"""The Gram matrix of balls-in-bins is the one of |C|, never below it, and fast where C is Toeplitz."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf.accounting.bins import gram_matrix
from bandmf.accounting.bins.gram import checked_gram, marks
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    Identity,
    Scaled,
    banded_inverse_square_root,
    square_root,
    stamping,
    tree_aggregation,
)
from bins_oracles import gram_by_columns

RANDOM = np.random.default_rng(0).normal(size=(64, 64))


def families(n):
    """Strategies for n steps, some with negative entries."""
    return [
        BandedToeplitz([1.0, -0.5, 0.3][:n], n, normalize_columns=False),
        BandedToeplitz([1.0, -0.5, 0.3][:n], n, normalize_columns=True),
        BandedToeplitz(RANDOM[0, :n], n, normalize_columns=True),
        banded_inverse_square_root(n, min(n, 4)),
        BandedInverse([1.0, 0.3, -0.2, 0.25][:n], n),
        BufferedToeplitz([0.3, -0.2], [0.9, -0.5], n),
        square_root(n),
        Identity(n),
        Dense(np.tril(RANDOM[:n, :n])),
        Banded(BandedToeplitz([1.0, -0.5, 0.3][:n], n).columns()),
        tree_aggregation(n),
        stamping(square_root(n), 1),
        *(
            Scaled(strategy, np.exp(RANDOM[1, :n]))
            for strategy in (
                BandedToeplitz([1.0, -0.5, 0.3][:n], n, normalize_columns=False),
                BandedToeplitz([1.0, -0.5, 0.3][:n], n, normalize_columns=True),
                BandedInverse([1.0, 0.3, -0.2, 0.25][:n], n),
                BufferedToeplitz([0.3, -0.2], [0.9, -0.5], n),
                Dense(np.tril(RANDOM[:n, :n])),
                stamping(square_root(n), 1),
            )
        ),
    ]


@given(st.integers(1, 40), st.data())
def test_every_entry_is_that_of_the_columns_and_never_below(n, data):
    cycle = data.draw(st.integers(1, n))
    for strategy in families(n):
        gram, slow = gram_matrix(strategy, cycle), gram_by_columns(strategy, cycle)
        assert np.all(gram >= slow), strategy
        np.testing.assert_allclose(gram, slow, rtol=1e-9, atol=1e-10 * slow.max())
        assert np.array_equal(gram, gram.T)


def test_the_entries_dominate_exact_arithmetic_for_a_banded_inverse():
    r = [1.0, -0.5, 0.25, -0.125]
    n, cycle, exact = 24, 6, []
    for t in range(n):
        past = sum(Fraction(r[i]) * exact[t - i] for i in range(1, min(t, 3) + 1))
        exact.append((Fraction(int(t == 0)) - past) / Fraction(r[0]))
    m = [[sum(abs(exact[i - j]) for j in range(start, i + 1, cycle)) for i in range(n)] for start in range(cycle)]
    gram = gram_matrix(BandedInverse(r, n), cycle)
    for i in range(cycle):
        for j in range(cycle):
            true = sum(x * y for x, y in zip(m[i], m[j], strict=True))
            assert true <= Fraction(float(gram[i, j])) <= true * (1 + Fraction(1, 10**11))


def test_signs_do_not_cancel():
    alternating = BandedToeplitz([1.0, -0.9], 8, normalize_columns=False)
    positive = BandedToeplitz([1.0, 0.9], 8, normalize_columns=False)
    np.testing.assert_array_equal(gram_matrix(alternating, 4), gram_matrix(positive, 4))


@pytest.mark.parametrize(
    "strategy",
    [
        banded_inverse_square_root(16384, 16),
        BufferedToeplitz([0.1] * 4, [0.999, 0.99, 0.9, 0.5], 16384),
        BandedToeplitz(np.linspace(1, 0.1, 64), 16384),
        Scaled(BufferedToeplitz([0.1] * 4, [0.999, 0.99, 0.9, 0.5], 16384), np.linspace(1, 0.1, 16384)),
        Scaled(BandedToeplitz(np.linspace(1, 0.1, 64), 16384), np.linspace(0.1, 1, 16384)),
    ],
    ids=["inverse", "blt", "banded", "scaled blt", "scaled banded"],
)
def test_large_sizes_are_fast_and_right(strategy):
    start = time.process_time()
    gram = gram_matrix(strategy, 2048)
    assert time.process_time() - start < (3 if isinstance(strategy, Scaled) else 1.5)
    for i, j in [(0, 0), (3, 2047), (2047, 2047), (100, 101)]:
        columns = [np.zeros(16384 + strategy.bands) for _ in range(2)]
        for total, first in zip(columns, (i, j), strict=True):
            for step in range(first, 16384, 2048):
                total[step : step + strategy.bands] += np.abs(strategy.columns(step, step + 1)[0])
        slow = columns[0][:16384] @ columns[1][:16384]
        assert slow * (1 - 1e-12) <= gram[i, j] <= slow * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("cycle", [0, 9, 1.5, True])
def test_a_cycle_is_between_one_and_the_steps(cycle):
    with pytest.raises(ValueError, match="cycle="):
        gram_matrix(Identity(8), cycle)


def test_an_inverse_that_explodes_is_refused():
    with pytest.raises(ValueError, match="ill-conditioned"):
        gram_matrix(BandedInverse([1.0, -3.0], 200), 20)


@pytest.mark.parametrize(
    ("gram", "complaint"),
    [
        ([[1.0, 0.5], [0.4, 1.0]], "symmetric"),
        ([[1.0, -0.5], [-0.5, 1.0]], "negative"),
        ([[1.0, 0.0], [0.0, 0.0]], "diagonal"),
        ([[np.nan]], "finite"),
        ([[1.0, 2.0]], "symmetric"),
    ],
)
def test_what_cannot_be_a_gram_matrix_is_refused(gram, complaint):
    with pytest.raises(ValueError, match=complaint):
        checked_gram(np.array(gram))


def test_marks_tell_a_moved_entry():
    gram = gram_matrix(banded_inverse_square_root(32, 4), 8)
    moved = gram.copy()
    moved[2, 3], moved[3, 4] = gram[3, 4], gram[2, 3]
    assert abs(marks(moved)[2] / marks(gram)[2] - 1) > 1e-6
