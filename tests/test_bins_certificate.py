"""Certificates: they cover the truth as often as they say, refuse too little noise, and can be computed again."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bandmf.accounting.bins import Certificate, NotCertifiedError, certify, gram_matrix
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.divergences import add_sums, remove_sums
from bandmf.accounting.bins.loss import privacy_loss
from bandmf.accounting.certified import FAILURE
from bandmf.accounting.samples import BETS, Sums, sample_sums, upper_bound
from bandmf.accounting.verified import verify_once
from bandmf.strategies import banded_inverse_square_root
from bins_oracles import TWO, gaussian_delta, gaussian_sigma, two_position_deltas

ONE = np.array([[1.0]])
GRAM = gram_matrix(banded_inverse_square_root(64, 4), 8)
COPIES = 3


def small_certificate(**changes):
    """A certificate of eight positions that takes a fraction of a second."""
    given = {"samples": 20_000, "seed": 7, "copies": COPIES, **changes}
    return certify(GRAM, 2.7, 4.0, 1e-3, **given)


# --- coverage -----------------------------------------------------------------------------------------


def misses(case, direction, certificates, count, failure, bound_of=upper_bound):
    """The share of certificates, of `count` samples each, whose bound is below the true divergence."""
    gram, sigma, epsilon, truth = case
    loss, copies, missed = privacy_loss(gram, sigma), Copies(privacy_loss(gram, sigma), 3), 0
    for seed in range(certificates):
        if direction == "remove":
            sums, bound = remove_sums(copies, epsilon, count, seed, 1), copies.bound(epsilon)
        else:
            sums, bound = add_sums(loss, epsilon, count, seed, 1)
        missed += bound_of(sums, bound, failure) < truth
    return missed / certificates


CASES = {
    "one": (ONE, 2.0, 1.0, gaussian_delta(0.25, 1.0), gaussian_delta(0.25, 1.0)),
    "two": (TWO, 1.5, 1.0, *two_position_deltas(TWO / 2.25, 1.0)),
}


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [40, 400])
def test_a_certificate_covers_the_truth(name, direction, count):
    gram, sigma, epsilon, remove, add = CASES[name]
    case = (gram, sigma, epsilon, remove if direction == "remove" else add)
    assert misses(case, direction, 600, count, 0.05) <= 0.05


@pytest.mark.long
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [20, 100, 1000])
def test_ten_thousand_certificates_cover_the_truth(name, direction, count):
    gram, sigma, epsilon, remove, add = CASES[name]
    case = (gram, sigma, epsilon, remove if direction == "remove" else add)
    assert misses(case, direction, 10_000, count, 0.05) <= 0.05


def test_a_planted_bound_without_margin_is_caught_by_the_coverage():
    gram, sigma, epsilon, remove, _ = CASES["two"]
    assert misses((gram, sigma, epsilon, remove), "remove", 300, 400, 0.05, lambda s, b, f: s.mean) > 0.3


def false_certificates(tries, samples):
    """The share of seeds that certify a delta which, less the failure of 5 percent, is just below the truth."""
    gram, sigma, epsilon, remove, _ = CASES["two"]
    failure, passed = 0.05, 0
    for seed in range(tries):
        given = {"samples": samples, "seed": seed, "copies": 3, "failure": failure, "workers": 1}
        try:
            certify(gram, sigma, epsilon, remove * (1 - 1e-9) + failure, **given)
            passed += 1
        except NotCertifiedError:
            pass
    return passed / tries


def test_false_certificates_are_as_rare_as_they_say():
    assert false_certificates(300, 100) <= 0.05


@pytest.mark.long
@pytest.mark.parametrize("samples", [30, 3000])
def test_of_ten_thousand_false_certificates_at_most_five_percent_pass(samples):
    assert false_certificates(10_000, samples) <= 0.05


def test_planted_certificates_without_margin_are_caught(monkeypatch):
    module = importlib.import_module("bandmf.accounting.bins.certificate")
    monkeypatch.setattr(module, "upper_bound", lambda sums, bound, failure: sums.mean)
    assert false_certificates(300, 100) > 0.2


def test_the_upper_bound_is_the_empirical_bernstein_bound():
    samples = np.random.default_rng(0).random(50)
    sums = Sums(50, samples.sum(), np.square(samples).sum(), samples.max())
    log_term = math.log(2 / 0.01)
    expected = samples.mean() + math.sqrt(2 * samples.var(ddof=1) * log_term / 50) + 7 * 3 * log_term / (3 * 49)
    assert upper_bound(sums, 3.0, 0.01) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("largest", [1.1, math.nan])
def test_a_sample_above_its_bound_stops_everything(largest):
    with pytest.raises(AssertionError, match="proved bound"):
        upper_bound(Sums(10, 1.0, 1.0, largest), 1.0, 0.1)


# --- what is certified --------------------------------------------------------------------------------


def test_delta_holds_both_bounds_and_the_failure():
    certificate = small_certificate()
    assert max(certificate.remove, certificate.add) + certificate.failure <= certificate.delta
    assert certificate.failure == FAILURE * certificate.delta == 1e-6


def test_too_little_noise_is_refused():
    sigma = gaussian_sigma(1.0, 1e-6)
    assert certify(ONE, 1.006 * sigma, 1.0, 1e-6, samples=200_000, seed=1, copies=19)
    for seed in range(5):
        with pytest.raises(NotCertifiedError, match="not certified"):
            certify(ONE, 0.999 * sigma, 1.0, 1e-6, samples=20_000, seed=seed, copies=19)


def test_too_few_samples_are_refused():
    with pytest.raises(NotCertifiedError, match="raise sigma or samples"):
        small_certificate(samples=100)


def test_the_add_direction_is_checked_on_its_own():
    """Where only the bound without sampling is allowed and is too large, nothing is certified."""
    with pytest.raises(NotCertifiedError) as refused:
        certify(GRAM, 2.7, 4.0, 1e-3, samples=20_000, seed=7, copies=COPIES, add_samples=0)
    assert refused.value.remove < 1e-3 < refused.value.add


def test_a_later_attempt_has_a_smaller_share_of_the_failure():
    bounds = [small_certificate(attempt=attempt).remove for attempt in (1, 2, 5)]
    assert bounds[0] < bounds[1] < bounds[2]


def test_seconds_instead_of_samples():
    assert certify(GRAM, 3.0, 4.0, 1e-3, seconds=0.5, seed=1).samples > 100
    for both in ({}, {"samples": 10, "seconds": 1.0}):
        with pytest.raises(ValueError, match="either samples or seconds"):
            certify(GRAM, 3.0, 4.0, 1e-3, **both)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sigma", 0.0), ("sigma", math.nan), ("epsilon", -1.0), ("epsilon", math.inf), ("delta", 0.0), ("delta", 1.0)],
)
def test_nonsense_is_refused(name, value):
    given = {"sigma": 2.7, "epsilon": 4.0, "delta": 1e-3, name: value}
    with pytest.raises(ValueError, match=name):
        certify(GRAM, **given, samples=100, copies=COPIES)


# --- verification -------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers():
    certificate = small_certificate()
    assert certificate.verify(GRAM) == certificate == small_certificate()


def test_another_seed_verifies_too_with_other_numbers():
    certificate = small_certificate()
    again = certificate.verify(GRAM, seed=8)
    assert again.remove != certificate.remove
    assert again.remove == pytest.approx(certificate.remove, rel=0.1)


TAMPERED = {
    "epsilon": 3.9,
    "delta": 0.5e-3,  # below what was shown; a delta in between would be shown, and true
    "sigma": 2.699,
    "cycle": 7,
    "gram_marks": (1.0, 2.0, 3.0),
    "seed": 8,
    "copies": 4,
    "samples": 25_000,
    "weight_bound": 2e-3,
    "remove": 1e-5,
    "add_samples": 15_000,
    "add": 1e-5,
    "failure": 0.5e-5,
    "attempt": 2,
}


def test_every_field_is_tampered_with_below():
    assert set(TAMPERED) == set(small_certificate().to_dict())


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_certificate_is_refused(name):
    stored = json.loads(json.dumps(small_certificate().to_dict()))
    stored[name] = TAMPERED[name]
    with pytest.raises(ValueError, match=r"certif|made for another"):
        Certificate.from_dict(stored).verify(GRAM)


def test_a_forged_sigma_is_refused_with_any_seed():
    forged = replace(small_certificate(), sigma=2.5)
    for seed in (None, 1, 2):
        with pytest.raises(NotCertifiedError):
            forged.verify(GRAM, seed=seed)


def test_another_gram_matrix_is_refused():
    with pytest.raises(NotCertifiedError, match="another Gram"):
        small_certificate().verify(1.0001 * GRAM)


def test_rounding_of_another_machine_is_tolerated():
    small_certificate().verify(GRAM * (1 + 1e-13))


def test_certificates_survive_json():
    certificate = small_certificate()
    assert Certificate.from_dict(json.loads(json.dumps(certificate.to_dict()))) == certificate


@pytest.mark.parametrize(
    ("name", "value"),
    [("copies", 1), ("remove", math.nan), ("samples", 1), ("failure", 1e-2), ("gram_marks", [1.0]), ("seed", "x")],
)
def test_a_certificate_of_impossible_form_is_not_read(name, value):
    with pytest.raises(ValueError, match=name):
        Certificate.from_dict({**small_certificate().to_dict(), name: value})


def test_a_certificate_with_missing_or_unknown_parts_is_not_read():
    stored = small_certificate().to_dict()
    with pytest.raises(ValueError, match="extra"):
        Certificate.from_dict({**stored, "extra": 1})
    del stored["seed"]
    with pytest.raises(ValueError, match="seed"):
        Certificate.from_dict(stored)


def test_bounds_above_delta_are_no_certificate():
    with pytest.raises(NotCertifiedError, match="exceed"):
        replace(small_certificate(), remove=2e-3)


# --- remembered ---------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """How often a certificate was really verified, with a cache of its own."""
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path))
    counted = []
    verify = Certificate.verify

    def counting(self, *arguments, **options):
        counted.append(self)
        return verify(self, *arguments, **options)

    monkeypatch.setattr(Certificate, "verify", counting)
    return counted


def test_the_same_certificate_is_verified_once(runs):
    certificate = small_certificate()
    for _ in range(3):
        verify_once(certificate, GRAM)
    assert len(runs) == 1
    verify_once(small_certificate(seed=9), GRAM)
    verify_once(certificate, GRAM * (1 + 1e-13))
    assert len(runs) == 3


def test_what_does_not_verify_is_not_remembered(runs):
    forged = replace(small_certificate(), sigma=2.5)
    for _ in range(2):
        with pytest.raises(NotCertifiedError):
            verify_once(forged, GRAM)
    assert len(runs) == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"question": "", "seal": ""}', b"\xff"])
def test_a_damaged_memory_is_ignored(runs, tmp_path, damage):
    certificate = small_certificate()
    verify_once(certificate, GRAM)
    (file,) = (tmp_path / "certificates").iterdir()
    file.write_bytes(damage)
    verify_once(certificate, GRAM)
    assert len(runs) == 2


def test_a_memory_moved_to_another_certificate_is_ignored(runs, tmp_path):
    certificate, forged = small_certificate(), replace(small_certificate(), sigma=2.5)
    verify_once(certificate, GRAM)
    (file,) = (tmp_path / "certificates").iterdir()
    with pytest.raises(NotCertifiedError):
        verify_once(forged, GRAM)
    for name in {path.name for path in (tmp_path / "certificates").iterdir()} | {"x.json"}:
        (tmp_path / "certificates" / name).write_bytes(file.read_bytes())
    with pytest.raises(NotCertifiedError):
        verify_once(forged, GRAM)


def test_without_a_cache_everything_is_verified(runs, monkeypatch):
    monkeypatch.setenv("BANDMF_CACHE", "off")
    certificate = small_certificate()
    for _ in range(2):
        verify_once(certificate, GRAM)
    assert len(runs) == 2


# --- bets ---------------------------------------------------------------------------------------------


def test_equal_samples_have_the_bound_of_the_best_bet():
    """All samples are B / 4: by the bet r, mu <= (1 - (1 - r B / 4) f^(1 / n)) / r."""
    sums = sample_sums(lambda generator, rows: np.full(rows, 0.5), 1000, 4, 0, 0, bound=2.0)
    wins = [(1 - (1 - bet / 4) * (0.01 / len(BETS)) ** (1 / 1000)) * 2 / bet for bet in BETS]
    assert upper_bound(sums, 2.0, 0.01) == pytest.approx(min(wins), rel=1e-6)
    assert 0.5 < upper_bound(sums, 2.0, 0.01) < upper_bound(replace(sums, logs=()), 2.0, 0.01)


def test_a_planted_bet_above_the_bound_is_caught_by_the_coverage():
    """Rare samples near B decide: with bets as for a B of a twentieth, the rare ones count for too little."""

    def low(sums, bound, failure):
        return upper_bound(replace(sums, logs=tuple(logs / 20 for logs in sums.logs), largest=0.0), bound, failure)

    gram, sigma, epsilon, remove, _ = CASES["two"]
    assert misses((gram, sigma, epsilon, remove), "remove", 300, 400, 0.05, low) > 0.3
