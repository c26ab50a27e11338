"""The likelihood ratio of b-min-sep sampling, the copies and the half space: against every set of steps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from bandmf.accounting.bins.gram import gram_matrix
from bandmf.accounting.min_separation import privacy_loss
from bandmf.accounting.min_separation.copies import Copies, most_copies
from bandmf.accounting.min_separation.divergences import add_sums, best_copies, remove_sums
from bandmf.accounting.min_separation.half_space import closed_bound, half_space, log_never
from bandmf.accounting.samples import generator
from bandmf.strategies import Banded, BandedToeplitz, Identity, banded_inverse_square_root
from bins_oracles import moment as bins_moment
from chance import RARE
from min_separation_oracles import likelihood, mean_of, moment, step_sets, two_step_deltas


def random_banded(seed, steps, bands):
    """With entries of both signs."""
    dice = np.random.default_rng(seed)
    columns = dice.standard_normal((steps, bands)) / 2
    columns[:, 0] = 1
    columns[np.add.outer(np.arange(steps), np.arange(bands)) >= steps] = 0
    return Banded(columns)


def log_likelihoods(loss, x):
    return loss.log_likelihoods(loss.products(np.ascontiguousarray(x)))


# --- L ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warm", "reference"), [(False, 0.92397989), (True, 0.83293984)])
def test_the_privacy_loss_of_an_output_is_the_reference(warm, reference):
    C = BandedToeplitz([1.0, 0.5], steps=3, normalize_columns=False)
    found = log_likelihoods(privacy_loss(C, 1.0, 2, 0.5, warm=warm), np.ones((3, 1)))
    assert found == pytest.approx(reference, abs=1e-8)


def worst_difference(strategy, separation, probability, warm, recursion):
    """Between log L by a recursion and over all sets of steps, at some outputs."""
    sets = step_sets(strategy.steps, separation, probability, warm)
    x = np.random.default_rng(1).standard_normal((strategy.steps, 5)) + 1
    expected = [math.log(likelihood(strategy.materialize(), 0.8, sets, column)) for column in x.T]
    return float(np.abs(log_likelihoods(recursion, x / 0.8) - expected).max())


@settings(deadline=None, max_examples=60)
@given(
    steps=st.integers(1, 9),
    separation=st.integers(1, 12),
    probability=st.sampled_from([0.02, 0.5, 1.0]),
    warm=st.booleans(),
    data=st.data(),
)
def test_the_recursion_is_the_sum_over_all_sets_of_steps(steps, separation, probability, warm, data):
    C = random_banded(steps, steps, data.draw(st.integers(1, min(steps, separation))))
    loss = privacy_loss(C, 0.8, separation, probability, warm=warm)
    assert worst_difference(C, separation, probability, warm, loss) < 1e-10


@pytest.mark.parametrize("fault", ["cold", "separation", "probability", "signs", "sigma"])
def test_planted_errors_in_the_recursion_are_caught(fault):
    C = random_banded(2, 8, 3)
    given = {"sigma": 0.8, "separation": 3, "probability": 0.3}
    changes = {"cold": {"warm": False}, "separation": {"separation": 4}, "probability": {"probability": 0.31}}
    changes |= {"sigma": {"sigma": 0.81}, "signs": {}}
    loss = privacy_loss(C, **{**given, **changes[fault]})
    if fault == "signs":
        signed = Banded(np.where(C.columns() < 0, 1e-9, C.columns()))  # negative entries left out
        loss = privacy_loss(signed, **given)
    assert worst_difference(C, 3, 0.3, True, loss) > 1e-4


def test_products_are_those_of_the_matrix():
    C, dice = random_banded(5, 150, 7), np.random.default_rng(0)
    loss, x = privacy_loss(C, 2.0, 9, 0.1), dice.standard_normal((150, 3))
    A = np.abs(C.materialize()) / 2
    np.testing.assert_allclose(loss.products(x), A.T @ x, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(loss.means(x), A @ x, rtol=1e-12, atol=1e-13)


def test_no_column_is_below_the_exact_one():
    C = random_banded(5, 40, 4)
    assert (privacy_loss(C, 0.7, 4, 0.1).columns >= np.abs(C.columns()) / 0.7).all()


def test_long_runs_neither_overflow_nor_lose_digits():
    """Against the same recursion on logarithms, far out where L is e^400."""
    loss = privacy_loss(BandedToeplitz([1.0, 0.7], steps=400), 0.7, 4, 0.3)
    x = np.random.default_rng(0).standard_normal((400, 2)) + np.array([3.0, -3.0])
    odds = loss.products(x) - loss.norms[:, None] / 2 + math.log(0.3)
    f = np.zeros((404, 2))
    for i in range(399, -1, -1):
        f[i] = np.logaddexp(math.log(0.7) + f[i + 1], odds[i] + f[i + 4])
    expected = special.logsumexp(f[:4], b=loss.start[:, None], axis=0)
    assert expected[0] > 200
    np.testing.assert_allclose(log_likelihoods(loss, x), expected, rtol=0, atol=loss.rounding(60))


def test_the_posterior_is_the_one_over_all_sets_and_gives_the_gradient():
    C, dice = random_banded(3, 8, 2), np.random.default_rng(2)
    loss, sets, x = privacy_loss(C, 0.8, 3, 0.4), step_sets(8, 3, 0.4), dice.standard_normal(8)
    log_likelihood, taking_part = loss.posterior(x)
    outputs = 0.8 * x  # of C x + z
    weights = {steps: likelihood(C.materialize(), 0.8, {steps: chance}, outputs) for steps, chance in sets.items()}
    total = sum(weights.values())
    assert log_likelihood == pytest.approx(math.log(total), abs=1e-10)
    for step in range(8):
        share = sum(weight for steps, weight in weights.items() if step in steps) / total
        assert taking_part[step] == pytest.approx(share, abs=1e-10)
    gradient = loss.means(taking_part[:, None])[:, 0]
    h = 1e-5
    moved = [
        (log_likelihoods(loss, (x + h * e)[:, None]) - log_likelihoods(loss, (x - h * e)[:, None]))[0]
        for e in np.eye(8)
    ]
    np.testing.assert_allclose(gradient, np.array(moved) / (2 * h), atol=1e-8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((Identity(8), 0.0, 2, 0.5), "sigma=0.0"),
        ((Identity(8), 1.0, 0, 0.5), "separation=0"),
        ((Identity(8), 1.0, 2, 1.5), "probability=1.5"),
        ((Identity(8), 1e-3, 2, 0.5), "sigma is far from any use"),
        ((BandedToeplitz([1, 0.5, 0.2], 8), 1.0, 2, 0.5), "separation=2: must be at least the strategy's bands=3"),
        ((banded_inverse_square_root(8, 2), 1.0, 4, 0.5), "separation=4.*balls-in-bins"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        privacy_loss(*given)


# --- copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "separation", "bands", "copies"), [(5, 2, 2, 2), (4, 2, 1, 4), (5, 3, 3, 3), (4, 6, 2, 3), (4, 1, 1, 3)]
)
@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_the_moment_is_the_sum_over_all_tuples_of_sets(steps, separation, bands, copies, probability):
    C = random_banded(steps, steps, bands)
    found = Copies(privacy_loss(C, 1.3, separation, probability), copies).log_moment
    sets = step_sets(steps, separation, probability)
    assert found == pytest.approx(math.log(moment(C.materialize(), 1.3, sets, copies)), abs=1e-10)


@pytest.mark.parametrize("copies", [2, 5, 40])
def test_without_separation_the_moment_is_that_of_poisson_sampling(copies):
    """q copies of each step on its own: in closed form (Mironov, Talwar, Zhang 2019)."""
    p, sigma, j = 0.1, 3.0, np.arange(copies + 1)
    each = special.comb(copies, j) * p**j * (1 - p) ** (copies - j) * np.exp(j * (j - 1) / 2 / sigma**2)
    found = Copies(privacy_loss(Identity(30), sigma, 1, p), copies).log_moment
    assert found == pytest.approx(30 * math.log(each.sum()), rel=1e-9)


def test_with_probability_one_the_moment_is_that_of_balls_in_bins():
    C = BandedToeplitz([1.0, 0.6, 0.3], steps=20)
    found = Copies(privacy_loss(C, 2.0, 4, 1.0), 3).log_moment
    assert found == pytest.approx(math.log(bins_moment(gram_matrix(C, 4) / 4, 1.0, 2)), rel=1e-8)


def tuple_law(C, sigma, sets, copies, attract=1.0):
    """{how many copies join at each step: its probability}."""
    law = {}
    for some in itertools.product(sets, repeat=copies):
        means = [mean_of(C, taken) for taken in some]
        pairs = sum(one @ other for one, other in itertools.combinations(means, 2))
        chance = math.prod(sets[taken] for taken in some) * math.exp(attract * pairs / sigma**2)
        counts = tuple(sum(step in taken for taken in some) for step in range(len(C)))
        law[counts] = law.get(counts, 0.0) + chance
    total = sum(law.values())
    return {counts: chance / total for counts, chance in law.items()}


def fits(proposal, law, rows=20_000):
    """Whether the drawn counts have this law: chi-square, rare ones together."""
    drawn = proposal.joined(generator(1, 0, 0), rows).T.astype(int)
    keys, counts = np.unique(drawn, axis=0, return_counts=True)
    seen = {tuple(key): int(count) for key, count in zip(keys.tolist(), counts, strict=True)}
    assert set(seen) <= set(law)
    often = [key for key, chance in law.items() if chance * rows >= 10]
    expected = rows * np.array([*(law[key] for key in often), 1 - sum(law[key] for key in often)])
    found = [seen.get(key, 0) for key in often]
    found = np.array([*found, rows - sum(found)])
    statistic = ((found - expected) ** 2 / np.maximum(expected, 1)).sum()
    return bool(stats.chi2.sf(statistic, len(often)) > RARE)


@pytest.mark.parametrize(("steps", "separation", "bands", "copies"), [(5, 2, 2, 3), (4, 3, 2, 4), (4, 1, 1, 3)])
def test_copies_are_drawn_as_often_as_their_weights_say(steps, separation, bands, copies):
    C, sets = random_banded(steps, steps, bands), step_sets(steps, separation, 0.3)
    proposal = Copies(privacy_loss(C, 1.3, separation, 0.3), copies)
    assert fits(proposal, tuple_law(C.materialize(), 1.3, sets, copies))
    for planted in (0.0, 0.95):  # no attraction, or a little less
        assert not fits(proposal, tuple_law(C.materialize(), 1.3, sets, copies, planted), 60_000)


@pytest.mark.parametrize(
    ("separation", "bands", "probability", "epsilon"), [(1, 1, 0.3, 1.0), (3, 2, 0.2, 0.5), (5, 5, 1.0, 1.0)]
)
def test_no_weight_is_above_its_bound(separation, bands, probability, epsilon):
    loss = privacy_loss(random_banded(bands, 12, bands), 1.5, separation, probability)
    for copies in (2, 3, 5):
        proposal = Copies(loss, copies)
        weights = proposal.sample(epsilon, generator(copies, 0, 0), 4000)
        assert weights.max() <= proposal.bound(epsilon)
    best = best_copies(loss, epsilon)  # nor is the bound idle
    assert best.sample(epsilon, generator(0, 0, 0), 4000).max() > 0.4 * best.bound(epsilon)


def test_tables_that_are_too_large_are_refused():
    loss = privacy_loss(Identity(1024), 1.0, 64, 0.1)
    assert most_copies(64, 1024) == 3
    with pytest.raises(ValueError, match=r"copies=4.*separation=64"):
        Copies(loss, 4)


# --- both divergences -------------------------------------------------------------------------------------

TWO = Banded([[1.0, -0.5], [1.2, 0.0]])


@pytest.mark.parametrize(("probability", "sigma", "epsilon"), [(0.9, 1.5, 0.5), (0.95, 1.0, 1.0)])
def test_two_steps_have_the_divergences_of_the_quadrature(probability, sigma, epsilon):
    remove, add = two_step_deltas(TWO.materialize(), sigma, probability, epsilon)
    loss = privacy_loss(TWO, sigma, 2, probability)
    for copies in (2, 3):
        sums = remove_sums(Copies(loss, copies), epsilon, 2**16, 3)
        assert sums.mean == pytest.approx(remove, abs=4 * sums.standard_error)
        assert sums.standard_error < 0.01 * remove
    sums, bound = add_sums(loss, epsilon, 2**16, 3)
    assert sums.mean == pytest.approx(add, abs=4 * sums.standard_error)
    assert sums.standard_error < 0.02 * add
    assert sums.largest <= bound
    assert closed_bound(loss, epsilon) > add


def test_without_separation_delta_is_that_of_the_accountant():
    """Poisson sampling, 256 steps: dp_accounting's PLD."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(1 / 32, GaussianDpEvent(0.9)), 256)
    truth = accountant.get_delta(2.0)
    assert truth == pytest.approx(5.765e-3, rel=1e-3)
    sums = remove_sums(best_copies(privacy_loss(Identity(256), 0.9, 1, 1 / 32), 2.0), 2.0, 2**13, 1)
    assert sums.mean == pytest.approx(truth, abs=4 * sums.standard_error + 1e-3 * truth)
    assert sums.standard_error < 0.02 * truth


def test_divergences_are_those_of_plain_sampling():
    """remove = E_P (1 - e^epsilon / L)+ and add = E_Q (1 - e^epsilon L)+, without any proposal."""
    C, b, p, epsilon = BandedToeplitz([1.0, 0.5, 0.3, 0.2], steps=40), 4, 0.3, 1.0
    loss, dice, rows = privacy_loss(C, 2.5, b, p), np.random.default_rng(8), 60_000
    wait, counts = dice.choice(b, rows, p=loss.start), np.zeros((40, rows))
    for step in range(40):
        joins = (wait == 0) & (dice.random(rows) < p)
        counts[step] = joins
        wait = np.where(joins, b - 1, np.maximum(wait - 1, 0))
    noise = dice.standard_normal((40, rows))
    removed = np.maximum(0, -np.expm1(epsilon - log_likelihoods(loss, loss.means(counts) + noise)))
    added = np.maximum(0, -np.expm1(epsilon + log_likelihoods(loss, noise)))
    for samples, sums in (
        (removed, remove_sums(best_copies(loss, epsilon), epsilon, 2**14, 2)),
        (added, add_sums(loss, epsilon, 2**14, 2)[0]),
    ):
        error = math.hypot(samples.std() / math.sqrt(rows), sums.standard_error)
        assert sums.mean == pytest.approx(samples.mean(), abs=4 * error)
        assert error < 0.05 * sums.mean


def test_the_log_likelihood_is_above_the_tangent_everywhere():
    loss, epsilon = privacy_loss(random_banded(1, 30, 3), 2.0, 4, 0.3), 2.0
    side = half_space(loss, epsilon)
    x = np.random.default_rng(0).standard_normal((30, 4000)) * np.linspace(0.1, 8, 4000)
    tangent = side.steepness * (side.positions @ x / side.steepness + side.distance) - epsilon
    above = log_likelihoods(loss, x) - tangent
    assert above.min() >= 0
    touching = -side.distance / side.steepness * side.positions
    assert log_likelihoods(loss, touching[:, None])[0] == pytest.approx(-epsilon, abs=0.01)


def test_where_an_example_often_never_takes_part_nothing_is_added():
    loss = privacy_loss(Identity(10), 0.5, 3, 0.05)
    never = step_sets(10, 3, 0.05)[()]
    assert log_never(loss) == pytest.approx(math.log(never), rel=1e-12)
    assert closed_bound(loss, -math.log(never) + 0.01) == 0
    assert closed_bound(loss, -math.log(never) - 0.01) > 0
    assert log_never(privacy_loss(Identity(10), 0.5, 3, 1.0)) == -math.inf
