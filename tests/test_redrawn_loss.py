"""Bins redrawn every epoch: the likelihood ratio, the copies and the half space, against every choice of positions."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from bandmf.accounting.bins.estimate import estimate as fixed_estimate
from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.min_separation.copies import TooLittleNoiseError
from bandmf.accounting.min_separation.half_space import half_space
from bandmf.accounting.redrawn import estimate, privacy_loss
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.divergences import add_sums, best_copies, closed_add, remove_sums
from bandmf.accounting.samples import generator
from bandmf.optimize import banded_toeplitz
from bandmf.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Dense, Identity, Scaled
from bins_oracles import TWO, gaussian_sigma, two_position_deltas
from chance import RARE
from redrawn_oracles import all_cut_means, all_means, all_sets, log_likelihood, moment, plain_deltas, posterior
from test_min_separation_loss import log_likelihoods, random_banded

SIGMA = 0.8
WIDE = {
    "blt": BufferedToeplitz(scales=[0.3, 0.1], decays=[0.8, 0.4], steps=8),
    "inverse": BandedInverse([1, -0.5, -0.2], 8),
    "scaled": Scaled(BufferedToeplitz(scales=[0.4], decays=[0.6], steps=8), np.linspace(2, 0.3, 8)),
    "scaled_bands": Scaled(BandedToeplitz([1.0, -0.6], 8), np.linspace(2, 0.3, 8)),
    "dense": Dense(np.tril(np.random.default_rng(3).normal(size=(8, 8))) * 0.3 + np.eye(8)),
}


# --- L ------------------------------------------------------------------------------------------------


def worst_difference(loss, means):
    """Between log L by the transfer and over all sets of steps, at some outputs."""
    x = np.random.default_rng(1).standard_normal((loss.steps, 6)) + np.linspace(-1, 2, 6)
    expected = [log_likelihood(means, column) for column in x.T]
    return float(np.abs(log_likelihoods(loss, x) - expected).max())


@settings(deadline=None, max_examples=60)
@given(steps=st.integers(1, 9), data=st.data())
def test_the_transfer_is_the_sum_over_all_positions(steps, data):
    """The last epoch may have fewer steps, columns up to cycle + 1 entries, of both signs."""
    cycle = data.draw(st.integers(max(1, steps // 4), steps))
    C = random_banded(steps, steps, data.draw(st.integers(1, min(steps, cycle + 1))))
    assert worst_difference(privacy_loss(C, SIGMA, cycle), all_means(C.materialize(), SIGMA, cycle)) < 1e-11


def transposed(loss, C):
    return dataclasses.replace(loss, crossings=tuple(crossing.T for crossing in loss.crossings))


def lost(loss, C):
    return dataclasses.replace(loss, crossings=tuple(np.ones_like(crossing) for crossing in loss.crossings))


def signed(loss, C):
    X = (C.materialize() / SIGMA).T @ (C.materialize() / SIGMA)
    cut = [(e * 3, (e + 1) * 3, slice((e + 1) * 3, (e + 2) * 3)) for e in range(2)]
    return dataclasses.replace(loss, crossings=tuple(np.exp(-X[begin:end, then])[-2:, :2] for begin, end, then in cut))


def late(loss, C):
    return dataclasses.replace(loss, squares=np.roll(loss.squares, 1))


@pytest.mark.parametrize("fault", [transposed, lost, signed, late])
def test_planted_errors_in_the_transfer_are_caught(fault):
    C = random_banded(4, 9, 3)
    loss, means = privacy_loss(C, SIGMA, 3), all_means(C.materialize(), SIGMA, 3)
    assert worst_difference(loss, means) < 1e-11
    assert worst_difference(fault(loss, C), means) > 1e-4


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("cycle", [2, 3, 7])
def test_longer_columns_are_replaced_by_larger_ones(name, cycle):
    """What is computed is the law of the replaced columns, and no entry of any m_S got smaller."""
    C = WIDE[name].materialize()
    cut = all_cut_means(C, SIGMA, cycle)
    assert (cut >= all_means(C, SIGMA, cycle) * (1 - 1e-12)).all()
    assert worst_difference(privacy_loss(WIDE[name], SIGMA, cycle), cut) < 1e-11


def test_no_column_is_below_the_exact_one():
    C = random_banded(5, 40, 4)
    loss = privacy_loss(C, 0.7, 10)
    assert (loss.columns >= np.abs(C.columns()) / 0.7).all()
    assert (loss.columns <= np.abs(C.columns()) / 0.7 * (1 + 1e-12)).all()


def test_long_runs_neither_overflow_nor_lose_digits():
    """Against the same transfer on logarithms, far out where L is e^500."""
    loss = privacy_loss(BandedToeplitz([1.0, 0.7, 0.4], steps=400), 0.5, 8)
    x = np.random.default_rng(0).standard_normal((400, 2)) + np.array([4.0, -4.0])
    E = (loss.products(x)[:-1] - (loss.squares / 2)[:, None]).reshape(50, 8, 2)
    overlaps = np.zeros((49, 8, 8))
    overlaps[:, -2:, :2] = loss.overlaps
    f = E[-1]
    for e in range(48, -1, -1):
        f = E[e] + special.logsumexp(f[None] - overlaps[e][:, :, None], axis=1) - math.log(8)
    expected = special.logsumexp(f, axis=0) - math.log(8)
    assert expected[0] > 500
    np.testing.assert_allclose(log_likelihoods(loss, x), expected, rtol=0, atol=loss.rounding(100))


@pytest.mark.parametrize(("steps", "cycle", "bands"), [(8, 3, 3), (9, 3, 4), (6, 6, 2), (5, 1, 2), (7, 3, 1)])
def test_the_posterior_is_the_one_over_all_sets_and_gives_the_gradient(steps, cycle, bands):
    C, x = random_banded(3, steps, bands), np.random.default_rng(2).standard_normal(steps)
    loss = privacy_loss(C, SIGMA, cycle)
    log_likelihood_, taken = loss.posterior(x)
    assert log_likelihood_ == pytest.approx(log_likelihoods(loss, x[:, None])[0], abs=1e-12)
    np.testing.assert_allclose(taken[:steps], posterior(C.materialize(), SIGMA, cycle, x), atol=1e-12)
    gradient, h = loss.means(taken[:, None])[:, 0], 1e-5
    moved = [
        (log_likelihoods(loss, (x + h * e)[:, None]) - log_likelihoods(loss, (x - h * e)[:, None]))[0]
        for e in np.eye(steps)
    ]
    np.testing.assert_allclose(gradient, np.array(moved) / (2 * h), atol=1e-8)


def test_the_posterior_of_longer_columns_gives_the_gradient():
    loss, x, h = privacy_loss(WIDE["blt"], SIGMA, 3), np.random.default_rng(2).standard_normal(8), 1e-5
    gradient = loss.means(loss.posterior(x)[1][:, None])[:, 0]
    for i, e in enumerate(np.eye(8)):
        up, down = (log_likelihoods(loss, (x + sign * h * e)[:, None])[0] for sign in (1, -1))
        assert gradient[i] == pytest.approx((up - down) / (2 * h), abs=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Identity(8), 0.0, 2), "sigma=0.0"),
        ((Identity(8), 1.0, 9), "cycle=9.*steps=8"),
        ((Identity(8), 1.0, 0), "cycle=0"),
        ((Identity(8), 1e-3, 2), "sigma is far from any use"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        privacy_loss(*arguments)


# --- copies -------------------------------------------------------------------------------------------


def kept_share(proposal, rows=10_000):
    return len(proposal.draw(generator(0, 0, 0), rows)[0]) / rows


@pytest.mark.parametrize(
    ("steps", "cycle", "bands", "copies"),
    [(6, 3, 2, 2), (6, 3, 4, 3), (5, 2, 3, 4), (4, 4, 3, 3), (7, 3, 3, 3), (4, 1, 2, 3), (6, 2, 1, 5)],
)
def test_as_many_copies_are_kept_as_the_moment_says(steps, cycle, bands, copies):
    """The share that is kept, times E F, is E L^q: all tuples of sets one by one."""
    C, rows = random_banded(steps, steps, bands), 20_000
    proposal = Copies(privacy_loss(C, 2.0, cycle), copies)
    share = kept_share(proposal, rows)
    expected = moment(all_means(C.materialize(), 2.0, cycle), copies) / math.exp(proposal.log_scale)
    assert expected < 1 + 1e-9
    assert share == pytest.approx(expected, abs=5 * math.sqrt(share * (1 - share) / rows) + 1e-9)


def test_for_longer_columns_too():
    proposal = Copies(privacy_loss(WIDE["blt"], 2.0, 3), 3)
    share = kept_share(proposal)
    expected = moment(all_cut_means(WIDE["blt"].materialize(), 2.0, 3), 3) / math.exp(proposal.log_scale)
    assert share == pytest.approx(expected, abs=5 * math.sqrt(share * (1 - share) / 10_000) + 1e-9)


def tuple_law(means, sets, copies, steps, attract=1.0):
    """{how many copies take part in each step: its probability}."""
    law, pairs = {}, means @ means.T
    for some in itertools.product(range(len(means)), repeat=copies):
        chance = math.exp(attract * sum(pairs[r, s] for r, s in itertools.combinations(some, 2)))
        counts = tuple(sum(step in sets[r] for r in some) for step in range(steps))
        law[counts] = law.get(counts, 0.0) + chance
    total = sum(law.values())
    return {counts: chance / total for counts, chance in law.items()}


def fits(proposal, law, rows):
    """Whether the copies that are kept have this law: chi-square, rare ones together."""
    _, drawn, _ = proposal.draw(generator(1, 0, 0), rows)
    cycle, steps = proposal.loss.cycle, proposal.loss.steps
    counts = [(drawn[:, :, step // cycle] == step % cycle).sum(axis=0) for step in range(steps)]
    keys, seen = np.unique(np.array(counts).T, axis=0, return_counts=True)
    found = {tuple(key): int(count) for key, count in zip(keys.tolist(), seen, strict=True)}
    assert set(found) <= set(law)
    total = sum(found.values())
    often = [key for key, chance in law.items() if chance * total >= 10]
    expected = total * np.array([*(law[key] for key in often), 1 - sum(law[key] for key in often)])
    got = [found.get(key, 0) for key in often]
    got = np.array([*got, total - sum(got)])
    statistic = ((got - expected) ** 2 / np.maximum(expected, 1)).sum()
    return bool(stats.chi2.sf(statistic, len(often)) > RARE)


@pytest.mark.parametrize(("steps", "cycle", "bands", "copies"), [(6, 3, 3, 3), (5, 3, 4, 3), (4, 2, 1, 4)])
def test_copies_are_drawn_as_often_as_their_weights_say(steps, cycle, bands, copies):
    C, sets = random_banded(steps, steps, bands), all_sets(steps, cycle)
    means, proposal = all_means(C.materialize(), 1.5, cycle), Copies(privacy_loss(C, 1.5, cycle), copies)
    assert fits(proposal, tuple_law(means, sets, copies, steps), 20_000)
    for planted in (0.0, 0.9):  # no attraction, or a little less
        assert not fits(proposal, tuple_law(means, sets, copies, steps, planted), 100_000)


@pytest.mark.parametrize(("cycle", "bands", "epsilon"), [(1, 1, 1.0), (4, 3, 0.5), (5, 6, 1.0), (12, 5, 1.0)])
def test_no_weight_is_above_its_bound(cycle, bands, epsilon):
    loss = privacy_loss(random_banded(bands, 12, bands), 2.5, cycle)
    for copies in (2, 3, 5):
        proposal = Copies(loss, copies)
        weights = proposal.sample(epsilon, generator(copies, 0, 0), 4000)
        assert weights.max() <= proposal.bound(epsilon)
    best = best_copies(loss, epsilon)  # nor is the bound idle
    assert best.sample(epsilon, generator(0, 0, 0), 4000).max() > 0.3 * best.bound(epsilon)


def test_moments_that_overflow_are_refused():
    with pytest.raises(TooLittleNoiseError, match="copies=200"):
        Copies(privacy_loss(BandedToeplitz([1.0, 0.5], steps=12), 0.5, 4), 200)


@pytest.mark.parametrize("near", [2, 7, 250])
def test_the_best_number_of_copies_has_the_least_bound(near):
    loss = privacy_loss(BandedToeplitz([1.0, 0.5, 0.2], steps=32), 1.9, 8)
    bounds = {copies: Copies(loss, copies).bound(2.0) for copies in range(2, 20)}
    assert best_copies(loss, 2.0, near).copies == min(bounds, key=bounds.__getitem__)


# --- both divergences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.5, 2.0])
def test_one_epoch_of_two_steps_has_the_divergences_of_the_quadrature(epsilon):
    """Two positions with the Gram matrix of the reference: redrawn once is drawn once."""
    C = np.linalg.cholesky(TWO[::-1, ::-1]).T[::-1, ::-1]
    np.testing.assert_allclose(C.T @ C, TWO, atol=1e-12)
    remove, add = two_position_deltas(TWO, epsilon)
    loss = privacy_loss(Dense(C), 1.0, 2)
    for copies in (2, 3):
        sums = remove_sums(Copies(loss, copies), epsilon, 2**16, 3)
        assert sums.mean == pytest.approx(remove, abs=4 * sums.standard_error)
        assert sums.standard_error < 0.01 * remove
    sums, bound = add_sums(loss, epsilon, 2**16, 3)
    assert sums.mean == pytest.approx(add, abs=4 * sums.standard_error)
    assert sums.standard_error < 0.02 * add
    assert sums.largest <= bound
    assert closed_add(loss, epsilon) > add


@pytest.mark.parametrize(("steps", "cycle", "bands", "epsilon"), [(6, 3, 3, 0.7), (8, 3, 4, 1.0), (6, 2, 2, 1.5)])
def test_divergences_are_those_of_plain_sampling_over_all_positions(steps, cycle, bands, epsilon):
    C = random_banded(steps + 1, steps, bands)
    loss, means = privacy_loss(C, 1.8, cycle), all_means(C.materialize(), 1.8, cycle)
    for (truth, error), sums in zip(
        plain_deltas(means, epsilon, 200_000, 4),
        (remove_sums(best_copies(loss, epsilon), epsilon, 2**15, 2), add_sums(loss, epsilon, 2**15, 2)[0]),
        strict=True,
    ):
        both = math.hypot(error, sums.standard_error)
        assert sums.mean == pytest.approx(truth, abs=4 * both)
        assert both < 0.03 * truth


@pytest.mark.parametrize("fault", [lost, signed])
def test_planted_errors_move_the_divergence(fault):
    """Sums for a law with the error are not those of plain sampling."""
    C, epsilon = BandedToeplitz([1.0, -0.9, 0.8], steps=9, normalize_columns=False), 1.0
    loss, means = privacy_loss(C, 2.5, 3), all_means(C.materialize(), 2.5, 3)
    (truth, error), _ = plain_deltas(means, epsilon, 150_000, 4)
    right, wrong = (remove_sums(Copies(one, 3), epsilon, 2**15, 2) for one in (loss, fault(loss, C)))
    assert right.mean == pytest.approx(truth, abs=4 * math.hypot(error, right.standard_error))
    assert abs(wrong.mean - truth) > 6 * math.hypot(error, wrong.standard_error)


def test_the_log_likelihood_is_above_the_tangent_everywhere():
    loss, epsilon = privacy_loss(random_banded(1, 30, 3), 2.0, 6), 4.0
    side = half_space(loss, epsilon)
    x = np.random.default_rng(0).standard_normal((30, 4000)) * np.linspace(0.1, 8, 4000)
    tangent = side.steepness * (side.positions @ x / side.steepness + side.distance) - epsilon
    above = log_likelihoods(loss, x) - tangent
    assert above.min() >= 0
    touching = -side.distance / side.steepness * side.positions
    assert log_likelihoods(loss, touching[:, None])[0] == pytest.approx(-epsilon, abs=0.01)


# --- the estimate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (4.0, 1e-8), (16.0, 1e-5)])
def test_without_a_choice_sigma_is_that_of_the_gaussian_mechanism(epsilon, delta):
    found = estimate(Identity(4), 1, epsilon, delta, samples=2**12)
    truth = 2 * gaussian_sigma(epsilon, delta)
    assert found.sigma == pytest.approx(truth, rel=4 * found.relative_standard_error)
    assert found.relative_standard_error < 3e-3
    assert found.add == pytest.approx(delta, rel=0.1)


def test_in_one_epoch_sigma_is_that_of_fixed_bins():
    C = BandedToeplitz([1.0, 0.6, 0.3], steps=16)
    fixed, found = fixed_estimate(gram_matrix(C, 16), 2.0, 1e-5), estimate(C, 16, 2.0, 1e-5, samples=2**13)
    error = math.hypot(fixed.relative_standard_error, found.relative_standard_error)
    assert found.sigma == pytest.approx(fixed.sigma, rel=4 * error)
    assert error < 3e-3


def test_the_posterior_tells_how_sigma_depends_on_the_strategy():
    """By finite differences: the same change of sigma as the sum of T times the change of |C|'C|."""
    theta, cycle = np.array([1.0, 0.6, 0.3]), 8

    def found(theta, posterior=False):
        C = BandedToeplitz(theta, 32, normalize_columns=False)
        return estimate(C, cycle, 2.0, 1e-4, samples=2**15, posterior=posterior)

    here = found(theta, posterior=True)
    assert here.posterior.shape == (32, 16)
    assert here.posterior[:8, 0].sum() <= 1
    T = np.zeros((32, 32))
    for r in range(16):
        T += np.diag(here.posterior[: 32 - r, r], r)
    T += np.triu(T, 1).T

    def local(theta):
        C = BandedToeplitz(theta, 32, normalize_columns=False).materialize()
        return (T * (C.T @ C)).sum()

    for r in range(3):
        changed = theta + 0.1 * np.eye(3)[r]
        ratio = found(changed).sigma / here.sigma
        assert ratio == pytest.approx(math.sqrt(local(changed) / local(theta)), rel=0.01)
        assert abs(ratio - 1) > 0.02


@pytest.mark.parametrize(
    ("epsilon", "bands", "sigma", "error"),
    [
        (8.0, 64, 1.16304, 8e-4),
        pytest.param(4.0, 32, 1.60948, 9e-4, marks=pytest.mark.long),
        pytest.param(1.0, 16, 4.07064, 7e-4, marks=pytest.mark.long),
    ],
)
def test_sigma_of_the_best_toeplitz_strategy_is_that_of_another_program(epsilon, bands, sigma, error):
    """1024 steps, 8 epochs, delta 1e-6. The other program: dense matrices and a mixture of shifts, 20,000 samples."""
    theta = np.array(banded_toeplitz(1024, bands, normalize_columns=False).strategy.coefficients)
    C = BandedToeplitz(theta / np.linalg.norm(theta), 1024, normalize_columns=False)
    found = estimate(C, 128, epsilon, 1e-6, samples=2**12)
    assert found.sigma == pytest.approx(sigma, rel=4 * math.hypot(error, found.relative_standard_error))
    assert found.relative_standard_error < 2e-3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 16))])
def test_sigma_of_random_settings_is_never_too_small(seed):
    """Plain sampling over all positions, at the estimated sigma; where columns are longer than an epoch, at most it."""
    dice = np.random.default_rng(seed)
    cycle, epsilon, delta = int(dice.integers(2, 5)), float(dice.uniform(0.5, 4)), 10.0 ** dice.uniform(-2.5, -1.5)
    steps = cycle * int(dice.integers(1, 4)) + int(dice.integers(0, 2))
    bands = int(dice.integers(1, steps + 1))
    C = Scaled(random_banded(seed, steps, bands), np.linspace(1, dice.uniform(0.3, 1), steps))
    found = estimate(C, cycle, epsilon, delta, samples=2**14)
    means = all_means(C.materialize(), found.sigma, cycle)
    (remove, error), (add, add_error) = plain_deltas(means, epsilon, 400_000, seed)
    room = 4 * math.hypot(error, found.relative_standard_error * abs(found.slope) * delta)
    assert max(remove - room, add - 4 * add_error) <= delta
    if bands <= cycle + 1 and found.add <= 0.9 * delta:
        assert remove >= delta - room
    assert room < 0.25 * delta
