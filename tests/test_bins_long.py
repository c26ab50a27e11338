"""Balls-in-bins of a long cycle: the operator is the matrix, its samples those of the matrix, and certificates hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bandmf.accounting.bins import Certificate, NotCertifiedError, calibrate, certify, estimate, gram_matrix
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import add_sums, remove_sums
from bandmf.accounting.bins.long import MOST_WRITTEN_OUT, LongGram, law_of, long_gram
from bandmf.accounting.bins.loss import law, log_mean_exp
from bandmf.accounting.verified import subject
from bandmf.strategies import BandedToeplitz, BufferedToeplitz, banded_inverse_square_root, square_root
from bandmf.strategies.scaled import Scaled

FALLING = np.linspace(2.0, 0.3, 60)
STRATEGIES = {
    "banded": (BandedToeplitz([1, 0.6, 0.3, 0.1], 48, normalize_columns=False), 12),
    "normalized": (BandedToeplitz([1, 0.6, 0.3, 0.1], 45), 12),
    "inverse": (banded_inverse_square_root(64, 4), 16),
    "blt": (BufferedToeplitz([0.2, 0.1], [0.99, 0.5], 50), 50),
    "uneven": (BufferedToeplitz([0.2, 0.1], [0.99, 0.5], 50), 17),
    "scaled": (Scaled(banded_inverse_square_root(60, 4), FALLING), 20),
    "scaled once": (Scaled(BandedToeplitz([1, 0.6, 0.3], 60), FALLING), 60),
}
CASE = STRATEGIES["inverse"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_operator_is_the_matrix_and_no_smaller(name):
    strategy, cycle = STRATEGIES[name]
    gram, long = gram_matrix(strategy, cycle), long_gram(strategy, cycle)
    A = long.transposed(np.eye(cycle))
    m = np.array([np.abs(strategy.materialize())[:, j::cycle].sum(axis=1) for j in range(cycle)])
    assert pytest.approx(m, rel=1e-11, abs=1e-12) == A
    assert (m <= A + 1e-14).all()  # an FFT rounds
    assert long.times(np.eye(strategy.steps)) == pytest.approx(A.T, rel=1e-11, abs=1e-12)
    assert long.diagonal == pytest.approx(np.diag(gram), rel=1e-10)
    distances = np.abs(np.subtract.outer(np.arange(cycle), np.arange(cycle)))
    assert (long.envelope[distances] >= gram).all()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_rest_and_the_shared_part_dominate_the_matrix(name):
    """K of the rest, by its own operator, and c: no entry of the sum below K, and c near the most that there can be."""
    strategy, cycle = STRATEGIES[name]
    loss, K = law_of(long_gram(strategy, cycle)).at(1.7), gram_matrix(strategy, cycle) / 1.7**2
    rest = loss.times(np.eye(cycle))
    assert (rest + loss.shared >= K - 1e-11).all()
    assert np.diag(rest) == pytest.approx(loss.diagonal, abs=1e-10)
    assert np.linalg.eigvalsh(rest).min() > -1e-10
    most = 1 / (np.ones(cycle) @ np.linalg.solve(K, np.ones(cycle)))
    assert 0.99 * most < loss.shared < 1.2 * most
    pairs = loss.shift(np.array([[0, 0, cycle - 1]]))[0]
    assert pairs == pytest.approx(2 * rest[0] + rest[-1], abs=1e-10)


def test_noise_has_the_covariance_of_the_rest():
    loss = law_of(long_gram(*CASE)).at(1.0)
    u = loss.noise(np.random.default_rng(0), 40_000)
    assert u.T @ u / 40_000 == pytest.approx(loss.times(np.eye(16)), abs=0.05 * loss.largest)


@pytest.mark.parametrize("name", STRATEGIES)
def test_samples_agree_with_those_of_the_matrix(name):
    strategy, cycle = STRATEGIES[name]
    gram = gram_matrix(strategy, cycle)
    sigma, found = 0.8 * gram.max() ** 0.5, []
    for each in (gram, long_gram(strategy, cycle)):
        copies = Copies(law_of(each).at(sigma), 3)
        sums = remove_sums(copies, 3.0, 15_000, 2)
        assert sums.largest <= copies.bound(3.0)
        added, bound = add_sums(copies.loss, 3.0, 15_000, 2)
        assert added.largest <= bound
        found.append((sums, added))
    for first, second in zip(*found, strict=True):
        assert abs(first.mean - second.mean) < 4.5 * np.hypot(first.standard_error, second.standard_error)


def test_a_planted_envelope_that_is_too_low_is_caught():
    """Positions would be kept too often, and the divergence comes out too small."""
    loss = law_of(long_gram(*CASE)).at(1.5)
    true = remove_sums(Copies(law(gram_matrix(*CASE)).at(1.5), 4), 3.0, 15_000, 1)
    copies = Copies(loss, 4)
    copies.hubs.envelope = copies.hubs.envelope - 1.0
    sums = remove_sums(copies, 3.0, 15_000, 1)
    assert abs(sums.mean - true.mean) > 4.5 * np.hypot(sums.standard_error, true.standard_error)


def test_rounding_of_ffts_is_below_its_bound():
    long = long_gram(square_root(300), 100)
    x = np.random.default_rng(0).standard_normal((4, 300))
    columns = np.array([np.convolve(np.eye(1, 300, j)[0], long.coefficients)[:300] for j in range(300)])
    exact = (x @ columns.T * long.scales).reshape(4, 3, 100).sum(axis=1)
    error = np.abs(long.times(x) - exact).max()
    assert 0 < error < long.rounding(float(np.linalg.norm(x, axis=1).max())) < 1e-9


def test_estimates_and_certificates_agree_with_those_of_the_matrix():
    gram, long = gram_matrix(*CASE), long_gram(*CASE)
    one, other = (estimate(each, 3.0, 1e-6, samples=2**12) for each in (gram, long))
    error = np.hypot(one.relative_standard_error, other.relative_standard_error)
    assert abs(np.log(one.sigma / other.sigma)) < 4.5 * error < 0.02
    certificate = calibrate(long, 3.0, 1e-6, seconds=4, seed=1)
    assert other.sigma < certificate.sigma < 1.03 * other.sigma
    assert Certificate.from_dict(certificate.to_dict()).verify(long) == certificate


def test_a_certificate_of_another_strategy_or_with_less_noise_is_refused():
    long = long_gram(*CASE)
    sigma = 1.02 * estimate(long, 3.0, 1e-4, samples=2**12).sigma
    certificate = certify(long, sigma, 3.0, 1e-4, samples=60_000, seed=3)
    with pytest.raises(NotCertifiedError, match="another Gram"):
        certificate.verify(LongGram(1.001 * long.coefficients, long.scales, long.cycle))
    with pytest.raises(NotCertifiedError):
        replace(certificate, sigma=0.95 * sigma).verify(long)


def test_a_long_cycle_is_not_written_out():
    strategy = BufferedToeplitz([0.2, 0.1], [0.99, 0.5], 9766)
    assert isinstance(gram_matrix(strategy, 9766), LongGram)
    assert isinstance(gram_matrix(strategy, MOST_WRITTEN_OUT), np.ndarray)
    loss = law_of(gram_matrix(strategy, 9766)).at(0.7)
    copies = Copies(loss, 3)
    drawn = copies.draw(np.random.default_rng(0), 64)
    assert 5 < len(drawn.kept) <= 64
    assert np.isfinite(log_mean_exp(loss.log_terms(drawn.shift))[0]).all()
    with pytest.raises(ValueError, match="posterior"):
        estimate(loss.gram, 3.0, 1e-6, posterior=True)


def test_the_subject_of_a_long_certificate_is_the_operator():
    strategy = banded_inverse_square_root(2 * MOST_WRITTEN_OUT, 4)
    made = certify(long_gram(*CASE), 8.0, 3.0, 1e-3, samples=2_000, seed=1)
    assert isinstance(subject(replace(made, cycle=2 * MOST_WRITTEN_OUT), strategy), LongGram)
