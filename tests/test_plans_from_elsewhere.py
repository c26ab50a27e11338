"""Plans and cached answers that another machine, version or person made: verified, computed again, or refused."""

from __future__ import annotations

import json
import logging
import time

import pytest

import bandmf
from bandmf.accounting import verified
from bandmf.planning.plan_file import digest

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
    return bandmf.plan(**small, sampling="b-min-sep", bands=2, certify_seconds=5)


def forged(plan, path, **changes):
    """A plan file whose certificate says something else, with the right digest."""
    contents = json.loads(plan.save(path).read_text())
    contents["certificate"].update(changes)
    contents.pop("digest")
    path.write_text(json.dumps({**contents, "digest": digest(contents)}))
    return path


@pytest.mark.parametrize("which", ["plan", "separated"])
@pytest.mark.parametrize("name", ["samples", "add_samples"])
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
