"""Plans with balls-in-bins: certified or not at all, chosen for a stated reason, and the same again after a restart."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest

import bandmf
from bandmf import _cache, strategies, workloads
from bandmf.accounting.bins import Certificate, NotCertifiedError, estimate, gram_matrix
from bandmf.optimize.bins.search import guess_for_bins
from bandmf.participation import FixedEpochs
from bandmf.planning import planner
from bandmf.planning.plan_file import digest
from bandmf.planning.search.found import Found
from bandmf.planning.setup import whole_cycle
from bandmf.planning.sweep import sweep
from bandmf.randomness.key import Key
from bandmf.sampling import BallsInBins, sampler
from bandmf.strategies.single_precision import MARGIN, in_float32
from sweeps import some_long

SMALL = {"epsilon": 8.0, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 80}  # 4 epochs of 20

QUICK = {**SMALL, "steps": 40, "mechanism": "banded-inverse", "inverse_bands": 3}
SCHEDULED = workloads.momentum(80, 0.9, np.linspace(1, 2, 80))


@pytest.fixture(scope="module")
def plan():
    return bandmf.plan(**SMALL)


def test_balls_in_bins_is_chosen_where_it_is_certified_to_have_less_error(plan):
    paper = bandmf.plan(**SMALL, sampling="cyclic-poisson")
    assert plan.sampling == "balls-in-bins"
    assert plan.rmse < paper.rmse
    less = 1 - plan.rmse / paper.rmse
    assert f"{less:.0%} less error" in plan.choice
    assert "balls-in-bins, certified" in plan.explain()


def test_a_plan_with_bins_says_what_it_has_and_has_not(plan):
    assert (plan.cycle, plan.epochs, plan.batch_size) == (20, 4, 50)
    assert (plan.sampling_probability, plan.rounds, plan.rule_of_thumb) == (None, None, None)
    assert plan.noise_scale == plan.noise_multiplier == plan.certificate.sigma * MARGIN
    error = math.sqrt(bandmf.error.mean_squared_error(plan.strategy))
    assert plan.rmse == pytest.approx(plan.noise_scale * error, rel=1e-12)
    assert plan.summary()["cycle"] == 20
    assert plan.dp_sgd_ratio > 1


def test_the_certified_noise_is_close_to_what_it_must_be(plan):
    least = estimate(gram_matrix(plan.strategy, 20), 8.0, 1e-5, samples=2**15, seed=3)
    assert 1 - 3 * least.relative_standard_error < plan.noise_scale / least.sigma < 1.02


def test_all_candidates_are_shown_with_what_their_noise_keeps(plan):
    shown = {(c.sampling, c.mechanism, c.bands): c for c in plan.candidates}
    assert ("cyclic-poisson", "banded", 1) in shown
    assert shown["balls-in-bins", "blt", 4].vectors == 4
    assert shown["balls-in-bins", "banded-inverse", 16].vectors == 0
    assert [plan.is_chosen(c) for c in plan.candidates[-2:]] == [False, True]  # as certified


def test_the_same_call_gives_the_same_plan_so_that_a_script_can_be_restarted(plan):
    assert bandmf.plan(**SMALL) == plan
    assert bandmf.plan(**QUICK) != plan


def test_processes_that_plan_at_the_same_time_get_the_same_plan(monkeypatch, tmp_path):
    """As under torchrun: each would otherwise draw samples of its own."""
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    first, second = sweep([QUICK, QUICK], jobs=2)
    assert first == second


def test_the_same_call_elsewhere_gives_another_certificate(monkeypatch, tmp_path):
    here = bandmf.plan(**QUICK)
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    other = bandmf.plan(**QUICK)
    assert other.certificate.seed != here.certificate.seed
    assert other.noise_scale == pytest.approx(here.noise_scale, rel=0.02)


def test_of_processes_that_plan_at_the_same_time_the_first_answer_is_everyones(plan, monkeypatch):
    """Ranks of one run do: their plans were different once, and a restart got the plan of another rank."""
    recall, asked = _cache.recall, []

    def late(kind, question, *read):
        """The other process has not written its answer when this one asks; when it writes its own, it has."""
        asked.append(question)
        return recall(kind, question, *read) if asked.count(question) > 1 else None

    monkeypatch.setattr(_cache, "recall", late)
    assert bandmf.plan(**SMALL) == plan
    assert any("certificate of" in question for question in asked)


def test_an_answer_is_kept_once_and_a_damaged_one_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    assert [_cache.remember("plans", {"of": 1}, answer) for answer in (0.1, 0.2)] == [0.1, 0.1]
    (file,) = (tmp_path / "plans").iterdir()
    file.write_text("{}")
    assert _cache.recall("plans", {"of": 1}) is None
    assert _cache.remember("plans", {"of": 1}, 0.3) == _cache.recall("plans", {"of": 1}) == 0.3
    assert list((tmp_path / "plans").iterdir()) == [file]


# --- the certificate ------------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch, tmp_path):
    """How often certificates were really computed again, on a machine that remembers nothing."""
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "cache"))
    counted, verify = [], Certificate.verify

    def counting(self, *arguments, **options):
        counted.append(self)
        return verify(self, *arguments, **options)

    monkeypatch.setattr(Certificate, "verify", counting)
    return counted


def test_a_plan_from_elsewhere_is_verified_once_on_this_machine(plan, verified, tmp_path):
    path = plan.save(tmp_path / "plan.json")
    for _ in range(3):
        assert bandmf.Plan.load(path) == plan
    assert len(verified) == 1


def test_verify_computes_everything_again_also_with_a_seed_of_ones_own(plan, verified):
    assert plan.verify() == plan.certificate
    assert plan.verify(seed=12345).seed == 12345
    assert len(verified) == 2


def test_planning_does_not_compute_the_certificate_twice(verified):
    assert bandmf.plan(**QUICK).in_bins
    assert verified == []


def forged(plan, path, **changes):
    """The plan's file with other numbers in its certificate and outside of it, and the right digest."""
    contents = json.loads(plan.save(path).read_text())
    for name, value in changes.items():
        (contents["certificate"] if name in contents["certificate"] else contents)[name] = value
    if "sigma" in changes:
        contents["noise_multiplier"] = changes["sigma"]
    contents["digest"] = digest({name: value for name, value in contents.items() if name != "digest"})
    path.write_text(json.dumps(contents))
    return path


@pytest.mark.parametrize(
    "change",
    [{"sigma": 0.97}, {"samples": 100_000}, {"failure": 1e-9}, {"gram_marks": [1.0, 2.0, 3.0]}, {"weight_bound": 1e-9}],
    ids=lambda change: next(iter(change)),
)
def test_a_certificate_that_is_not_true_is_refused(plan, tmp_path, change):
    if "sigma" in change:
        change = {"sigma": change["sigma"] * plan.noise_scale}
    with pytest.raises(ValueError, match="certif"):
        bandmf.Plan.load(forged(plan, tmp_path / "plan.json", **change))


def test_a_certificate_with_another_seed_is_refused(plan, tmp_path):
    """Of one seed in thirty the samples give the same bound to four digits, and then it is true."""

    def is_refused(seed):
        try:
            bandmf.Plan.load(forged(plan, tmp_path / "plan.json", seed=seed))
        except ValueError:
            return True
        return False

    assert any(is_refused(seed) for seed in range(4))


def test_a_strategy_that_the_certificate_is_not_for_is_refused(plan):
    T = plan.strategy.strategy
    louder = in_float32(strategies.BufferedToeplitz(1.1 * T.scales, T.decays, plan.steps))
    other = strategies.Scaled(louder, plan.strategy.scales)
    with pytest.raises(NotCertifiedError):
        dataclasses.replace(plan, strategy=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 7.9}, "is for epsilon=8"),
        ({"delta": 9e-6}, "is for epsilon=8"),
        ({"noise_multiplier": 0.5}, "noise of"),
        ({"batch_size": 25.0}, "cycle=40"),
        ({"batch_size": 49.0}, "batch_size=49.0: must be examples / cycle"),
        ({"certificate": None}, "needs a certificate of its own"),
        ({"sampling": "cyclic-poisson"}, r"strategy\.bands|only"),
        ({"adjacency": "replace"}, "not against adjacency='replace'"),
        ({"max_batch_size": 60}, "max_batch_size=60"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_estimates_and_borrowed_certificates_never_make_a_plan(plan, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **change)


@pytest.mark.parametrize(
    "change",
    [{"noise_multiplier": 1e-3}, {"epsilon": 0.01}, {"epsilon": math.inf}, {"delta": 1e-12}, {"batch_size": 500.0}],
    ids=lambda change: next(iter(change)),
)
def test_a_plan_that_was_changed_by_force_is_not_confirmed(plan, change):
    changed = copy.deepcopy(plan)
    for name, value in change.items():
        object.__setattr__(changed, name, value)
    for check in (changed.confirm, changed.verify):
        with pytest.raises(NotCertifiedError, match="is for"):
            check()


@pytest.mark.parametrize(
    "budget",
    some_long([{"epsilon": 150.0}, {"epsilon": 1e-3}, {"delta": 0.3}], lambda budget: budget.get("epsilon") != 1e-3),
    ids=str,
)
def test_budgets_far_from_any_use_are_planned_with_cyclic_poisson(budget):
    found = bandmf.plan(**{**SMALL, "steps": 40, **budget})
    assert found.spent() <= found.epsilon * (1 + 1e-9)
    assert found.choice


def test_more_noise_than_certified_is_allowed(plan):
    assert dataclasses.replace(plan, noise_multiplier=2 * plan.noise_multiplier).rmse == 2 * plan.rmse


def test_a_copy_is_an_equal_plan(plan):
    assert copy.deepcopy(plan) == plan


def test_a_part_of_the_run_spends_no_more_than_the_whole(plan):
    spent = [plan.spent_after(steps) for steps in (0, 1, 40, 80)]
    assert spent == sorted(set(spent))
    assert spent[0] == 0
    assert spent[-1] == plan.spent() == 8.0


# --- the search survives --------------------------------------------------------------------------------


def fails(*_, **__):
    raise NotCertifiedError("delta=1: samples do not show it")


def test_a_search_that_fails_has_its_first_guess_certified(monkeypatch, tmp_path):
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    monkeypatch.setattr(planner.bins, "optimize_for_bins", fails)
    found = bandmf.plan(**QUICK)
    assert found.sampling == "balls-in-bins"
    guess = guess_for_bins("banded-inverse", 40, 20, 8.0, size=3)
    np.testing.assert_allclose(found.strategy.columns(), guess.columns(), rtol=1e-5)


def test_a_family_that_fails_leaves_the_others(monkeypatch):
    best = planner.bins._best
    monkeypatch.setattr(planner.bins, "_best", lambda *given: fails() if given[1] == "blt" else best(*given))
    found = bandmf.plan(**SMALL)
    assert (found.sampling, found.mechanism) == ("balls-in-bins", "banded-inverse")
    monkeypatch.setattr(planner.bins, "_best", fails)
    found = bandmf.plan(**SMALL)
    assert found.sampling == "cyclic-poisson"
    assert found.choice == "cyclic Poisson sampling, since balls-in-bins failed: delta=1: samples do not show it"


@pytest.mark.parametrize("sampling", ["auto", "balls-in-bins"])
def test_where_one_strategy_cannot_be_certified_the_next_one_is(monkeypatch, sampling):
    certified, tried = planner.bins.certified, []

    def hard(request, chosen, *rest):
        tried.append(chosen.candidate.mechanism)
        return fails() if len(tried) == 1 else certified(request, chosen, *rest)

    monkeypatch.setattr(planner.bins, "certified", hard)
    found = bandmf.plan(**SMALL, sampling=sampling)
    assert found.sampling == "balls-in-bins"
    assert sorted(tried) == ["banded-inverse", "blt"]
    assert found.mechanism == tried[1]


# --- the choice -----------------------------------------------------------------------------------------


def test_with_many_epochs_and_a_small_epsilon_step_scales_keep_bins_ahead():
    found = bandmf.plan(epsilon=1, delta=1e-6, examples=400, batch_size=50, steps=512)
    assert found.sampling == "balls-in-bins"
    assert isinstance(found.strategy, strategies.Scaled)


def test_too_little_time_to_certify_falls_back_to_cyclic_poisson_and_says_so():
    found = bandmf.plan(**SMALL, certify_seconds=1e-6)
    assert found.sampling == "cyclic-poisson"
    assert found.choice.endswith("could not be certified within certify_seconds=1e-06")
    with pytest.raises(NotCertifiedError, match="seconds=1e-06"):
        bandmf.plan(**SMALL, sampling="balls-in-bins", certify_seconds=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": 19}, "takes at least one whole epoch, 20 steps"),
        ({"adjacency": "replace"}, "not against adjacency='replace'"),
        ({"batch_size": 1.0, "examples": 5_000, "steps": 5_000}, "takes long to account for 5000 steps an epoch"),
    ],
    ids=["less than an epoch", "replace", "many bins"],
)
def test_what_bins_cannot_do_is_said(change, reason):
    found = bandmf.plan(**{**SMALL, **change})
    assert found.sampling == "cyclic-poisson"
    assert reason in found.choice


@pytest.mark.parametrize("given", [{"bands": 4}, {"strategy": strategies.Identity(80)}])
def test_what_only_cyclic_poisson_has_asks_for_it(given):
    found = bandmf.plan(**SMALL, **given)
    assert (found.sampling, found.choice) == ("cyclic-poisson", "")


@pytest.mark.parametrize(
    ("given", "mechanism", "vectors"),
    [
        ({"mechanism": "blt"}, "blt", 4),
        ({"mechanism": "banded-inverse"}, "banded-inverse", 0),
        ({"mechanism": "banded-inverse", "inverse_bands": 4}, "banded-inverse", 0),
        ({"inverse_bands": 3}, "banded-inverse", 0),
        ({"mechanism": "banded", "sampling": "balls-in-bins", "bands": 6}, "banded", 5),
        ({"sampling": "balls-in-bins", "bands": 6}, "banded", 5),
        ({"mechanism": "banded-inverse", "parameters": 10, "memory": 40.0 * 3}, "banded-inverse", 3),
        ({"parameters": 10, "memory": 1.0}, "banded-inverse", 0),  # memory for nothing
    ],
    ids=["blt", "inverse", "inverse of 4", "inverse of 3", "banded", "bands", "inverse keeping 3", "no memory"],
)
def test_a_mechanism_that_is_asked_for_is_planned(given, mechanism, vectors):
    found = bandmf.plan(**SMALL, **given)
    assert (found.sampling, found.mechanism, found.vectors) == ("balls-in-bins", mechanism, vectors)
    if "inverse_bands" in given:
        assert found.strategy.strategy.inverse_bands == given["inverse_bands"]


def test_a_strategy_of_ones_own_is_certified():
    mine = strategies.lambda_cgd(80, 0.625)  # which float32 holds exactly
    found = bandmf.plan(**SMALL, strategy=mine, sampling="balls-in-bins")
    assert found.strategy is mine
    assert found.verify().sigma * MARGIN == found.noise_scale


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": "by chance"}, "sampling='by chance'"),
        ({"sampling": "b-min-sep", "mechanism": "blt"}, "use sampling='balls-in-bins'"),
        ({"sampling": "b-min-sep", "adjacency": "replace"}, "not against adjacency='replace'"),
        ({"sampling": "b-min-sep", "bands": 21}, "bands=21"),
        ({"sampling": "cyclic-poisson", "mechanism": "blt"}, "use sampling='balls-in-bins'"),
        ({"sampling": "balls-in-bins", "participation": FixedEpochs(4)}, "has no meaning"),
        ({"sampling": "balls-in-bins", "adjacency": "replace"}, "not against adjacency='replace'"),
        ({"sampling": "balls-in-bins", "max_batch_size": 60}, "max_batch_size=60"),
        ({"sampling": "balls-in-bins", "steps": 19}, "whole epoch"),
        ({"mechanism": "dense"}, "mechanism='dense'"),
        ({"mechanism": "blt", "inverse_bands": 4}, "inverse_bands=4"),
        ({"inverse_bands": 0}, "inverse_bands=0"),
        ({"inverse_bands": 3, "sampling": "cyclic-poisson"}, "inverse_bands=3: is for balls-in-bins"),
        ({"inverse_bands": 3, "bands": 3}, "inverse_bands=3: is for balls-in-bins"),
        ({"mechanism": "blt", "bands": 8}, "bands=8: has no meaning with mechanism='blt'"),
        ({"mechanism": "blt", "strategy": strategies.Identity(80)}, "has no meaning with mechanism='blt'"),
        ({"certify_seconds": 0}, "certify_seconds=0"),
        ({"certify_seconds": -1, "sampling": "cyclic-poisson"}, "certify_seconds=-1"),
        ({"certify_seconds": -1, "participation": FixedEpochs(4)}, "certify_seconds=-1"),
        ({"mechanism": "blt", "participation": FixedEpochs(4)}, "mechanism='blt': plans with participation="),
        ({"mechanism": "banded-inverse", "participation": FixedEpochs(4)}, "mechanism='banded-inverse'"),
        ({"inverse_bands": 3, "participation": FixedEpochs(4)}, "inverse_bands=3: has no meaning"),
        ({"mechanism": "blt", "parameters": 10, "memory": 40.0}, "needs memory for 4 vectors"),
    ],
)
def test_nonsense_gets_one_clear_sentence(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        bandmf.plan(**{**SMALL, **given})
    assert "\n" not in str(caught.value)


def test_a_strategy_for_bins_redrawn_every_epoch_is_found():
    """Against one that was made for fixed bins."""
    asked = {**QUICK, "sampling": "balls-in-bins-redrawn", "certify_seconds": 5}
    found = bandmf.plan(**asked)
    assert (found.sampling, found.mechanism, found.vectors) == ("balls-in-bins-redrawn", "banded-inverse", 0)
    fixed = bandmf.plan(**QUICK).strategy
    given = {name: value for name, value in asked.items() if name not in ("mechanism", "inverse_bands")}
    assert found.rmse < 1.01 * bandmf.plan(**given, strategy=fixed).rmse


# --- schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["auto", "cyclic-poisson", "b-min-sep"])
def test_a_schedule_never_raises_the_error(sampling):
    """Against the plan that does not know of it, measured on the schedule."""
    known = workloads.momentum(80, 0.9, workloads.cosine(80))
    bands = {"bands": 4} if sampling == "b-min-sep" else {}
    informed = bandmf.plan(**SMALL, sampling=sampling, workload=known, **bands)
    unaware = bandmf.plan(**SMALL, sampling=sampling, workload=workloads.momentum(80, 0.9), **bands)
    error = unaware.noise_scale * math.sqrt(bandmf.error.mean_squared_error(unaware.strategy, workload=known))
    assert informed.sampling == unaware.sampling
    assert informed.rmse <= 1.003 * error  # certificates differ in their draws
    if sampling == "auto":
        assert informed.sampling == "balls-in-bins"
        assert informed.rmse < 0.9 * error


def test_a_schedule_is_planned_without_amplification_too():
    found = bandmf.plan(
        epsilon=8, delta=1e-5, batch_size=50, steps=80, workload=SCHEDULED, participation=FixedEpochs(4)
    )
    error = math.sqrt(bandmf.error.mean_squared_error(found.strategy, workload=SCHEDULED))
    assert found.rmse == pytest.approx(found.noise_scale * error)


# --- b-min-sep ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separated():
    return bandmf.plan(**{**SMALL, "steps": 40}, sampling="b-min-sep", bands=4)


def test_a_plan_with_b_min_sep_has_a_certificate_and_a_separation(separated, tmp_path):
    assert (separated.sampling, separated.separation, separated.cycle) == ("b-min-sep", 4, None)
    assert separated.sampling_probability == pytest.approx(1 / (20 - 4 + 1))
    assert separated.noise_scale == separated.certificate.sigma * MARGIN
    assert bandmf.Plan.load(separated.save(tmp_path / "plan.json")) == separated
    assert separated.verify() == separated.certificate
    assert "b-min-sep, warm start" in separated.explain()


def test_its_sampler_keeps_examples_apart_and_batches_at_their_size(separated):
    batches = sampler(separated, Key(bytes(32)))
    taken = np.array([np.isin(np.arange(1_000), batches.batch(step)) for step in range(40)])
    steps = [np.flatnonzero(column) for column in taken.T]
    assert min(np.diff(each).min() for each in steps if len(each) > 1) >= 4
    assert taken.sum() / 40 == pytest.approx(50, abs=5)


@pytest.mark.long
def test_the_last_digit_of_a_ratio_refuses_nothing():
    """examples / batch_size is 7, but steps / (steps * batch_size / examples) a little less."""
    found = bandmf.plan(epsilon=8, delta=1e-3, examples=70, batch_size=10, steps=9, sampling="b-min-sep", bands=7)
    assert found.sampling_probability == 1
    one, other = (
        bandmf.plan(epsilon=8, delta=1e-3, examples=n, batch_size=b, steps=30, sampling="b-min-sep", bands=2)
        for n, b in ((1000, 16.6), (1500, 24.9))
    )
    assert one.noise_scale == other.noise_scale


def test_a_certificate_for_another_sampling_is_refused(plan, separated):
    with pytest.raises(ValueError, match="needs a certificate of its own"):
        dataclasses.replace(separated, certificate=plan.certificate)
    with pytest.raises(ValueError, match="is for"):
        dataclasses.replace(separated, batch_size=40.0)


def test_bands_are_found_by_doubling_and_halving():
    found = bandmf.plan(epsilon=8, delta=1e-3, examples=600, batch_size=50, steps=24, sampling="b-min-sep")
    others = [c for c in found.candidates if c.bands != found.bands]
    assert others
    assert all(c.rmse > 0.97 * found.rmse for c in others)  # the chosen one is certified, the others estimated


def test_a_batch_size_that_bins_cannot_have_is_mentioned(plan):
    given = {**QUICK, "batch_size": 999, "steps": 3}
    for sampling in ("auto", "balls-in-bins"):
        found = bandmf.plan(**{**given, "sampling": sampling})
        assert (found.batch_size, found.cycle) == (500, 2)
        assert "batches have 500 examples on average, not batch_size=999" in found.explain()
    assert "on average, not" not in plan.explain()
    assert "on average, not" not in bandmf.plan(**{**QUICK, "batch_size": 50.2, "steps": 40}).explain()


@pytest.mark.parametrize(("gain", "sampling"), [(0.004, "cyclic-poisson"), (0.006, "balls-in-bins")])
def test_auto_takes_more_memory_only_for_half_a_percent(gain, sampling, monkeypatch):
    """Cyclic Poisson sampling is best with one band here; bins of a BLT keep four vectors."""
    budget = {**SMALL, "epsilon": 1.0, "examples": 1_000, "batch_size": 100, "steps": 80}
    paper = bandmf.plan(**budget, sampling="cyclic-poisson", bands=1)
    chosen = bandmf.plan(**SMALL, mechanism="blt")
    candidate = chosen.candidates[-1]._replace(rmse=(1 - gain) * paper.rmse)
    found = Found(candidate, chosen.strategy)
    monkeypatch.setattr(planner.bins, "search", lambda *_: [found])
    monkeypatch.setattr(planner.bins, "certified", lambda *_: (found, None))
    best = (paper.candidates[-1]._replace(rmse=paper.rmse), paper.strategy, None)
    monkeypatch.setattr(planner, "_best_cyclic", lambda *_, **__: best)
    monkeypatch.setattr(planner, "_build", lambda request, *_, **__: request.sampling or "cyclic-poisson")
    assert bandmf.plan(**budget) == sampling


# --- the batches ----------------------------------------------------------------------------------------


def test_the_sampler_of_the_plan_draws_each_example_once_an_epoch(plan):
    batches = sampler(plan, Key(bytes(32)))
    assert isinstance(batches, BallsInBins)
    for epoch in range(4):
        taken = np.concatenate([batches.batch(20 * epoch + step) for step in range(20)])
        np.testing.assert_array_equal(np.sort(taken), np.arange(1_000))


@pytest.mark.parametrize(
    ("examples", "batch_size", "steps", "cycle"),
    [(60_000, 256, 938, 235), (1_000, 50, 80, 20), (7, 3, 9, 3), (10, 0.1, 100, 100), (1_247, 64, 19, 19)],
)
def test_a_cycle_is_an_epoch_rounded_up_or_the_only_epoch(examples, batch_size, steps, cycle):
    assert whole_cycle(examples, batch_size, steps) == cycle


def test_the_divisor_is_the_expected_size_of_a_bin():
    found = bandmf.plan(epsilon=8, delta=1e-5, examples=1_000, batch_size=60, steps=80, sampling="balls-in-bins")
    assert (found.cycle, found.batch_size) == (17, 1_000 / 17)
