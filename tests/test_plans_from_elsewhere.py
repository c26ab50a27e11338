"""Plans and cached answers that another machine, version or person made: verified, computed again, or refused."""

from __future__ import annotations

import errno
import json
import logging
import time

import pytest

import bandmf
from bandmf import _cache
from bandmf.accounting import verified
from bandmf.accounting.samples import Sums
from bandmf.planning.plan_file import digest
from bandmf.planning.search import bins
from sweeps import in_turn, spread

QUICK = {
    "epsilon": 8.0, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 40,
    "mechanism": "banded-inverse", "inverse_bands": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return bandmf.plan(**QUICK)


@pytest.fixture(scope="module")
def separated():
    small = {name: QUICK[name] for name in ("epsilon", "delta", "examples", "batch_size", "steps")}
    return bandmf.plan(**small, sampling="b-min-sep", bands=2, certify_seconds=30)


def forged(plan, path, **changes):
    """A plan file whose certificate says something else, with the right digest."""
    contents = json.loads(plan.save(path).read_text())
    contents["certificate"].update(changes)
    contents.pop("digest")
    path.write_text(json.dumps({**contents, "digest": digest(contents)}))
    return path


@pytest.mark.parametrize(("which", "name"), in_turn(["plan", "separated"], ["samples", "add_samples"]))
def test_a_certificate_that_would_take_hours_to_verify_is_refused(which, name, request, tmp_path):
    path = forged(request.getfixturevalue(which), tmp_path / "plan.json", **{name: 10**10})
    start = time.perf_counter()
    with pytest.raises(ValueError, match=rf"{name}=10000000000: must be .*hours to verify; make a new plan"):
        bandmf.Plan.load(path)
    assert time.perf_counter() - start < 2


def test_a_long_verification_says_so(plan, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "another machine"))
    monkeypatch.setattr(verified, "_PATIENCE", 0.0)
    verify = type(plan.certificate).verify

    def slow(*arguments, **options):
        time.sleep(0.2)
        return verify(*arguments, **options)

    monkeypatch.setattr(type(plan.certificate), "verify", slow)
    with caplog.at_level(logging.WARNING, "bandmf"):
        bandmf.Plan.load(plan.save(tmp_path / "plan.json"))
        assert "verifying a certificate of" in caplog.text
        caplog.clear()
        bandmf.Plan.load(tmp_path / "plan.json")
        assert not caplog.text  # it was verified before


# --- answers in the cache ---------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A plan in a cache of its own, and a function that changes the entries of a kind there, with the right seal."""
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    plan = bandmf.plan(**QUICK, certify_seconds=10)

    def change(what, edit):
        for path in (tmp_path / "plans").glob("*.json"):
            entry = json.loads(path.read_bytes())
            if what in entry["question"]:
                entry["answer"] = edit(entry["answer"])
                entry["seal"] = _cache._seal(entry["question"], entry["answer"])
                path.write_text(json.dumps(entry))

    return plan, change


UNUSABLE = {
    "a field more": lambda kept: {**kept, "more": 1},
    "a field less": lambda kept: {name: value for name, value in kept.items() if name != "attempt"},
    "false": lambda kept: {**kept, "sigma": 0.9 * kept["sigma"]},
    "of another budget": lambda kept: {**kept, "epsilon": 4.0},
    "no certificate": lambda kept: [],
}


@pytest.mark.parametrize("how", spread(UNUSABLE, 2))
def test_a_cached_certificate_that_cannot_be_used_is_computed_again_and_replaced(how, cached):
    plan, change = cached
    change("certificate of", UNUSABLE[how])
    again = bandmf.plan(**QUICK, certify_seconds=10)
    assert again.certificate.seed != plan.certificate.seed
    assert bandmf.plan(**QUICK, certify_seconds=10) == again  # which is now what is kept


@pytest.mark.parametrize(
    "answer",
    spread([{"strategy": {"scales": [0.1]}, "sigma": 1.0}, {"sigma": 1.0}, {"strategy": 1, "sigma": 1.0}, 3], 2),
)
def test_a_cached_strategy_that_cannot_be_read_is_searched_again(answer, cached):
    plan, change = cached
    change("strategy of", lambda kept: answer)
    again = bandmf.plan(**QUICK, certify_seconds=10)
    assert (again.sampling, again.strategy.strategy.inverse_bands) == ("balls-in-bins", 3)
    assert again.rmse == pytest.approx(plan.rmse, rel=0.02)


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert bandmf.plan(**QUICK, certify_seconds=10).certificate is not None


# --- budgets far from any use -----------------------------------------------------------------------------


def far(epsilon):
    """Means so small that their squares vanish."""
    budget = {"epsilon": epsilon, "delta": 1e-6, "examples": 12_800, "batch_size": 100, "steps": 256}
    return bandmf.plan(**budget, mechanism="banded-inverse", certify_seconds=20)


def test_a_large_epsilon_is_certified():
    assert far(50.0).certificate.epsilon == 50.0


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_budget_far_from_any_use_ends_in_a_sentence():
    with pytest.raises(ValueError, match=r"^delta=1e-06: .*samples do not show it near .* sampling='cyclic-poisson'"):
        far(100.0)


@pytest.mark.parametrize("error", [ValueError("no sigma was found"), ZeroDivisionError("division by zero")])
def test_whatever_keeps_bins_from_being_certified_auto_falls_back(error, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(bins, "certified", fails)
    small = {name: QUICK[name] for name in ("epsilon", "delta", "examples", "batch_size", "steps")}
    found = bandmf.plan(**small)
    assert found.sampling == "cyclic-poisson"
    assert f"could not be certified: {error}" in found.choice


def test_a_mean_whose_square_vanishes_has_a_relative_variance():
    assert Sums(4, 4e-200, 8e-400, 2e-200).relative_variance == 0.0
