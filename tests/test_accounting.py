"""Accounting: dp_accounting's word, rounded towards privacy, found fast and remembered."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from bandmf import _cache, accounting
from bandmf._files import cache_folder
from sweeps import spread


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANDMF_CACHE", "off")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every sigma for which the accountant was asked."""
    asked: list[float] = []
    evaluate = accounting.accountant.evaluate

    def counting(event: accounting.Event, delta: float, sigma: float) -> float:
        asked.append(sigma)
        return evaluate(event, delta, sigma)

    monkeypatch.setattr(accounting.accountant, "evaluate", counting)
    return asked


# Oracles: three ways to epsilon that share nothing with the module ----------------------------------------


def accountant_epsilon(sigma: float, delta: float, q: float, rounds: int, relation: str = "ADD_OR_REMOVE_ONE") -> float:
    """dp_accounting as its documentation says, all defaults."""
    release = dp_accounting.GaussianDpEvent(sigma)
    event = release if q == 1 else dp_accounting.PoissonSampledDpEvent(q, release)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
    return accountant.compose(event, rounds).get_epsilon(delta)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The analytic Gaussian mechanism (Balle and Wang, 2018), sensitivity 1."""

    def excess(eps: float) -> float:
        upper = stats.norm.cdf(1 / (2 * sigma) - eps * sigma)
        return upper - math.exp(eps + stats.norm.logcdf(-1 / (2 * sigma) - eps * sigma)) - delta

    return optimize.brentq(excess, 0, 500, xtol=1e-12)


def true_delta(sigma: float, epsilon: float, q: float, rounds: int) -> float:
    """Delta of one or two rounds by integrating the definition over all outcomes, both directions."""
    x = np.linspace(-10 * sigma, 10 * sigma + 1, 4001 if rounds == 1 else 2001)
    without = stats.norm.pdf(x, 0, sigma)
    with_it = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    if rounds == 2:
        without, with_it = np.outer(without, without), np.outer(with_it, with_it)
    cell = (x[1] - x[0]) ** rounds
    ratio = math.exp(epsilon)
    return cell * max(np.maximum(with_it - ratio * without, 0).sum(), np.maximum(without - ratio * with_it, 0).sum())


# Round towards privacy ------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    target=st.floats(0.3, 12),
    log_delta=st.floats(-10, -3),
    q=st.floats(0.005, 1) | st.just(1.0),
    rounds=st.integers(1, 400),
    adjacency=st.sampled_from(accounting.ADJACENCIES),
)
def test_the_returned_sigma_meets_the_budget_and_is_tight(
    target: float, log_delta: float, q: float, rounds: int, adjacency: str
) -> None:
    delta = min(10**log_delta, 0.5 * -math.expm1(rounds * math.log1p(-min(q, 1 - 1e-9))))
    sigma = accounting.noise_multiplier(target, delta, q, rounds, adjacency=adjacency)
    spent = accounting.epsilon(sigma, delta, q, rounds, adjacency=adjacency)
    assert target * (1 - 2e-4) <= spent <= target


@settings(max_examples=6, deadline=None)
@given(target=st.floats(0.5, 8), log_delta=st.floats(-9, -4), q=st.floats(0.01, 0.5), rounds=st.integers(2, 400))
def test_dp_accounting_with_its_own_defaults_never_reports_more(
    target: float, log_delta: float, q: float, rounds: int
) -> None:
    sigma = accounting.noise_multiplier(target, 10**log_delta, q, rounds)
    assert accountant_epsilon(sigma, 10**log_delta, q, rounds) <= target


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("q", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("target", [0.5, 2.0, 6.0])
def test_the_budget_holds_by_the_definition_of_differential_privacy(target: float, q: float, rounds: int) -> None:
    sigma = accounting.noise_multiplier(target, 1e-4, q, rounds)
    assert 0.998e-4 <= true_delta(sigma, target, q, rounds) <= 1e-4 * (1 + 1e-9)


def test_a_sigma_barely_smaller_than_the_returned_one_breaks_the_budget() -> None:
    sigma = accounting.noise_multiplier(2.0, 1e-6, 0.1, 100)
    assert accounting.epsilon(sigma * (1 - 3e-4), 1e-6, 0.1, 100) > 2.0


def test_rounding_errors_of_the_accountant_are_taken_off_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    get_epsilon = pld.PLDAccountant.get_epsilon
    monkeypatch.setattr(pld.PLDAccountant, "get_epsilon", lambda self, d: seen.append(d) or get_epsilon(self, d))
    accounting.epsilon(2.0, 1e-9, 0.01, 1000)
    accounting.epsilon(200.0, 1e-9, 1.0, 1000)
    assert seen == [1e-9 - 1000 * 2**-52, 1e-9 - 2**-52]


# The same numbers as everybody else's ---------------------------------------------------------------------


def test_reference_values(reference: dict) -> None:
    values = reference["pld"]
    assert accounting.epsilon(3.0, 1e-6, 0.1, 512) == pytest.approx(values["epsilon"], abs=5e-5)
    for key, expected in values["sigma"].items():
        target, q, rounds = key.split(", ")
        one, many = map(float, q.split("/"))
        sigma = accounting.noise_multiplier(float(target), 1e-8, one / many, int(rounds))
        assert sigma == pytest.approx(expected, abs=5e-5)
        assert accountant_epsilon(sigma, 1e-8, one / many, int(rounds)) <= float(target)


def test_one_band_has_the_sigma_of_dp_sgd_calibrated_by_dp_accounting() -> None:
    steps, q, target, delta = 100, 0.1, 1.0, 1e-6
    theirs = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant,
        lambda sigma: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps
        ),
        target,
        delta,
        dp_accounting.ExplicitBracketInterval(3, 7),
        tol=1e-4,
    )
    assert accounting.noise_multiplier(target, delta, q, steps) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("rounds", [1, 8, 1000, 10**8])
@pytest.mark.parametrize("target", [0.01, 1.0, 16.0, 150.0])
def test_without_sampling_k_rounds_are_k_compositions_of_the_gaussian_mechanism(target: float, rounds: int) -> None:
    sigma = accounting.noise_multiplier(target, 1e-8, 1.0, rounds)
    truth = gaussian_epsilon(sigma / math.sqrt(rounds), 1e-8)
    assert target * (1 - 2e-4) <= truth <= target


@pytest.mark.parametrize(("sigma", "slack"), [(0.08, 1e-4), (0.5, 1e-4), (1.0, 1e-4), (20.0, 1e-4), (1e4, 0.03)])
def test_epsilon_of_one_release_is_the_analytic_gaussian(sigma: float, slack: float) -> None:
    truth = gaussian_epsilon(sigma, 1e-6)
    assert truth * (1 - 1e-9) <= accounting.epsilon(sigma, 1e-6, 1.0, 1) <= truth * (1 + slack)


def test_many_rounds_with_little_loss_stay_tight_where_the_default_grid_does_not() -> None:
    # q = 1e-2 and sigma = 51 are, over a million rounds, a Gaussian release with mu = q sqrt(T) / sigma.
    truth = gaussian_epsilon(51 / (0.01 * 1000), 1e-6)
    assert accounting.epsilon(51.0, 1e-6, 0.01, 10**6) == pytest.approx(truth, rel=4e-3)


# What must go up goes up ----------------------------------------------------------------------------------


def increasing(values: list[float]) -> bool:
    return all(b > a for a, b in pairwise(values))


@pytest.mark.parametrize(
    "sigma_at",
    [
        lambda x: accounting.noise_multiplier(8 / x, 1e-6, 0.05, 100),
        lambda x: accounting.noise_multiplier(2.0, 1e-4 / x**3, 0.05, 100),
        lambda x: accounting.noise_multiplier(2.0, 1e-6, 0.05 * x, 100),
        lambda x: accounting.noise_multiplier(2.0, 1e-6, 0.05, 50 * x),
        lambda x: accounting.epsilon(4 / x, 1e-6, 0.05, 100),
    ],
    ids=["epsilon", "delta", "sampling_probability", "rounds", "noise_multiplier"],
)
def test_less_budget_more_sampling_and_more_rounds_need_more_noise(sigma_at: Callable[[int], float]) -> None:
    assert increasing([sigma_at(x) for x in (1, 2, 4, 8)])


# Adjacency and capped batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.05, 1.0])
def test_zero_out_costs_what_add_remove_costs(q: float) -> None:
    assert accounting.epsilon(1.5, 1e-6, q, 50, adjacency="zero-out") == accounting.epsilon(1.5, 1e-6, q, 50)


def test_replace_costs_more_and_without_sampling_twice_the_noise() -> None:
    assert accounting.epsilon(1.5, 1e-6, 0.05, 50, adjacency="replace") > accounting.epsilon(1.5, 1e-6, 0.05, 50)
    assert accounting.epsilon(3.0, 1e-6, 0.05, 50, adjacency="replace") == pytest.approx(
        accountant_epsilon(3.0, 1e-6, 0.05, 50, "REPLACE_ONE"), rel=1e-4
    )
    twice = accounting.noise_multiplier(2.0, 1e-6, 1.0, 7, adjacency="replace")
    assert twice == pytest.approx(2 * accounting.noise_multiplier(2.0, 1e-6, 1.0, 7), rel=2e-4)


def test_a_cap_on_the_batch_costs_at_least_as_much_as_plain_sampling() -> None:
    plain = accounting.epsilon(1.2, 1e-6, 0.05, 40)
    capped = [accounting.epsilon(1.2, 1e-6, 0.05, 40, max_batch_size=cap, examples=1000) for cap in (50, 65, 80)]
    assert increasing([plain * (1 - 1e-4), *reversed(capped)])
    assert accounting.epsilon(1.2, 1e-6, 0.05, 40, max_batch_size=1001, examples=1000) == plain


@pytest.mark.parametrize("adjacency", accounting.ADJACENCIES)
def test_a_capped_batch_is_dp_accountings_truncated_event(adjacency: str) -> None:
    relation = {"add-remove": "ADD_OR_REMOVE_ONE", "zero-out": "REPLACE_SPECIAL", "replace": "REPLACE_ONE"}
    larger = 1001 if adjacency == "add-remove" else 1000  # of two neighbors
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=larger, sampling_probability=0.05, truncated_batch_size=60, noise_multiplier=4.0
    )
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation[adjacency]])
    theirs = accountant.compose(event, 40).get_epsilon(1e-6)
    ours = accounting.epsilon(4.0, 1e-6, 0.05, 40, adjacency=adjacency, max_batch_size=60, examples=1000)
    assert theirs * (1 - 1e-9) <= ours <= theirs * (1 + 2e-4)
    sigma = accounting.noise_multiplier(0.5, 1e-6, 0.05, 40, adjacency=adjacency, max_batch_size=60, examples=1000)
    spent = accounting.epsilon(sigma, 1e-6, 0.05, 40, adjacency=adjacency, max_batch_size=60, examples=1000)
    assert 0.5 * (1 - 2e-4) <= spent <= 0.5


# Planted errors -------------------------------------------------------------------------------------------


def assert_private(sigma: float, target: float, delta: float, bands: int, batch: int, examples: int) -> None:
    """The truth about 2 * bands steps of banded training: two rounds with q = bands * batch / examples."""
    assert true_delta(sigma, target, bands * batch / examples, 2) <= delta * (1 + 1e-9)


def test_a_mispaired_sampling_probability_is_caught() -> None:
    bands, batch, examples = 8, 50, 1000
    right = accounting.noise_multiplier(2.0, 1e-4, bands * batch / examples, 2)
    assert_private(right, 2.0, 1e-4, bands, batch, examples)
    planted = accounting.noise_multiplier(2.0, 1e-4, batch / examples, 2)
    with pytest.raises(AssertionError):
        assert_private(planted, 2.0, 1e-4, bands, batch, examples)
    # and it reports far less than the truth
    assert accounting.epsilon(planted, 1e-4, batch / examples, 2) < 0.6 * accounting.epsilon(
        planted, 1e-4, bands * batch / examples, 2
    )


@pytest.mark.parametrize("factor", spread([0.5, 0.99, 1.5, 2.0], 2))
def test_a_wrong_estimate_costs_time_but_never_privacy(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = accounting.estimate._estimate
    monkeypatch.setattr(accounting.estimate, "_estimate", lambda *arguments: factor * estimate(*arguments))
    sigma = accounting.noise_multiplier(2.0, 1e-6, 0.1, 100)
    assert 2.0 * (1 - 2e-4) <= accountant_epsilon(sigma, 1e-6, 0.1, 100) <= 2.0


# Fast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "q", "rounds"), [(1, 1 / 256, 2048), (8, 1 / 16, 128), (16, 1, 8), (0.5, 0.5, 16)])
def test_two_verdicts_of_the_accountant_are_enough(target: float, q: float, rounds: int, calls: list[float]) -> None:
    accounting.noise_multiplier(target, 1e-8, q, rounds)
    assert len(calls) <= 2


def test_the_estimate_agrees_with_the_accountant_on_the_same_grid() -> None:
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(3.0))
    theirs = accountant.compose(event, 512).get_epsilon(1e-6)
    kinds = accounting.estimate.round_losses(accounting.Event(0.1, 512), 3.0)
    assert accounting.estimate._estimate(kinds, 1e-6, 1e-3) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(("examples", "cap", "q"), [(1000, 60, 0.05), (50, 3, 0.1), (10, 9, 1.0)])
def test_the_estimate_knows_how_often_a_cap_bites(examples: int, cap: int, q: float) -> None:
    bites, conditional = accounting.Event(q, 1, "add-remove", cap, examples).truncation
    others = np.arange(examples)
    sampled = special.comb(examples - 1, others) * q**others * (1.0 - q) ** (examples - 1 - others)
    assert bites == pytest.approx(sampled[cap:].sum())
    assert conditional * bites == pytest.approx(q * (sampled[cap:] * cap / (others[cap:] + 1)).sum())


# The cache ------------------------------------------------------------------------------------------------

CHEAP = (2.0, 1e-6, 1.0, 3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    return tmp_path / "accounting"


def test_a_known_answer_is_not_computed_again(cache: Path, calls: list[float]) -> None:
    first = accounting.noise_multiplier(*CHEAP), accounting.epsilon(*CHEAP)
    asked = len(calls)
    assert (accounting.noise_multiplier(*CHEAP), accounting.epsilon(*CHEAP)) == first
    assert len(calls) == asked
    assert len(list(cache.iterdir())) == asked + 1  # every verdict, and the noise multiplier


def test_every_input_and_version_is_part_of_the_key(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def compute() -> float:
        nonlocal count
        count += 1
        return float(count)

    def ask(delta: float, *event: object) -> None:
        accounting.cache.cached("epsilon", accounting.Event(*event), delta, 1.0, compute)

    variants = [
        (1e-6, 0.1, 10, "add-remove", None, None),
        (1.0000000001e-6, 0.1, 10, "add-remove", None, None),
        (1e-6, 0.1 + 1e-17 + 2**-56, 10, "add-remove", None, None),
        (1e-6, 0.1, 11, "add-remove", None, None),
        (1e-6, 0.1, 10, "replace", None, None),
        (1e-6, 0.1, 10, "add-remove", 5, 10),
        (1e-6, 0.1, 10, "add-remove", 6, 10),
        (1e-6, 0.1, 10, "add-remove", 5, 11),
    ]
    for variant in variants:
        ask(*variant)
        ask(*variant)
    assert count == len(variants)
    delta, event = variants[0][0], accounting.Event(*variants[0][1:])
    accounting.cache.cached("noise_multiplier", event, delta, 1.0, compute)
    accounting.cache.cached("epsilon", event, delta, 1.5, compute)
    monkeypatch.setattr(accounting.cache, "_SCHEME", accounting.cache._SCHEME + 1)
    ask(*variants[0])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    ask(*variants[0])
    assert count == len(variants) + 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"answer": null, "seal": ""}',
        lambda text: '{"answer": 1' + "0" * 400 + "}",
        lambda text: text.replace('"answer": ', '"answer": 1'),
        lambda text: "\x00" * 100,
    ],
    ids=["empty", "half", "list", "null", "huge", "digit", "zeros"],
)
def test_a_damaged_entry_is_ignored_and_replaced(damage: Callable[[str], str], cache: Path) -> None:
    answer = accounting.epsilon(*CHEAP)
    (entry,) = cache.iterdir()
    whole = entry.read_text()
    entry.write_text(damage(whole))
    assert accounting.epsilon(*CHEAP) == answer
    assert entry.read_text() == whole


def test_an_answer_to_another_question_is_ignored(cache: Path) -> None:
    accounting.epsilon(*CHEAP)
    (entry,) = cache.iterdir()
    other = accounting.epsilon(1.0, *CHEAP[1:])
    (other_entry,) = set(cache.iterdir()) - {entry}
    other_entry.write_text(entry.read_text())
    assert accounting.epsilon(1.0, *CHEAP[1:]) == other


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "file"))
    assert accounting.epsilon(*CHEAP) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_where_the_cache_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for off in ("", "0", "off", "OFF"):
        monkeypatch.setenv("BANDMF_CACHE", off)
        assert cache_folder("accounting") is None
    monkeypatch.setenv("BANDMF_CACHE", "~/mine")
    assert cache_folder("accounting") == tmp_path / "mine" / "accounting"
    monkeypatch.delenv("BANDMF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("accounting") == tmp_path / "xdg" / "bandmf" / "accounting"
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("accounting") == tmp_path / ".cache" / "bandmf" / "accounting"


def _write_often() -> None:
    for number in range(200):
        _cache.remember("accounting", {"of": number % 3}, 1.25)


def test_several_processes_never_see_half_an_entry(cache: Path) -> None:
    _write_often()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert _cache.recall("accounting", {"of": 1}) == 1.25
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(list(cache.iterdir())) == 3


# Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, r"epsilon=0: must be a finite number in \[0.001, 200\]"),
        ({"epsilon": -1.0}, "epsilon=-1.0: must be"),
        ({"epsilon": 1e6}, "epsilon=1000000.0: must be .*; a larger epsilon protects nothing"),
        ({"epsilon": math.nan}, "epsilon=nan: must be"),
        ({"epsilon": "1"}, "epsilon='1': must be"),
        ({"delta": 0}, r"delta=0: must be a finite number in \(0, 1\)"),
        ({"delta": 1}, "delta=1: must be"),
        ({"delta": math.nan}, "delta=nan: must be"),
        ({"delta": 1e-16}, "delta=1e-16: must be at least 1e-13.*raise delta"),
        ({"rounds": 10**8, "delta": 1e-9}, "must be at least 4.4e-08.*certify for rounds=100000000; raise"),
        ({"rounds": 2, "delta": 0.5}, "delta=0.5: must be below 0.19,.*sampled at all; lower delta"),
        ({"sampling_probability": 0}, r"sampling_probability=0: must be a finite number in \(0, 1\]; it is"),
        ({"sampling_probability": 1.01}, "sampling_probability=1.01: must be"),
        ({"sampling_probability": math.nan}, "sampling_probability=nan: must be"),
        ({"rounds": 0}, "rounds=0: must be a whole number between 1 and 100000000"),
        ({"rounds": 2.5}, "rounds=2.5: must be"),
        ({"rounds": 10**9}, "rounds=1000000000: must be .* use more bands"),
        ({"adjacency": "add"}, "adjacency='add': must be one of 'add-remove', 'zero-out', 'replace'"),
        ({"max_batch_size": 0, "examples": 10}, "max_batch_size=0: must be a whole number at least 1"),
        ({"max_batch_size": 5}, "examples=None: must be .*max_batch_size needs the number of examples"),
    ],
)
def test_bad_input_gets_one_clear_sentence(change: dict[str, object], message: str) -> None:
    good = {"epsilon": 1.0, "delta": 1e-6, "sampling_probability": 0.1, "rounds": 10}
    with pytest.raises(ValueError, match=message) as caught:
        accounting.noise_multiplier(**(good | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sigma", [0, -1.0, math.nan, math.inf, True])
def test_noise_must_be_positive_and_finite(sigma: float) -> None:
    with pytest.raises(ValueError, match=r"noise_multiplier=.*: must be .*without noise"):
        accounting.epsilon(sigma, 1e-6, 0.1, 10)


def test_next_to_no_noise_is_infinite_epsilon_and_very_much_noise_is_none() -> None:
    for sigma in (1e-9, 1e-3, 0.05):
        assert accounting.epsilon(sigma, 1e-6, 0.1, 10) == math.inf
        assert accounting.epsilon(sigma, 1e-6, 1.0, 10) == math.inf
    assert accounting.epsilon(1e9, 1e-6, 0.1, 10) == 0.0
