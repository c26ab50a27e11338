"""Samples of the two divergences: right on average, weights never above their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from bandmf.accounting.bins.chain import Chain
from bandmf.accounting.bins.divergences import add_sums, remove_sums
from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.bins.half_space import HalfSpace, half_space
from bandmf.accounting.bins.loss import log_mean_exp, privacy_loss
from bandmf.accounting.samples import sample_sums
from bandmf.strategies import BandedToeplitz, banded_inverse_square_root
from bins_oracles import REFERENCE, TWO, gaussian_delta, moment, two_position_deltas


def random_gram(seed, b, spread):
    """Of b vectors with entries >= 0."""
    m = np.random.default_rng(seed).random((b, 2 * b)) ** spread
    return m @ m.T


def unchecked_chain(power, length):
    """A chain whose power was not checked: the planted error."""
    chain = object.__new__(Chain)
    object.__setattr__(chain, "power", power)
    object.__setattr__(chain, "length", length)
    return chain


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


# --- remove -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("power", "length", "sigma"), [(1.0, 1, 1.0), (1.5, 2, 1.0), (2.0, 1, 1.0), (1.0, 3, 2.0), (2.5, 4, 3.0)]
)
def test_two_positions_remove_is_the_quadrature(power, length, sigma):
    true, _ = two_position_deltas(TWO / sigma**2, 1.0)
    if sigma == 1:
        assert true == pytest.approx(REFERENCE["two_positions"]["remove"], abs=1e-7)
    sums = remove_sums(privacy_loss(TWO, sigma), 1.0, Chain(power, length), 200_000, 3)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.05 * true


@pytest.mark.parametrize("length", [1, 3])
def test_one_position_is_the_gaussian_mechanism(length):
    loss, epsilon, true = privacy_loss(np.array([[0.8]]), 1.0), 2.0, gaussian_delta(0.8, 2.0)
    sums = remove_sums(loss, epsilon, Chain(1.0, length), 100_000, 4)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.05 * true
    added, _ = add_sums(loss, epsilon, 100_000, 4)
    assert abs(added.mean - true) < 4.5 * added.standard_error < 0.05 * true
    side = half_space(loss, epsilon)
    assert true <= side.deterministic_bound() <= true * (1 + 1e-6)  # with one position, it is exact


def test_equal_positions_are_one_position():
    loss, true = privacy_loss(np.full((7, 7), 0.8), 1.0), gaussian_delta(0.8, 2.0)
    sums = remove_sums(loss, 2.0, Chain(1.5, 2), 50_000, 4)
    assert abs(sums.mean - true) < 4.5 * sums.standard_error < 0.1 * true


@pytest.mark.parametrize(("power", "length"), [(1.0, 1), (1.5, 2), (2.0, 3), (1.0, 4)])
def test_the_mean_of_the_chains_scales_is_the_moment_over_all_chains(power, length):
    loss = privacy_loss(random_gram(5, 4, 2), 1.6)
    chain = Chain(power, length)
    generator = np.random.Generator(np.random.Philox(6))
    scales = np.exp(chain._positions(loss, generator, 40_000)[1])
    error = scales.std() / 200
    assert abs(scales.mean() - moment(loss.K, power, length)) < 4.5 * error + 1e-9


def test_different_chains_agree_on_many_positions():
    loss = privacy_loss(gram_matrix(banded_inverse_square_root(256, 8), 32), 1.9)
    means = []
    for chain in (Chain(1.0, 2), Chain(2.0, 1), Chain(1.5, 3)):
        sums = remove_sums(loss, 6.0, chain, 40_000, 8)
        means.append((sums.mean, sums.standard_error))
    for mean, error in means[1:]:
        assert abs(mean - means[0][0]) < 4.5 * math.hypot(error, means[0][1])


@given(
    st.integers(0, 10**6), st.integers(1, 6), st.floats(1, 3), st.integers(1, 5), st.floats(0.1, 8), st.floats(0.3, 4)
)
def test_no_weight_is_above_its_bound(seed, b, power, length, epsilon, scale):
    """At sampled outputs, and at outputs and chains chosen to come close to the bound."""
    loss = privacy_loss(random_gram(seed, b, 3), scale)
    chain = Chain(power, length)
    bound = chain.bound(loss, epsilon)
    assert chain.sample(loss, epsilon, np.random.default_rng(seed), 100).max() <= bound
    # Chains that stay at one position have the largest scales; outputs where all v are alike, the least means.
    logs = np.linspace(epsilon, epsilon + 4, 200)[:, None] + np.zeros(b)
    first = log_mean_exp((power**2 - power) / 2 * loss.diagonal[None])[0]
    scales = first + max(
        sum(float(log_mean_exp((power + t) * loss.K[[i]])[0][0]) for t in range(length)) for i in range(b)
    )
    assert chain._weights(loss, epsilon, logs + loss.diagonal / 2, scales).max() <= bound


@pytest.mark.parametrize(("b", "value", "length"), [(64, 0.1, 64), (512, 0.05, 128)])
def test_the_bound_holds_where_rounding_is_raised_to_a_high_power(b, value, length):
    """All positions alike, and an output at the very peak of the weights: there they were 1e-7 above it once."""
    loss, chain, epsilon = privacy_loss(np.full((b, b), value), 1.0), Chain(1.0, length), 1.0
    peak = np.full((1, b), epsilon + math.log(chain.tilt / (chain.tilt - 1)))
    scale = sum(float(log_mean_exp((1 + t) * loss.K[[0]])[0][0]) for t in range(length))
    weight = chain._weights(loss, epsilon, peak + loss.diagonal / 2, np.array([scale]))
    assert weight.max() <= chain.bound(loss, epsilon) <= weight.max() * (1 + 1e-5)


def test_the_bound_is_attained_by_a_single_position():
    loss, chain = privacy_loss(np.array([[0.5]]), 1.0), Chain(1.0, 2)
    samples = chain.sample(loss, 1.0, np.random.default_rng(0), 100_000)
    assert 0.6 * chain.bound(loss, 1.0) < samples.max() <= chain.bound(loss, 1.0)


def test_a_planted_power_below_one_breaks_the_bound_and_is_caught():
    with pytest.raises(ValueError, match=r"power=0\.5"):
        Chain(0.5, 1)
    loss, chain = privacy_loss(0.5 * np.eye(20) + 0.01, 1.0), unchecked_chain(0.5, 1)
    log_L = 0.2 + math.log(3.0)  # where (L - e^epsilon) / L^1.5 is largest, with a single v that is not zero
    logs = np.full((1, 20), -50.0)
    logs[0, 0] = log_L + math.log(20)
    scale = np.log(moment_of_first(loss, 0.5)) + np.log(np.exp(0.5 * loss.K).mean(axis=1)).max()
    weight = chain._weights(loss, 0.2, logs + loss.diagonal / 2, np.array([scale]))
    assert weight[0] > 2 * chain.bound(loss, 0.2)


def moment_of_first(loss, power):
    return np.exp((power**2 - power) / 2 * loss.diagonal).mean()


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
    loss, chain = privacy_loss(random_gram(1, 6, 2), 2.0), Chain(1.5, 2)

    def draw(generator, rows):
        return chain.sample(loss, 1.0, generator, rows)

    one, three = (sample_sums(draw, 100_001, 6, 9, 0, workers=workers) for workers in (1, 3))
    assert one == three
    assert sample_sums(draw, 100_001, 6, 10, 0).total != one.total
