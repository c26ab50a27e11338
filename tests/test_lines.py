"""Divergences on lines: equal to quadrature, never below it, and weights never above their bounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import add_sums, remove_sums
from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.lines import tilt as tilt_module
from bandmf.accounting.lines.bound import best_rate, log_sums, upper_bound
from bandmf.accounting.lines.divergences import ADD, REMOVE, added, removed
from bandmf.accounting.lines.estimate import estimate
from bandmf.accounting.lines.line import lines, raised_loss
from bandmf.accounting.lines.tilt import Tilt, best_tilt
from bandmf.accounting.samples import sample_sums
from bandmf.strategies import banded_inverse_square_root
from bins_oracles import TWO, gaussian_delta, gaussian_sigma, two_position_deltas

THREE = np.array([[0.9, 0.4, 0.1], [0.4, 0.8, 0.3], [0.1, 0.3, 0.7]])
GRAM = gram_matrix(banded_inverse_square_root(256, 8), 32)


def random_gram(seed, b, spread=2):
    """Of b vectors with entries >= 0."""
    m = np.random.default_rng(seed).random((b, 2 * b)) ** spread
    return m @ m.T


def three_position_remove(K, epsilon):
    """Two coordinates of the noise by the trapezoidal rule, the third in closed form."""
    F, level = np.linalg.cholesky(K), math.exp(epsilon)
    x = np.arange(-9, 9.001, 0.03)
    weights = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * 0.03
    u = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1) @ F[:, :2].T - np.diag(K) / 2
    strike = 3 * level - np.exp(u[..., 0]) - np.exp(u[..., 1])
    mean, deviation = u[..., 2], F[2, 2]
    forward = np.exp(mean + deviation**2 / 2)
    d = (mean - np.log(np.maximum(strike, 1e-300))) / deviation
    call = np.where(strike > 0, forward * stats.norm.cdf(d + deviation) - strike * stats.norm.cdf(d), forward - strike)
    return float(weights @ call @ weights) / 3


def sums(samples, b, count, seed=0, stream=REMOVE):
    return sample_sums(samples.draw, count, b, seed, stream)


# --- on one line --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.1, 4), st.floats(0.4, 4))
def test_the_integrals_are_those_of_quadrature_and_not_below_them(seed, b, epsilon, sigma):
    through = lines(raised_loss(random_gram(seed, b), sigma))
    log_v = through.across(np.random.default_rng(seed), 1) - through.spread / 2
    z = np.linspace(-12, 14, 40_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    L = np.exp(log_v + np.outer(z, through.slopes) - through.slopes**2 / 2).mean(axis=1)
    for found, by_hand in (
        (through.removed(log_v, epsilon, 0.0)[0], density @ np.maximum(L - math.exp(epsilon), 0)),
        (through.added(log_v, epsilon, 0.0)[0], density @ np.maximum(1 - math.exp(epsilon) * L, 0)),
    ):
        assert found == pytest.approx(by_hand, rel=1e-5, abs=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(-0.3, 0.3))
def test_a_crossing_that_is_off_raises_the_integrals(seed, b, off):
    """Formulas at another z are below the integrals; what is added makes up for it, whatever z is."""
    through = lines(raised_loss(random_gram(seed, b), 2.0))
    log_v = through.across(np.random.default_rng(seed), 1) - through.spread / 2
    exact = through.removed(log_v, 1.0, 0.0)[0], through.added(log_v, 1.0, 0.0)[0]
    crossing = type(through).crossing

    class Off(type(through)):
        def crossing(self, log_v, log_level):
            z = crossing(self, log_v, log_level)[0] + off
            L = np.exp(log_v + self.slopes * z[:, None] - self.slopes**2 / 2).mean(axis=1)
            return z, np.abs(np.log(L) - log_level)

    moved = Off(through.loss, through.positions, through.steepness, through.slopes, through.spread)
    assert moved.removed(log_v, 1.0, 0.0)[0] >= exact[0] * (1 - 1e-9)
    assert moved.added(log_v, 1.0, 0.0)[0] >= exact[1] * (1 - 1e-9)


def test_a_planted_crossing_without_correction_is_caught():
    """Without what is added for it, a crossing that is off gives less than the integral."""
    through = lines(raised_loss(TWO, 1.0))
    log_v = -through.spread[None] / 2
    z = through.crossing(log_v, 1.0)[0] + 0.3
    formula = (np.exp(log_v) * stats.norm.cdf(through.slopes - z)).mean() - math.e * stats.norm.cdf(-z)
    assert formula[0] < 0.99 * through.removed(log_v, 1.0, 0.0)[0]


@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.3, 30))
def test_the_law_on_lines_dominates_the_gram_matrix(seed, b, sigma):
    """Its covariance, of F x - a (p'F x) / s + a z with the numbers that are used, is nowhere below G / sigma^2."""
    gram = random_gram(seed, b)
    through = lines(raised_loss(gram, sigma))
    F, a = through.loss.factor.astype(np.longdouble), through.slopes.astype(np.longdouble)
    projected = F - np.outer(a, through.positions @ F) / np.longdouble(through.steepness)
    covariance = projected @ projected.T + np.outer(a, a)
    K = gram.astype(np.longdouble) / np.longdouble(sigma) ** 2
    assert np.all(covariance >= K)
    assert np.all(covariance <= K + 1e-8 * K.max())


def test_across_the_lines_nothing_is_left_of_their_direction():
    through = lines(raised_loss(GRAM, 2.0))
    r = through.across(np.random.default_rng(0), 20_000)
    assert np.abs(r @ through.positions).max() < 1e-12
    R = through.loss.K - np.outer(through.slopes, through.slopes)
    assert np.abs(np.cov(r.T) - R).max() < 0.05 * R.max()


# --- remove -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.8, 2.0])
@pytest.mark.parametrize("length", [1, 5])
def test_one_position_is_the_gaussian_mechanism_without_chance(sigma, length):
    found = removed(raised_loss(np.array([[1.0]]), sigma), 1.0, Tilt(length))
    samples = found.draw(np.random.default_rng(0), 10)
    assert samples == pytest.approx(gaussian_delta(sigma**-2, 1.0), rel=1e-6)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_two_positions_are_the_quadrature(length):
    remove, add = two_position_deltas(TWO / 2.25, 1.0)
    loss = raised_loss(TWO, 1.5)
    shown = sums(removed(loss, 1.0, Tilt(length)), 2, 200_000)
    assert abs(shown.mean - remove) < 4.5 * shown.standard_error < 0.02 * remove
    shown = sums(added(loss, 1.0), 2, 100_000, stream=ADD)
    assert abs(shown.mean - add) < 4.5 * shown.standard_error < 0.02 * add


def test_three_positions_are_the_quadrature():
    shown = sums(removed(raised_loss(THREE, 1.0), 0.5, Tilt(3)), 3, 200_000)
    assert abs(shown.mean - three_position_remove(THREE, 0.5)) < 4.5 * shown.standard_error < 0.02 * shown.mean


def test_lines_agree_with_chains():
    loss = raised_loss(GRAM, 5.0)
    shown, other = sums(removed(loss, 1.0, Tilt(6)), 32, 20_000), remove_sums(Copies(loss, 9), 1.0, 80_000, 3)
    assert abs(shown.mean - other.mean) < 4.5 * math.hypot(shown.standard_error, other.standard_error)
    shown, (other, _) = sums(added(loss, 1.0), 32, 20_000), add_sums(loss, 1.0, 80_000, 3)
    assert abs(shown.mean - other.mean) < 4.5 * math.hypot(shown.standard_error, other.standard_error)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_mean_of_the_scales_is_the_moment_over_all_chains(length):
    """E Z_1 ... Z_c, over chains as they are drawn, is E Y^c = the mean over all chains of exp(sums of R)."""
    through = lines(raised_loss(random_gram(5, 3), 1.6))
    R = through.loss.K - np.outer(through.slopes, through.slopes)
    moment = np.mean(
        [
            math.exp(sum(R[i, j] for i, j in itertools.combinations(chain, 2)))
            for chain in itertools.product(range(3), repeat=length)
        ]
    )
    log_v, log_weight = Tilt(length)._draw(through, np.random.default_rng(1), 60_000)
    scales = np.exp(log_weight + length * np.log(np.exp(log_v).mean(axis=1)))
    assert abs(scales.mean() - moment) < 4.5 * scales.std() / math.sqrt(len(scales)) + 1e-9


@given(
    st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 12), st.floats(0.1, 6), st.floats(0.3, 4), st.floats(0, 6)
)
def test_no_weight_is_above_its_bound(seed, b, length, epsilon, scale, strength):
    """At sampled lines, and at lines that are made for it: v large at one position, and chains that stay there."""
    through = lines(raised_loss(random_gram(seed, b, 3), scale))
    chosen = Tilt(length)
    bound = chosen.bound(through, epsilon)
    assert chosen.sample(through, epsilon, np.random.default_rng(seed), 200).max() <= bound
    # p.r = 0 holds for every row of R, and R is the law's covariance: r = strength times a row.
    R = through.loss.K - np.outer(through.slopes, through.slopes)
    log_v = strength * length * R - through.spread / 2
    log_scales = [sum(math.log(np.exp(t * row).mean()) for t in range(length)) for row in R]
    log_Y = np.log(np.exp(log_v).mean(axis=1))
    weights = through.removed(log_v, epsilon, 0.0) * np.exp(np.array(log_scales) - length * log_Y)
    assert weights.max() <= bound


def test_a_planted_bound_of_the_mean_slope_is_caught(monkeypatch):
    """With the mean slope in place of the least and the largest one, some lines have more than their bound."""
    m = np.diag([3.0, 0.2, 0.2, 0.2]) + 0.05
    through = lines(raised_loss(m @ m.T, 1.0))
    log_v = np.array([[6.0, -3.0, -3.0, -3.0]])
    h, log_Y = through.removed(log_v, 1.0, 0.0)[0], math.log(np.exp(log_v).mean())
    low, high = through.slopes.min(), through.slopes.max()
    right, planted = (
        tilt_module._dominated(np.array([log_Y]), 1.0, *range_)[0]
        for range_ in ((low, high), (through.slopes.mean(),) * 2)
    )
    assert h <= right
    assert h > planted


def test_a_planted_weight_above_its_bound_stops_everything():
    found = removed(raised_loss(GRAM, 3.0), 1.0, Tilt(4))
    with pytest.raises(AssertionError, match="proved bound"):
        log_sums(lambda g, n: found.draw(g, n) + 2 * found.bound, found.bound, 0.5 / found.bound, 100, 32, 0, 0)


def test_the_best_tilt_has_nearly_the_least_bound():
    through = lines(raised_loss(GRAM, 5.0))
    bounds = [Tilt(length).bound(through, 1.0) for length in range(1, 40)]
    assert best_tilt(through, 1.0).bound(through, 1.0) <= 1.5 * min(bounds)


# --- add ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0.3, 6))
def test_no_line_has_more_than_the_bound_without_sampling(seed, b, epsilon):
    found = added(raised_loss(random_gram(seed, b, 3), 1.5), epsilon)
    if found is not None:
        assert found.draw(np.random.default_rng(seed), 400).max() <= found.bound


def test_without_a_half_space_there_is_no_bound():
    assert added(raised_loss(3.0 * np.eye(50), 1.0), 0.5) is None


# --- the upper bound ----------------------------------------------------------------------------------


def misses(probability, count, tries, failure, bound_of=upper_bound):
    """How often the bound is below the mean of weights that are 1 with this probability, and 0 otherwise."""
    generator, missed = np.random.default_rng(1), 0
    rate = best_rate((np.arange(1000) < 1000 * probability).astype(float), 1.0, count, failure)[0]

    def draw(given, rows):
        return (generator.random(rows) < probability).astype(float)

    for _ in range(tries):
        logs = log_sums(draw, 1.0, rate, count, 1024, 0, 0, 1)
        missed += bound_of(logs, 1.0, rate, failure) < probability
    return missed / tries


@pytest.mark.parametrize(("probability", "count"), [(0.01, 100), (0.1, 300), (0.5, 50)])
def test_the_bound_covers_the_mean(probability, count):
    assert misses(probability, count, 1500, 0.05) <= 0.05


def test_a_planted_bound_without_margin_is_caught_by_the_coverage():
    def mean(logs, bound, rate, failure):
        """Of weights 0 and 1, from -log(1 - rate w)."""
        return logs.mean / -math.log1p(-rate)

    assert misses(0.1, 300, 300, 0.05, mean) > 0.3


@given(st.floats(1e-3, 0.999), st.floats(0, 1), st.integers(2, 500))
def test_the_bound_of_constant_weights_is_above_them(rate, weight, count):
    logs = log_sums(lambda g, n: np.full(n, weight), 1.0, rate, count, 8, 0, 0, 1)
    assert upper_bound(logs, 1.0, rate, 1e-3) >= weight


def test_the_bound_closes_in_on_the_mean():
    samples = np.random.default_rng(0).random(4000) ** 3
    bounds = [best_rate(samples, 1.0, count, 1e-9)[1] for count in (10**2, 10**4, 10**6)]
    assert bounds[0] > bounds[1] > bounds[2] > samples.mean()
    assert bounds[2] < 1.01 * samples.mean()


# --- estimates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_an_estimate_for_one_position_is_exact(epsilon):
    found = estimate(np.array([[1.0]]), epsilon, 1e-6)
    assert found.sigma == pytest.approx(gaussian_sigma(epsilon, 1e-6), rel=2e-5)  # steps end there


def test_equal_positions_are_one_position():
    assert estimate(np.full((5, 5), 1.0), 1.0, 1e-6).sigma == pytest.approx(gaussian_sigma(1.0, 1e-6), rel=2e-5)


def test_the_posterior_is_the_derivative():
    """d log delta / d G_ij is proportional to T_ij: along a direction D, as sigma changes."""
    found = estimate(GRAM, 1.0, 1e-5, samples=2**12, posterior=True)
    T = found.posterior
    assert T.min() >= 0
    np.testing.assert_allclose(T, T.T, rtol=1e-12)
    assert T.sum() == pytest.approx(1)
    base = (T * GRAM).sum()
    for D in (np.eye(32), np.ones((32, 32))):
        step = 0.02 * base / (T * D).sum()
        moved = estimate(GRAM + step * D, 1.0, 1e-5, samples=2**12)
        predicted = math.log((T * (GRAM + step * D)).sum() / base) / 2
        error = 3 * math.hypot(found.relative_standard_error, moved.relative_standard_error)
        assert math.log(moved.sigma / found.sigma) == pytest.approx(predicted, abs=0.1 * predicted + error)


@settings(max_examples=3)
@given(st.integers(0, 1000), st.floats(0.2, 2))
def test_positions_may_come_in_any_order(seed, epsilon):
    gram = random_gram(seed, 5)
    order = np.random.default_rng(seed).permutation(5)
    found, other = (estimate(g, epsilon, 1e-5, samples=256) for g in (gram, gram[np.ix_(order, order)]))
    error = 5 * math.hypot(found.relative_standard_error, other.relative_standard_error) + 1e-3
    assert math.log(found.sigma / other.sigma) == pytest.approx(0, abs=error)
