"""What is cached saves time and makes no plan valid; what anybody else could have written there is not believed."""

from __future__ import annotations

import json
import logging
import os
import stat
from functools import lru_cache

import pytest

import bandmf
from bandmf import Plan, _cache, _files, accounting
from bandmf.accounting import accountant, verified
from bandmf.accounting.bins import Certificate
from bandmf.accounting.certified import NotCertifiedError
from bandmf.planning.plan_file import digest

SMALL = {"epsilon": 4, "delta": 1e-5, "examples": 400, "batch_size": 20, "steps": 40}
POISSON = {**SMALL, "sampling": "cyclic-poisson", "bands": 4}
BINS = {**SMALL, "sampling": "balls-in-bins", "mechanism": "banded-inverse", "inverse_bands": 3, "certify_seconds": 5}
needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users have no numbers here")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of its own, by a process that remembers nothing."""
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "cache"))
    accountant.evaluate.cache_clear()
    _files._ignored.cache_clear()
    return tmp_path / "cache"


def plant(folder, kind, edit):
    """Every answer of a kind is another one, with its seal."""
    for path in (folder / kind).glob("*.json"):
        entry = json.loads(path.read_bytes())
        question = json.loads(entry["question"])
        entry["answer"] = edit(question, entry["answer"])
        entry["seal"] = _cache._seal(entry["question"], entry["answer"])
        path.write_text(json.dumps(entry))


def rewritten(path, **changes):
    """A plan file with other entries and the right digest."""
    contents = {**json.loads(path.read_text()), **changes}
    contents.pop("digest")
    path.write_text(json.dumps({**contents, "digest": digest(contents)}))
    return path


# --- planted answers -------------------------------------------------------------------------------------


def test_no_answer_of_the_cache_makes_a_plan_valid(folder, tmp_path):
    plan = bandmf.plan(**POISSON)
    path = rewritten(plan.save(tmp_path / "plan.json"), noise_multiplier=plan.noise_multiplier / 2)
    event, half = plan.events[0], plan.noise_multiplier / 2

    def lie(question, answer):
        return answer / 2 if question["quantity"] == "noise_multiplier" else 3.9

    accounting.spent(event, half, plan.delta)  # makes the entry
    plant(folder, "accounting", lie)
    accountant.evaluate.cache_clear()
    assert accounting.spent(event, half, plan.delta) == 3.9  # the lie is there
    with pytest.raises(ValueError, match="the accountant finds"):
        Plan.load(path)
    with pytest.raises(ValueError, match="the accountant finds"):
        bandmf.plan(**POISSON)


def test_verify_believes_neither_the_cache_nor_what_the_process_remembers(folder, monkeypatch):
    plan, asked, evaluate = bandmf.plan(**POISSON), [], accountant.evaluate.__wrapped__

    @lru_cache
    def counting(*arguments):
        asked.append(arguments)
        return evaluate(*arguments)

    monkeypatch.setattr(accountant, "evaluate", counting)
    plan.confirm()
    plan.confirm()
    assert len(asked) == 1
    plan.verify()
    plan.verify()
    assert len(asked) == 3


def test_verify_finds_a_certificate_that_was_planted_as_verified(folder, tmp_path):
    plan = bandmf.plan(**BINS)
    found = plan.certificate
    false = {**found.to_dict(), "sigma": found.sigma / 2}
    path = rewritten(plan.save(tmp_path / "p.json"), noise_multiplier=plan.noise_multiplier / 2, certificate=false)
    with pytest.raises(NotCertifiedError):
        Certificate.from_dict(false).verify(_gram(plan))
    with pytest.raises(ValueError, match="not certified"):
        Plan.load(path)
    verified.remember(Certificate.from_dict(false), _gram(plan))  # as whoever owns the cache can
    loaded = Plan.load(path)
    with pytest.raises(NotCertifiedError):
        loaded.verify()


def _gram(plan):
    return verified.subject(plan.certificate, plan.strategy)


# --- whose they are --------------------------------------------------------------------------------------


QUESTION = {"of": 1}


def kept(folder):
    assert _cache.remember("answers", QUESTION, 2.5) == 2.5
    (file,) = (folder / "answers").iterdir()
    return file


def test_new_folders_and_files_are_the_users_alone(folder):
    umask = os.umask(0)
    try:
        file = kept(folder)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "answers", file)] == [0o700, 0o700, 0o600]


@needs_users
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_is_ignored_and_named_once(mode, which, folder, caplog):
    file = kept(folder)
    path = file if which == "file" else file.parent
    path.chmod(mode)
    with caplog.at_level(logging.WARNING, "bandmf"):
        assert _cache.recall("answers", QUESTION) is None
        assert _cache.recall("answers", QUESTION) is None
    assert [f"{path} is ignored: it can be written by others" in text for text in caplog.messages] == [True]
    assert _cache.remember("answers", QUESTION, 3.5) == 3.5
    if which == "file":  # replaced by one that is ours
        assert _cache.recall("answers", QUESTION) == 3.5
    else:
        assert json.loads(file.read_text())["answer"] == 2.5
        path.chmod(0o755)
        assert _cache.recall("answers", QUESTION) == 2.5


@needs_users
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_others_is_ignored(which, folder, caplog):
    file = kept(folder)
    path = file if which == "file" else file.parent
    os.chown(path, 12345, 12345)
    with caplog.at_level(logging.WARNING, "bandmf"):
        assert _cache.recall("answers", QUESTION) is None
    assert "belongs to another user (number 12345)" in caplog.text


@needs_users
def test_who_the_user_is_decides(folder, monkeypatch):
    """As if others had written what we have: root's is believed, that of third persons is not."""
    kept(folder)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert (_cache.recall("answers", QUESTION) == 2.5) == (owner == 0)


@needs_users
def test_no_file_is_read_through_a_link(folder, tmp_path):
    file = kept(folder)
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert _cache.recall("answers", QUESTION) is None
    assert _cache.remember("answers", QUESTION, 3.5) == _cache.recall("answers", QUESTION) == 3.5
    assert not file.is_symlink()
    assert json.loads((tmp_path / "elsewhere.json").read_text())["answer"] == 2.5


@needs_users
def test_a_link_to_a_folder_counts_as_the_folder(folder, tmp_path):
    kept(folder)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert _cache.recall("answers", QUESTION) == 2.5
    (tmp_path / "elsewhere" / "answers").chmod(0o777)
    assert _cache.recall("answers", QUESTION) is None


@needs_users
def test_a_cache_that_is_ignored_is_no_error(folder):
    plan = bandmf.plan(**BINS)
    for path in folder.iterdir():
        path.chmod(0o777)
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    again = bandmf.plan(**BINS)
    assert again.certificate.seed != plan.certificate.seed
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == before
