"""Samples of the two divergences: right on average, weights never above their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import add_sums, remove_sums
from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.bins.half_space import HalfSpace, half_space
from bandmf.accounting.bins.loss import law, log_mean_exp, log_removed, privacy_loss
from bandmf.accounting.bins.peak import log_peak
from bandmf.accounting.samples import sample_sums
from bandmf.strategies import BandedToeplitz, banded_inverse_square_root
from bins_oracles import REFERENCE, TWO, gaussian_delta, moment, three_position_delta, two_position_deltas


def random_gram(seed, b, spread):
    """Of b vectors with entries >= 0."""
    m = np.random.default_rng(seed).random((b, 2 * b)) ** spread
    return m @ m.T


# --- L ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFERENCE["privacy_losses"])
def test_the_privacy_loss_of_an_output_is_the_reference(case):
    found = our_loss(case["coefficients"], case["cycle"], np.array(case["outputs"]), 1.0)
    raised = 1.5e-10 * 4  # half of what the diagonal of K (at most 4 here) is raised by
    assert found == pytest.approx(case["loss"], abs=raised + 1e-10)  # the reference has ten digits


def our_loss(coefficients, cycle, outputs, sigma):
    """log L at an output y = C x + z, with K from gram_matrix and u_j = <m_j, y> / sigma^2."""
    strategy = BandedToeplitz(coefficients, len(outputs), normalize_columns=False)
    C = strategy.materialize()
    u = np.array([C[:, j::cycle].sum(axis=1) @ outputs for j in range(cycle)]) / sigma**2
    loss = privacy_loss(gram_matrix(strategy, cycle), sigma)
    return float(log_mean_exp(loss.log_terms(u[None]))[0][0])


def test_the_privacy_loss_is_that_of_jax_privacy():
    monte_carlo = pytest.importorskip("jax_privacy.experimental.monte_carlo.sample_generation")
    theta, random = np.array([1.0, 0.6, 0.3, 0.2]), np.random.default_rng(1)
    for cycle in (2, 3, 4):
        outputs = random.normal(size=12)
        theirs = monte_carlo._compute_balls_in_bins_privacy_loss(cycle, outputs, 1.3, theta)
        assert our_loss(theta, cycle, outputs, 1.3) == pytest.approx(float(theirs), abs=1e-6)  # float32 there


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.3, 30))
def test_the_factor_dominates_the_gram_matrix(seed, b, sigma):
    gram = random_gram(seed, b, 2)
    loss = privacy_loss(gram, sigma)
    F = loss.factor.astype(np.longdouble)
    K = gram.astype(np.longdouble) / np.longdouble(sigma) ** 2
    assert np.all(F @ F.T >= K)
    assert np.all(K + 1e-9 * K.max() >= F @ F.T)


def test_a_singular_gram_matrix_is_fine_and_an_indefinite_one_is_refused():
    assert privacy_loss(np.ones((5, 5)), 1.0).cycle == 5
    with pytest.raises(ValueError, match="semidefinite"):
        privacy_loss(np.array([[1.0, 2.0], [2.0, 1.0]]), 1.0)


def test_log_mean_exp_does_not_overflow():
    logs = np.array([[2000.0, 1990.0], [-2000.0, -2010.0]])
    for power, result in zip((1.0, 2.5), log_mean_exp(logs, 2.5), strict=True):
        np.testing.assert_allclose(result, logsumexp(power * logs, axis=1) - math.log(2), rtol=1e-12)


# --- what all positions share -------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.3, 30))
def test_the_shared_part_and_the_rest_dominate_the_gram_matrix(seed, b, sigma):
    gram = random_gram(seed, b, 2)
    loss = law(gram).at(sigma)
    F, K = loss.factor.astype(np.longdouble), gram.astype(np.longdouble) / np.longdouble(sigma) ** 2
    total = F @ F.T + np.longdouble(loss.shared)
    assert loss.shared > 0
    assert np.all(total >= K)
    assert np.all(K + 1e-9 * K.max() >= total)


@pytest.mark.parametrize("shared", [1e-6, 0.01, 0.5, 4.0])
@pytest.mark.parametrize("log_L", [-2.0, 0.5, 1.0, 3.0])
def test_the_expectation_over_the_shared_part_is_the_quadrature(shared, log_L):
    fine = np.linspace(-9, 9, 400_001)
    masses = np.exp(-(fine**2) / 2) / math.sqrt(2 * math.pi) * (fine[1] - fine[0])
    excess = np.exp(math.sqrt(shared) * fine - shared / 2 + log_L) - math.e
    true = float(np.maximum(excess, 0) @ masses)
    found = math.exp(log_removed(np.array([log_L]), 1.0, shared)[0])
    assert found == pytest.approx(true, rel=1e-5, abs=1e-17)


@pytest.mark.parametrize("shared", [0.0, 1e-9, 1e-4, 0.1, 2.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_peak_is_above_all_values_and_not_by_much(shared, epsilon):
    powers = np.array([2, 3, 5, 20, 256])
    y = np.linspace(epsilon - 300 * max(shared, 0.01) - 1, epsilon + 1.5, 400_001)
    for q, peak in zip(powers, log_peak(powers, epsilon, shared), strict=True):
        highest = (log_removed(y, epsilon, shared) - q * y).max()
        assert highest <= peak <= highest + 1e-3 or (shared == 2.0 and q == 256)


# --- remove -------------------------------------------------------------------------------------------

LAWS = {"together": privacy_loss, "apart": lambda gram, sigma: law(gram).at(sigma)}


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize(("copies", "sigma"), [(2, 1.0), (3, 1.0), (3, 2.0), (5, 3.0)])
def test_two_positions_remove_is_the_quadrature(kind, copies, sigma):
    true, _ = two_position_deltas(TWO / sigma**2, 1.0)
    if sigma == 1:
        assert true == pytest.approx(REFERENCE["two_positions"]["remove"], abs=1e-7)
    sums = remove_sums(Copies(LAWS[kind](TWO, sigma), copies), 1.0, 100_000, 3)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.05 * true


@pytest.mark.parametrize("kind", LAWS)
def test_three_positions_remove_is_the_quadrature(kind):
    gram = random_gram(4, 3, 1)
    gram *= 2 / gram.max()
    loss = LAWS[kind](gram, 1.3)
    sums = remove_sums(Copies(loss, 3), 1.0, 100_000, 5)
    assert abs(sums.mean - three_position_delta(gram / 1.69, 1.0)) < 4.5 * sums.standard_error < 0.05 * sums.mean


def test_a_planted_weight_that_is_lost_is_caught_by_the_quadrature():
    """Copies that were not kept must count: without them the mean is too large by what is kept of them."""
    true, _ = two_position_deltas(TWO, 1.0)
    copies = Copies(law(TWO).at(1.0), 3)
    samples = copies.sample(1.0, np.random.default_rng(0), 20_000)
    kept = len(copies.draw(np.random.default_rng(0), 20_000).kept)
    assert kept < 19_000
    assert samples.sum() / kept > true + 4.5 * samples.std() / math.sqrt(20_000)


@pytest.mark.parametrize("copies", [2, 4])
def test_one_position_is_the_gaussian_mechanism(copies):
    loss, epsilon, true = privacy_loss(np.array([[0.8]]), 1.0), 2.0, gaussian_delta(0.8, 2.0)
    sums = remove_sums(Copies(loss, copies), epsilon, 100_000, 4)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.05 * true
    added, _ = add_sums(loss, epsilon, 100_000, 4)
    assert abs(added.mean - true) < 4.5 * added.standard_error < 0.05 * true
    side = half_space(loss, epsilon)
    assert true <= side.deterministic_bound() <= true * (1 + 1e-6)  # with one position, it is exact


def test_equal_positions_are_one_position():
    loss, true = law(np.full((7, 7), 0.8)).at(1.0), gaussian_delta(0.8, 2.0)
    sums = remove_sums(Copies(loss, 3), 2.0, 5_000, 4)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.1 * true


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_positions_are_kept_with_their_moment(copies):
    """What is kept, times W, is E L^q: all choices of positions one by one."""
    proposal = Copies(privacy_loss(random_gram(5, 4, 2), 1.6), copies)
    share = len(proposal.draw(np.random.Generator(np.random.Philox(6)), 40_000).kept) / 40_000
    true = moment(proposal.loss.K, 1.0, copies - 1) / math.exp(proposal.log_scale)
    assert abs(share - true) < 4.5 * math.sqrt(true * (1 - true) / 40_000) + 1e-9


def test_different_numbers_of_copies_agree_on_many_positions():
    gram = gram_matrix(banded_inverse_square_root(256, 8), 32)
    means = []
    for loss in (law(gram).at(1.9), privacy_loss(gram, 1.9)):
        for copies in (3, 4, 5):
            sums = remove_sums(Copies(loss, copies), 6.0, 40_000, 8)
            means.append((sums.mean, sums.standard_error))
    for mean, error in means[1:]:
        assert abs(mean - means[0][0]) < 4.5 * math.hypot(error, means[0][1])


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 9), st.floats(0.1, 8), st.floats(0.3, 4))
def test_no_weight_is_above_its_bound(seed, b, copies, epsilon, scale):
    """At sampled outputs, and at those where all v are alike, L from far below to far above the peak."""
    for loss in (privacy_loss(random_gram(seed, b, 3), scale), law(random_gram(seed, b, 3)).at(scale)):
        proposal = Copies(loss, copies)
        bound = proposal.bound(epsilon)
        assert proposal.sample(epsilon, np.random.default_rng(seed), 100).max() <= bound
        logs = np.linspace(epsilon - 9, epsilon + 4, 2000)[:, None] + np.zeros(b)
        assert proposal.weights(logs + loss.diagonal / 2, epsilon).max() <= bound


@pytest.mark.parametrize(("b", "value", "copies"), [(64, 0.1, 64), (512, 0.05, 128)])
def test_the_bound_holds_where_rounding_is_raised_to_a_high_power(b, value, copies):
    """All positions alike, and an output at the very peak of the weights."""
    loss, epsilon = privacy_loss(np.full((b, b), value), 1.0), 1.0
    proposal = Copies(loss, copies)
    peak = np.full((1, b), epsilon + math.log(copies / (copies - 1)))
    weight = proposal.weights(peak + loss.diagonal / 2, epsilon)
    assert weight.max() <= proposal.bound(epsilon) <= weight.max() * (1 + 1e-5)


def test_the_bound_is_attained_by_a_single_position():
    copies = Copies(privacy_loss(np.array([[0.5]]), 1.0), 3)
    samples = copies.sample(1.0, np.random.default_rng(0), 100_000)
    assert 0.6 * copies.bound(1.0) < samples.max() <= copies.bound(1.0)


def test_a_planted_hub_that_is_too_weak_is_caught_by_the_share_that_is_kept():
    """With half of the attraction, some positions would have to be kept with a probability above one."""
    K = privacy_loss(random_gram(5, 4, 2), 0.8).K
    pairs = 6 * K[0, 0]
    stars = np.full(4, 3 * K[0, 0])
    assert log_mean_exp(2 * stars[None])[0][0] >= pairs - 1e-12
    assert log_mean_exp(1 * stars[None])[0][0] < pairs - 1


# --- add ----------------------------------------------------------------------------------------------


def test_two_positions_add_is_the_quadrature():
    _, add = two_position_deltas(TWO, 1.0)
    assert add == pytest.approx(REFERENCE["two_positions"]["add"], abs=1e-7)
    sums, _ = add_sums(privacy_loss(TWO, 1.0), 1.0, 200_000, 5)
    assert abs(sums.mean - add) < 4.5 * sums.standard_error < 0.01


@settings(max_examples=15)
@given(st.floats(0.05, 1.5), st.floats(0.05, 1.5), st.floats(0, 1), st.floats(0.5, 4))
def test_the_bound_without_sampling_is_above_the_quadrature(first, second, correlation, epsilon):
    off = correlation * math.sqrt(first * second) * 0.999
    K = np.array([[first, off], [off, second]])
    side = half_space(privacy_loss(K, 1.0), epsilon)
    if side is not None:
        _, add = two_position_deltas(K, epsilon)
        assert side.deterministic_bound() >= add - 1e-10


@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0.5, 6))
def test_no_weight_of_the_add_direction_is_above_its_bound(seed, b, epsilon):
    loss = privacy_loss(random_gram(seed, b, 3), 1.5)
    side = half_space(loss, epsilon)
    if side is not None:
        samples = side.sample(loss, epsilon, np.random.default_rng(seed), 400)
        assert samples.max() <= side.bound(side.rounding(loss))


def test_a_planted_half_space_that_is_too_far_is_caught_by_its_weights():
    loss = privacy_loss(np.full((3, 3), 0.5), 1.0)
    side = half_space(loss, 2.0)
    far = HalfSpace(side.positions, side.steepness, side.distance + 1.0)
    assert far.sample(loss, 2.0, np.random.default_rng(0), 5000).max() > far.bound(far.rounding(loss))
    assert far.deterministic_bound() < gaussian_delta(0.5, 2.0)


def test_where_zero_lies_in_the_set_there_is_no_half_space():
    assert half_space(privacy_loss(3.0 * np.eye(50), 1.0), 0.5) is None


# --- sampling -----------------------------------------------------------------------------------------


def test_the_number_of_workers_does_not_change_a_digit():
    copies = Copies(privacy_loss(random_gram(1, 6, 2), 2.0), 3)

    def draw(generator, rows):
        return copies.sample(1.0, generator, rows)

    one, three = (sample_sums(draw, 100_001, 6, 9, 0, workers=workers) for workers in (1, 3))
    assert one == three
    assert sample_sums(draw, 100_001, 6, 10, 0).total != one.total
