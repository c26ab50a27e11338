"""Strategies for balls-in-bins: Gram matrices, gradients and the search, each against its definition."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from bandmf import optimize, strategies, workloads
from bandmf.error import mean_squared_error
from bandmf.optimize import Outcome, optimize_for_bins
from bandmf.optimize.bins import gram as bin_gram
from bandmf.optimize.bins.families import family_named
from bandmf.optimize.bins.gram import Forms, LinearForm, strided_sums, strided_sums_adjoint
from bandmf.optimize.bins.model import Cut, Model
from bandmf.participation import FixedEpochs
from bins_search_oracles import Sampled, gram, monte_carlo
from oracles import errors, slope, toeplitz_matrix
from sweeps import some_long

FAMILIES = [("banded-inverse", 1), ("banded-inverse", 2), ("banded-inverse", 5), ("blt", 1), ("blt", 3), ("banded", 6)]
sizes = st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
seeds = st.integers(0, 2**32 - 1)


def symmetric(generator, size):
    """A symmetric matrix without negative entries."""
    half = generator.random((size, size))
    return half + half.T


def some_member(name, size, workload, generator, objective="mean"):
    """A family and unknowns away from its start."""
    family = family_named(name, size, workload, objective)
    start = family.starts()[0]
    return family, start + 0.3 * generator.standard_normal(len(start))


# --- the Gram matrix ----------------------------------------------------------------------------------


@given(sizes, seeds)
def test_the_gram_matrix_is_that_of_the_bins_columns(size, seed):
    n, cycle = size
    c = np.random.default_rng(seed).random(n)
    assert_allclose(bin_gram.gram(c, cycle), gram(toeplitz_matrix(c, n), cycle), rtol=1e-12)


@pytest.mark.parametrize(("n", "cycle"), [(900, 300), (1000, 300), (700, 700)])
def test_the_gram_matrix_by_fft_is_symmetric_and_not_negative(n, cycle):
    for c in (1 / np.sqrt(1 + np.arange(n)), np.eye(1, n)[0], np.exp(-np.arange(n))):
        G = bin_gram.gram(c, cycle)
        assert np.array_equal(G, G.T)
        assert G.min() >= 0
        assert_allclose(G, gram(toeplitz_matrix(c, n), cycle), atol=1e-13 * G.max())


@given(sizes, seeds)
def test_linear_forms_of_the_gram_matrix_and_their_gradient_are_exact(size, seed):
    n, cycle = size
    generator = np.random.default_rng(seed)
    c, weights = generator.random(n), generator.random(2)
    Ts = [symmetric(generator, cycle) for _ in weights]
    forms = [LinearForm.of(T) for T in Ts]
    G = gram(toeplitz_matrix(c, n), cycle)
    found = Forms(forms, c)
    assert_allclose(found.values, [np.sum(T * G) for T in Ts], rtol=1e-12)
    # A quadratic function: differences of any step are exact.
    numeric = slope(lambda y: float(weights @ Forms(forms, y).values), c, 0.1)
    assert_allclose(found.gradient(weights), numeric, rtol=1e-10, atol=1e-10)


def test_linear_forms_at_a_large_cycle_are_exact():
    n, cycle, generator = 1300, 400, np.random.default_rng(1)
    c, T, direction = 1 + generator.random(n), symmetric(generator, cycle), generator.random(n)
    form = LinearForm.of(T)
    value = lambda y: float(np.sum(T * gram(toeplitz_matrix(y, n), cycle)))  # noqa: E731
    found = Forms([form], c)
    assert found.values[0] == pytest.approx(value(c), rel=1e-12)
    along = (value(c + direction) - value(c - direction)) / 2
    assert found.gradient(np.ones(1)) @ direction == pytest.approx(along, rel=1e-11)


@given(sizes, seeds)
def test_the_adjoint_of_the_strided_sums_is_one(size, seed):
    a, b = np.random.default_rng(seed).standard_normal((2, size[0]))
    left, right = strided_sums(a, size[1]) @ b, a @ strided_sums_adjoint(b, size[1])
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


# --- the families -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), FAMILIES)
@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize("workload", [workloads.prefix(20), workloads.momentum(20, 0.9)], ids=["prefix", "momentum"])
def test_error_and_coefficients_of_a_family_are_those_of_its_strategies(name, size, objective, workload):
    if name == "blt" and not workload.is_prefix:
        with pytest.raises(ValueError, match="prefix sums only"):
            family_named(name, size, workload, objective)
        return
    generator = np.random.default_rng(2)
    family, x = some_member(name, size, workload, generator, objective)
    C = family.strategy(x).materialize()
    squares = errors(C, workload.materialize())
    value, gradient = family.squared_error(x)
    assert value == pytest.approx(squares.mean() if objective == "mean" else squares.max(), rel=1e-10)
    assert_allclose(family.coefficients(x), C[:, 0], rtol=1e-10, atol=1e-14)
    assert_allclose(gradient, slope(lambda y: family.squared_error(y)[0], x), rtol=1e-7, atol=1e-7)
    down = generator.standard_normal(20)
    assert_allclose(
        family.pull_back(x, down), slope(lambda y: float(family.coefficients(y) @ down), x), rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize(("name", "size"), FAMILIES)
@given(seeds)
def test_every_member_of_a_family_has_no_negative_coefficient(name, size, seed):
    family = family_named(name, size, workloads.prefix(40), "mean")
    x = 8 * np.random.default_rng(seed).standard_normal(len(family.starts()[0]))
    with np.errstate(all="ignore"):
        c = family.coefficients(x)
        model = Model(family, [Cut(LinearForm.of(np.ones((8, 8))), 1.0)])
        if np.isfinite(c).all():
            assert c.min() >= 0
            assert_allclose(family.strategy(x).materialize()[:, 0], c, rtol=1e-6, atol=1e-12 * c.max())
        else:  # poles that coincide: to the search, a step that was too long
            assert model.value(x) == model.smooth(x, 64.0)[0] == math.inf


@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_a_strategy_is_found_again_from_its_unknowns(name, size):
    family, x = some_member(name, size, workloads.prefix(40), np.random.default_rng(3))
    assert_allclose(family.unknowns(family.strategy(x)), x, atol=1e-5)


def test_a_start_of_another_size_or_kind_is_fitted_or_refused():
    small = strategies.banded_inverse_square_root(40, 4)
    family = family_named("banded-inverse", 8, workloads.prefix(40), "mean")
    r = family.strategy(family.unknowns(small)).inverse_coefficients
    assert_allclose(r[:4], small.inverse_coefficients, atol=1e-4)
    assert_allclose(r[4:], 0, atol=1e-4)
    with pytest.raises(ValueError, match="must be a BandedInverse"):
        family.unknowns(strategies.Identity(40))
    with pytest.raises(ValueError, match="size=2 buffers, without negative scales"):
        family_named("blt", 2, workloads.prefix(40), "mean").unknowns(strategies.BufferedToeplitz([0.3], [0.5], 40))


@pytest.mark.parametrize(("name", "size"), [("banded-inverse", 16), ("blt", 4), ("banded", 64)])
def test_errors_at_a_million_steps_are_the_librarys(name, size):
    family = family_named(name, size, workloads.prefix(10**6), "mean")
    x = family.starts()[0]
    assert family.squared_error(x)[0] == pytest.approx(mean_squared_error(family.strategy(x)), rel=1e-9)


# --- the model ----------------------------------------------------------------------------------------


def some_model(name, size, generator, steps=30, cycle=8):
    """A model with three cuts, and a member at which two of them are nearly the largest."""
    family, x = some_member(name, size, workloads.prefix(steps), generator)
    c = family.coefficients(x)
    Ts = [symmetric(generator, cycle) for _ in range(3)]
    return Model(family, [Cut.at(c, sigma, T) for sigma, T in zip((1.0, 1.01, 0.5), Ts, strict=True)]), x


def check_gradient(model, x):
    """The gradient that the search uses, against differences of the loss."""
    for sharpness in (4.0, 64.0):
        numeric = slope(lambda y, p=sharpness: model.smooth(y, p)[0], x)
        assert_allclose(model.smooth(x, sharpness)[1], numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_the_gradient_of_the_model_is_right(name, size):
    for seed in range(3):
        check_gradient(*some_model(name, size, np.random.default_rng(seed)))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("strided_sums_adjoint", lambda slope, cycle: slope),
        ("strided_sums_adjoint", lambda slope, cycle: 1.5 * strided_sums_adjoint(slope, cycle)),
        ("oaconvolve", lambda a, b: np.convolve(a, b)[::-1]),
    ],
)
def test_a_planted_wrong_gradient_is_caught(monkeypatch, place, wrong):
    model, x = some_model("banded-inverse", 5, np.random.default_rng(0))
    check_gradient(model, x)
    monkeypatch.setattr(bin_gram, place, wrong)
    with pytest.raises(AssertionError):
        check_gradient(model, x)


def test_a_cut_is_sigma_squared_where_it_was_made_and_scales_with_the_gram_matrix():
    model, x = some_model("banded", 6, np.random.default_rng(4))
    first = Model(model.family, model.cuts[:1])
    error = math.sqrt(model.family.squared_error(x)[0])
    assert first.value(x) == pytest.approx(math.log(error * 1.0), abs=1e-12)
    c = model.family.coefficients(x)
    assert Forms([model.cuts[0].form], 3 * c).values[0] * model.cuts[0].scale == pytest.approx(9, rel=1e-12)


# --- the oracle, which the rest of the tests rest on ---------------------------------------------------

TWO_BINS = np.array([[2.0, 0.7], [0.7, 1.6]])


def two_bins_delta(K, epsilon):
    """E (L - e^eps)+ with two bins, by integration over a fine grid."""
    t = np.linspace(-9, 9, 1801)
    density = np.exp(-(t**2) / 2)
    density /= density.sum()
    root = np.linalg.cholesky(K)
    first = np.exp(root[0, 0] * t - K[0, 0] / 2)
    second = np.exp(root[1, 0] * t[:, None] + root[1, 1] * t - K[1, 1] / 2)
    return density @ np.maximum((first[:, None] + second) / 2 - math.exp(epsilon), 0) @ density


def test_the_oracle_agrees_with_integration_for_two_bins():
    exact = two_bins_delta(TWO_BINS, 1.0)
    assert exact == pytest.approx(0.1897425, rel=1e-4)  # known from elsewhere
    for links in (1, 2, 3):
        found, error = Sampled(TWO_BINS, links, 100_000, 5).delta(1.0)
        assert abs(found / exact - 1) < 4 * error < 0.05


def test_the_derivative_of_delta_is_the_posteriors_product():
    """d delta / dK_ij is proportional to E[pi_i pi_j | L = e^eps]: Kahane's formula, by differences."""
    moves = [np.array([[1, 0], [0, 0]]), np.array([[0, 1], [1, 0]]), np.array([[0, 0], [0, 1]])]
    by_move = [
        (two_bins_delta(TWO_BINS + 0.02 * m, 1.0) - two_bins_delta(TWO_BINS - 0.02 * m, 1.0)) / 0.04 for m in moves
    ]
    T = Sampled(TWO_BINS, 2, 400_000, 6).posterior_products(1.0, 0.05)
    sampled = np.array([np.sum(T * m) for m in moves])
    assert_allclose(sampled / sampled.sum(), np.array(by_move) / np.sum(by_move), atol=0.01)


def test_the_cut_is_tangent_to_sigma_squared():
    generator = np.random.default_rng(7)
    G = gram(toeplitz_matrix(0.5 ** np.arange(12), 12), 4)
    estimate = partial(monte_carlo, epsilon=2.0, delta=1e-3, samples=60_000)
    here = estimate(G)
    for _ in range(1):
        move = symmetric(generator, 4) * 0.02
        difference = math.log(estimate(G + move).sigma / estimate(G - move).sigma)
        tangent = np.sum(here.posterior * move) / np.sum(here.posterior * G)
        assert difference == pytest.approx(tangent, rel=0.03)


# --- the search ---------------------------------------------------------------------------------------


def first_bin_only(gram, epsilon, delta):
    """As if everybody knew that the example is in bin 0: sigma is the norm of its columns."""
    T = np.zeros_like(gram)
    T[0, 0] = 1.0
    return SimpleNamespace(sigma=math.sqrt(gram[0, 0]), posterior=T)


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize(("name", "size"), [("banded-inverse", 4), ("blt", 2)])
def test_without_amplification_the_search_finds_what_the_other_optimizers_find(name, size, epochs):
    optimizer = {"banded-inverse": optimize.banded_inverse, "blt": optimize.buffered_toeplitz}[name]
    known = optimizer(128, size, participation=FixedEpochs(epochs))
    found = optimize_for_bins(name, 128, 128 // epochs, 1.0, 1e-6, size=size, estimate=first_bin_only, tolerance=1e-7)
    assert found.converged, found.message
    assert found.rmse == pytest.approx(known.rmse, rel=1e-5)


def test_without_amplification_the_best_bands_are_found():
    known = optimize.banded_toeplitz(128, 12, normalize_columns=False)
    found = optimize_for_bins("banded", 128, 128, 1.0, 1e-6, size=12, estimate=first_bin_only, tolerance=1e-7)
    assert found.converged, found.message
    assert found.rmse == pytest.approx(known.rmse, rel=1e-5)


STEPS, CYCLE, EPSILON, DELTA = 96, 12, 8.0, 1e-5
sampled = partial(monte_carlo, samples=6000)


def estimated(strategy, seed=0, samples=6000):
    """rmse with the sigma of the oracle, on the same draws as the search unless told."""
    G = gram(strategy.materialize(), CYCLE)
    sigma = monte_carlo(G, EPSILON, DELTA, seed=seed, samples=samples).sigma
    return sigma * math.sqrt(mean_squared_error(strategy))


@pytest.fixture(scope="module")
def best():
    """The best strategy of each family in a small case."""
    options = {"estimate": sampled, "tolerance": 1e-3}
    return {
        (name, size): optimize_for_bins(name, STEPS, CYCLE, EPSILON, DELTA, size=size, **options)
        for name, size in [("banded-inverse", 4), ("banded-inverse", 8), ("blt", 2), ("banded", 12)]
    }


def test_what_the_search_reports_is_what_the_strategy_has(best):
    for solution in best.values():
        assert solution.converged, solution.message
        again = estimated(solution.strategy, seed=1, samples=24_000)
        assert solution.rmse == pytest.approx(again, rel=0.01)  # the search's samples: 4 percent of delta, 0.2 of sigma
        assert solution.rmse == pytest.approx(solution.sigma * solution.error, rel=1e-12)
        assert solution.error == pytest.approx(math.sqrt(mean_squared_error(solution.strategy)), rel=1e-12)
        assert solution.optimality_gap is None  # nothing is proved
        assert solution.objective in solution.estimates
        assert len(solution.estimates) <= 8


@pytest.mark.parametrize("bands", [4, 8])
def test_the_search_beats_bisr_of_the_same_size(best, bands):
    bisr = strategies.banded_inverse_square_root(STEPS, bands)
    found = best["banded-inverse", bands].strategy
    for seed in (0, 1):  # the draws of the search, and others
        assert estimated(found, seed) < 0.99 * estimated(bisr, seed)


def test_more_bands_are_not_worse(best):
    """Here they are not better either: from the fifth on, the best coefficients with r_i <= 0 are zero."""
    assert best["banded-inverse", 8].rmse < 1.002 * best["banded-inverse", 4].rmse


@pytest.mark.parametrize(
    ("name", "size"),
    some_long(
        [("banded-inverse", 4), ("banded-inverse", 8), ("blt", 2), ("banded", 12)],
        lambda case: case in (("banded-inverse", 4), ("blt", 2)),
    ),
)
def test_no_perturbation_improves_the_solution_by_half_a_percent(best, name, size):
    """The search stops within 0.1 percent of its model, whose T has some percent of sampling noise."""
    case = name, size
    solution, generator = best[case], np.random.default_rng(8)
    family = family_named(*case, workloads.prefix(STEPS), "mean")
    x = family.unknowns(solution.strategy)
    for size in (0.03, 0.1, 0.3):
        for _ in range(2):
            moved = family.strategy(x + size * generator.standard_normal(len(x)))
            assert estimated(moved) > 0.995 * solution.rmse


def test_a_start_saves_estimates_and_does_not_change_what_is_found(best):
    known = best["banded-inverse", 8]
    again = optimize_for_bins(
        "banded-inverse", STEPS, CYCLE, EPSILON, DELTA, size=8, estimate=sampled, start=known.strategy
    )
    assert len(again.estimates) <= len(known.estimates)
    assert again.rmse == pytest.approx(known.rmse, rel=5e-3)
    smaller = optimize_for_bins(
        "banded-inverse", STEPS, CYCLE, EPSILON, DELTA, size=8, estimate=sampled,
        start=best["banded-inverse", 4].strategy,
    )  # fmt: skip
    assert smaller.rmse == pytest.approx(known.rmse, rel=5e-3)


def test_the_largest_error_is_an_objective_too():
    options = {"size": 4, "estimate": sampled}
    mean = optimize_for_bins("banded-inverse", STEPS, CYCLE, EPSILON, DELTA, **options)
    largest = optimize_for_bins("banded-inverse", STEPS, CYCLE, EPSILON, DELTA, objective="max", **options)
    assert largest.objective > largest.rmse
    worst = mean.sigma * math.sqrt(errors(mean.strategy.materialize(), np.tril(np.ones((STEPS, STEPS)))).max())
    assert largest.objective < worst


# --- estimates that fail -------------------------------------------------------------------------------


def failing_below(limit, least=0.0):
    """`first_bin_only`, but for a sigma below `limit`, where samples show nothing."""
    found = []

    def estimate(gram, epsilon, delta):
        sigma = first_bin_only(gram, epsilon, delta).sigma
        if not sigma >= limit:
            raise ValueError("samples do not show it")
        found.append(sigma)
        return first_bin_only(gram, epsilon, delta)

    return estimate, found


SEARCHED = ("banded-inverse", 64, 16, 1.0, 1e-6)


def test_where_an_estimate_fails_the_search_goes_back_and_keeps_the_best():
    """From a start far from the best, whose sigma is small, to the edge of what can be estimated."""
    start = strategies.BandedInverse([1.0, -0.9, -0.05, -0.01], 64)
    options = {"size": 4, "start": start}
    free = optimize_for_bins(*SEARCHED, **options, estimate=first_bin_only)
    first = math.sqrt(bin_gram.gram(start.toeplitz(), 16)[0, 0])
    limit = free.sigma + 0.3 * (first - free.sigma)
    assert free.sigma < limit < first
    estimate, sigmas = failing_below(limit)
    found = optimize_for_bins(*SEARCHED, **options, estimate=estimate)
    assert 1 < len(sigmas) == len(found.estimates) < 8
    assert found.sigma < first
    assert found.objective == min(found.estimates) < 0.9 * found.estimates[0]


def test_a_search_whose_trials_all_fail_has_its_first_guess():
    count = iter(range(100))

    def once(gram, epsilon, delta):
        if next(count):
            raise ZeroDivisionError("nothing is shown")
        return first_bin_only(gram, epsilon, delta)

    found = optimize_for_bins(*SEARCHED, size=4, estimate=once, start=strategies.lambda_cgd(64, 0.9))
    assert (len(found.estimates), found.outcome, found.converged) == (1, Outcome.STALLED, False)
    assert "estimates fail beyond the best: nothing is shown" in found.message
    assert next(count) == 8


def test_a_first_guess_that_fails_is_replaced_by_another_start():
    count = iter(range(100))

    def later(gram, epsilon, delta):
        if not next(count):
            raise ValueError("not there")
        return first_bin_only(gram, epsilon, delta)

    found = optimize_for_bins(*SEARCHED, size=4, estimate=later, tolerance=1e-7)
    known = optimize_for_bins(*SEARCHED, size=4, estimate=first_bin_only, tolerance=1e-7)
    assert found.rmse == pytest.approx(known.rmse, rel=1e-5)


def test_where_no_estimate_succeeds_its_own_error_is_raised():
    with pytest.raises(ValueError, match="samples do not show it"):
        optimize_for_bins(*SEARCHED, size=4, estimate=failing_below(math.inf)[0])


# --- honesty ------------------------------------------------------------------------------------------


def test_a_search_that_runs_out_of_estimates_has_not_converged():
    solution = optimize_for_bins(
        "banded-inverse", STEPS, CYCLE, EPSILON, DELTA, size=8, estimate=sampled, most_estimates=2, tolerance=0
    )
    assert (solution.outcome, solution.converged, len(solution.estimates)) == (Outcome.LIMIT, False, 2)
    assert "most_estimates=2" in solution.message


def test_estimates_that_contradict_each_other_are_not_called_converged():
    count = iter(range(100))

    def fickle(gram, epsilon, delta):
        found = first_bin_only(gram, epsilon, delta)
        found.sigma *= 1 if next(count) == 0 else 0.5
        return found

    solution = optimize_for_bins("banded-inverse", 64, 16, 1.0, 1e-6, size=4, estimate=fickle)
    assert not solution.converged
    assert "contradict" in solution.message


@pytest.mark.parametrize(
    ("sigma", "posterior", "complaint"),
    [
        (math.nan, np.eye(4), "sigma of the estimator=nan"),
        (0.0, np.eye(4), "sigma of the estimator=0.0"),
        (1.0, None, "there is none"),
        (1.0, np.eye(5), "must be 4 x 4"),
        (1.0, np.eye(4) - 0.5, "must be 4 x 4 products of probabilities"),
        (1.0, np.zeros((4, 4)), "must be 4 x 4 products of probabilities"),
        (1.0, np.full((4, 4), math.inf), "every entry must be finite"),
    ],
)
def test_an_estimate_that_makes_no_sense_is_refused(sigma, posterior, complaint):
    def estimate(gram, epsilon, delta):
        return SimpleNamespace(sigma=sigma, posterior=posterior)

    with pytest.raises(ValueError, match=complaint):
        optimize_for_bins("banded-inverse", 16, 4, 1.0, 1e-6, size=2, estimate=estimate)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"family": "dense"}, "family='dense'"),
        ({"cycle": 17}, "cycle=17: must be a whole number between 1 and steps=16"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"size": 17}, "size=17"),
        ({"family": "blt", "size": 11}, "size=11"),
        ({"objective": "last"}, "objective='last'"),
        ({"most_estimates": 1}, "most_estimates=1"),
        ({"tolerance": math.nan}, "tolerance=nan"),
        ({"start": strategies.Identity(16)}, "must be a BandedInverse"),
        ({"workload": workloads.momentum(16, 0.9, np.linspace(1, 0.1, 16))}, "must be Toeplitz"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed, complaint):
    arguments = {"family": "banded-inverse", "steps": 16, "cycle": 4, "epsilon": 1.0, "delta": 1e-6, "size": 2}
    with pytest.raises(ValueError, match=complaint):
        optimize_for_bins(**{**arguments, "estimate": first_bin_only, **changed})


# --- the reference ------------------------------------------------------------------------------------

REFERENCE = json.loads((Path(__file__).parent / "reference" / "bins_strategies.json").read_text())
CASES = [(name, epsilon) for name in REFERENCE if name != "_note" for epsilon in ("1", "4", "8")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "epsilon"), CASES)
def test_the_search_reaches_the_reference_within_half_a_percent(name, epsilon):
    """Judged on draws that the search did not see, so that it gains nothing from luck."""
    family, size = name.split(",")
    solution = optimize_for_bins(family, 1024, 128, float(epsilon), 1e-6, size=int(size), estimate=monte_carlo)
    assert solution.converged, solution.message
    G = gram(solution.strategy.materialize(), 128)
    fresh = monte_carlo(G, float(epsilon), 1e-6, samples=60_000, seed=99)
    assert fresh.sigma * solution.error < 1.005 * REFERENCE[name][epsilon]
