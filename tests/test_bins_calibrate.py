"""Sigma for balls-in-bins: estimates that match the reference, and certified ones a little above."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

from bandmf.accounting.bins import NotCertifiedError, calibrate, estimate, gram_matrix
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import remove_sums
from bandmf.accounting.bins.loss import law, log_mean_exp, privacy_loss
from bandmf.accounting.bins.tuning import Pilot
from bandmf.accounting.certified import samples_for
from bandmf.accounting.sampled_root import approach, not_found, solve
from bandmf.accounting.samples import Sums
from bandmf.strategies import Identity, banded_inverse_square_root
from bins_oracles import REFERENCE, TWO, gaussian_sigma, independent_delta, reference_strategy, two_position_deltas

ONE = np.array([[1.0]])
ROWS = REFERENCE["sigmas"]
QUICK = [row for row in ROWS if (row["strategy"], row["epsilon"]) in {("bisr", 8.0), ("inverse", 2.0)}]


def name(row):
    return f"{row['strategy']}-{row['epsilon']:g}"


def close_to_reference(row, samples):
    found = estimate(reference_gram(row), row["epsilon"], REFERENCE["delta"], samples=samples)
    off = found.sigma / row["sigma"] - 1
    assert abs(off) < 0.005
    assert abs(off) < 4 * np.hypot(found.relative_standard_error, row["relative_standard_error"])


def reference_gram(row):
    return gram_matrix(reference_strategy(row), REFERENCE["cycle"])


@pytest.mark.parametrize("row", QUICK, ids=name)
def test_estimates_are_within_half_a_percent_of_the_reference(row):
    close_to_reference(row, 2**13)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_all_estimates_are_within_half_a_percent_of_the_reference(row):
    close_to_reference(row, 2**16)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_one_position_has_the_sigma_of_the_gaussian_mechanism(epsilon, delta):
    found = estimate(4 * ONE, epsilon, delta, samples=2**12)
    off = found.sigma / (2 * gaussian_sigma(epsilon, delta)) - 1
    assert abs(off) < 4 * found.relative_standard_error + 1e-5
    assert found.relative_standard_error < 0.01


def test_an_estimate_is_a_function_of_its_seed():
    first, again, other = (estimate(TWO, 1.0, 1e-4, samples=2**12, seed=seed) for seed in (1, 1, 2))
    assert first.sigma == again.sigma != other.sigma


def straight(sigma, until):
    """A curve of slope -30 through 1e-8 at sigma=2, of which no sample shows anything from `until` on."""
    mean = 1e-8 * (2 / sigma) ** 30 if sigma < until else 0.0
    return Sums(1000, 1000 * mean, 1000 * mean**2, mean)


@pytest.mark.parametrize("until", [2.001, 2.02, 2.1, 9.0])
@pytest.mark.parametrize("first", [1.9, 2.05, 2.3])
def test_draws_that_show_nothing_at_a_larger_sigma_do_not_end_the_search(first, until):
    """Once they did, with a math domain error, for some seeds."""
    sigma, sums, slope = solve(lambda sigma, samples: straight(sigma, until), first, 1e-8, 1000)
    assert sigma == pytest.approx(2, rel=0.02)
    assert sums.mean > 0
    assert -200 <= slope <= -2


def test_draws_that_show_nothing_at_all_get_one_sentence():
    with pytest.raises(NotCertifiedError, match="samples do not show it near sigma="):
        solve(lambda sigma, samples: straight(sigma, 0), 2.0, 1e-8, 1000)


def test_where_a_few_samples_decide_more_are_drawn():
    """Planted: of fewer than ten thousand samples, one has all the weight."""
    tried = []

    def curve(sigma, samples):
        tried.append(samples)
        mean = 1e-8 * (2 / sigma) ** 30
        spread = samples if samples < 10_000 else 1
        return Sums(samples, mean * samples, mean**2 * samples * spread, mean * spread)

    sigma, sums, _ = solve(curve, 2.1, 1e-8, 1000)
    assert sigma == pytest.approx(2, rel=1e-3)
    assert sorted(set(tried)) == [1000, 4000, 16000]
    assert sums.count == 16000


@pytest.mark.parametrize("slope", [-5.0, -30.0, -80.0, -190.0])
@pytest.mark.parametrize("first", [0.5, 1.9, 2.3, 9.0])
def test_the_neighborhood_is_found_whatever_the_slope(slope, first):
    """Steps by a fixed slope alone went back and forth over a curve that is steeper."""
    sigma, found = approach(lambda sigma: (1e-8 * (2 / sigma) ** -slope, "chain"), first, 1e-8)
    assert abs(slope * np.log(sigma / 2)) < 1
    assert found == "chain"


def blind_above(limit):
    """A curve that samples show only at a sigma of less than `limit`."""

    def look(sigma):
        if sigma > limit:
            raise not_found(1e-8, sigma)
        return 1e-8 * (2 / sigma) ** 30, "chain"

    return look


@pytest.mark.parametrize("limit", [2.06, 2.2])
def test_a_look_that_shows_nothing_says_that_sigma_is_too_large(limit):
    sigma, found = approach(blind_above(limit), 2.5, 1e-8)
    assert abs(30 * np.log(sigma / 2)) < 1
    assert found == "chain"


def test_looks_that_all_show_nothing_are_soon_given_up():
    seen = []

    def look(sigma):
        seen.append(sigma)
        raise not_found(1e-8, sigma)

    with pytest.raises(NotCertifiedError, match="samples do not show it"):
        approach(look, 2.5, 1e-8)
    assert len(seen) <= 4
    with pytest.raises(NotCertifiedError, match="samples do not show it"):
        approach(blind_above(1.5), 1.4, 1e-8)  # where it can be seen, sigma is too small


def test_a_curve_that_meets_delta_nowhere_gets_one_sentence():
    with pytest.raises(NotCertifiedError, match="samples do not show it near sigma="):
        approach(lambda sigma: (1e-3, None), 2.0, 1e-8)


@pytest.mark.parametrize(("epsilon", "delta", "sigma"), [(8.0, 1e-12, 2.44), (50.0, 1e-9, 0.556), (50.0, 1e-12, 0.608)])
def test_extreme_budgets_have_a_sigma(epsilon, delta, sigma):
    found = estimate(gram_matrix(banded_inverse_square_root(80, 16), 20), epsilon, delta, samples=2**12, seed=1)
    assert found.sigma == pytest.approx(sigma, rel=0.02)
    assert found.relative_standard_error < 0.01


def test_an_epsilon_that_few_tilts_reach_has_a_sigma():
    """By plain sampling: where delta is not small, L > e^epsilon is no rare event, and every tilt is too much."""
    gram = gram_matrix(banded_inverse_square_root(80, 16), 20)
    found = estimate(gram, 50.0, 1e-3, samples=2**12, posterior=True)
    loss, random = privacy_loss(gram, found.sigma), np.random.default_rng(0)
    u = loss.K[random.integers(20, size=100_000)] + loss.noise(random, 100_000)
    log_L = log_mean_exp(loss.log_terms(u))[0]  # under P, where delta = E_P (1 - e^epsilon / L)+
    assert np.maximum(-np.expm1(50.0 - log_L), 0).mean() == pytest.approx(1e-3, rel=0.4)
    assert calibrate(gram, 50.0, 1e-5, seconds=4).sigma < 0.5


def test_a_first_look_with_too_much_noise_is_not_the_last():
    """Uncorrelated positions: where the bound on the weights is 100 delta, samples show nothing yet; below, they do."""
    found = estimate(np.eye(64), 1.0, 1e-8, samples=2**12)
    true = independent_delta(found.sigma**-2, 64, 1.0)
    slope = np.log(independent_delta(1.02 * found.sigma**-2, 64, 1.0) / true) / np.log(1.02) * -2
    assert abs(np.log(true / 1e-8) / slope) < 4 * found.relative_standard_error < 0.03


def test_the_posterior_is_the_derivative_of_delta():
    """T against differences of the quadrature, entry by entry: delta of K depends on K_ij as T_ij says."""
    epsilon, delta = 1.0, 1e-3
    found = estimate(TWO, epsilon, delta, samples=2**17, posterior=True)
    K, T, h = TWO / found.sigma**2, found.posterior, 1e-4
    assert T.sum() == pytest.approx(1)

    def slope(i, j):
        """d delta / d K_ij, both K_ij and K_ji moved."""
        step = np.zeros((2, 2))
        step[i, j] = step[j, i] = h
        return (two_position_deltas(K + step, epsilon)[0] - two_position_deltas(K - step, epsilon)[0]) / (2 * h)

    slopes = np.array([slope(0, 0), slope(1, 1), slope(0, 1)])
    sampled = np.array([T[0, 0], T[1, 1], T[0, 1] + T[1, 0]])
    np.testing.assert_allclose(sampled, slopes / slopes.sum(), atol=0.01)


@pytest.fixture
def pilots(monkeypatch):
    """Plants errors in the estimate that `calibrate` starts from."""
    module = importlib.import_module("bandmf.accounting.bins.calibrate")

    def plant(**errors):
        monkeypatch.setattr(
            module, "estimate", lambda *given, **options: replace(estimate(*given, **options), **errors)
        )

    return plant


# --- certified ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_a_certified_sigma_is_a_little_above_that_of_the_gaussian_mechanism(epsilon):
    true = gaussian_sigma(epsilon, 1e-6)
    certificate = calibrate(ONE, epsilon, 1e-6, seconds=20, seed=3)
    assert true < certificate.sigma < 1.02 * true
    assert certificate.verify(ONE) == certificate


def test_a_certified_sigma_is_a_little_above_the_reference():
    row = QUICK[1]
    told = []
    certificate = calibrate(
        reference_gram(row), row["epsilon"], REFERENCE["delta"], seconds=60, seed=1, progress=told.append
    )
    assert row["sigma"] < certificate.sigma < 1.01 * row["sigma"]
    assert told[0].startswith("estimate")
    assert told[1].startswith("attempt 1")


def test_less_time_costs_noise_not_privacy():
    gram = gram_matrix(Identity(64), 16)
    long, short = (calibrate(gram, 2.0, 1e-5, seconds=seconds, seed=2) for seconds in (60, 2))
    assert short.samples <= long.samples
    short.verify(gram)


def test_too_little_time_is_said():
    with pytest.raises(NotCertifiedError, match="seconds=1e-06"):
        calibrate(TWO, 1.0, 1e-6, seconds=1e-6)


def test_where_the_add_direction_has_no_bound_it_is_said(pilots):
    pilots(add=1.0)
    with pytest.raises(NotCertifiedError, match="add direction"):
        calibrate(ONE, 1.0, 1e-6)


def test_a_failed_attempt_raises_sigma_and_uses_a_fresh_seed(pilots):
    """A pilot that is far too optimistic: the first attempts must fail, and later ones repair it."""
    pilots(sigma=0.99 * gaussian_sigma(1.0, 1e-6))
    told = []
    certificate = calibrate(ONE, 1.0, 1e-6, seconds=30, seed=5, progress=told.append)
    assert certificate.attempt == len(told) - 1 > 1
    assert certificate.seed >> 120 == certificate.attempt
    assert certificate.sigma > gaussian_sigma(1.0, 1e-6)
    assert certificate.verify(ONE) == certificate


def test_samples_for_a_margin_leave_that_margin():
    n = samples_for(8.0, 300.0, 0.05, 20.0)
    reached = (np.sqrt(40) + 3) * np.sqrt(8 / n) + 7 * 300 * 20 / (3 * n)
    assert reached == pytest.approx(0.05)


def test_tuning_finds_a_chain_with_moderate_weights():
    row = QUICK[0]
    found = estimate(reference_gram(row), row["epsilon"], REFERENCE["delta"], samples=2**10).pilot
    assert isinstance(found, Pilot)
    assert found.relative_variance < 40
    copies = Copies(law(reference_gram(row)).at(row["sigma"]), found.copies)
    sums = remove_sums(copies, row["epsilon"], 2**13, 11)
    assert sums.mean == pytest.approx(1e-6, rel=0.2)
