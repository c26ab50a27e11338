"""Certificates from lines: they cover the truth, refuse too little noise, and can be computed again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bandmf.accounting import bins
from bandmf.accounting.bins import NotCertifiedError, gram_matrix
from bandmf.accounting.lines import Certificate, calibrate, certificate, certify, estimate
from bandmf.strategies import banded_inverse_square_root
from bins_oracles import TWO, gaussian_sigma, two_position_deltas

ONE = np.array([[1.0]])
GRAM = gram_matrix(banded_inverse_square_root(64, 4), 8)


def small_certificate(**changes):
    """A certificate of eight positions that takes a fraction of a second."""
    given = {"length": 5, "samples": 20_000, "rate": 200.0, "add_samples": 5_000, "add_rate": 200.0, "seed": 7}
    return certify(GRAM, 8.2, 1.0, 1e-3, **{**given, **changes})


# --- what is certified --------------------------------------------------------------------------------


def test_delta_holds_both_bounds_and_the_failure():
    made = small_certificate()
    assert max(made.remove, made.add) + made.failure <= made.delta
    assert made.failure == 1e-6


def false_certificates(tries, rate):
    """The share of seeds that certify a delta which, less the failure of 5 percent, is just below the truth."""
    failure, passed = 0.05, 0
    remove, _ = two_position_deltas(TWO / 2.25, 1.0)
    for seed in range(tries):
        given = {"length": 2, "samples": 100, "rate": rate, "add_samples": 100, "add_rate": rate, "seed": seed}
        try:
            certify(TWO, 1.5, 1.0, remove * (1 - 1e-6) + failure, failure=failure, workers=1, **given)
            passed += 1
        except NotCertifiedError:
            pass
    return passed / tries


def test_false_certificates_are_as_rare_as_they_say():
    assert false_certificates(300, rate=5.0) <= 0.05


def test_planted_certificates_without_margin_are_caught(monkeypatch):
    monkeypatch.setattr(certificate, "upper_bound", lambda logs, bound, rate, failure: logs.mean / rate)
    assert false_certificates(100, rate=1e-3) > 0.2


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_one_position_is_certified_within_a_percent(epsilon):
    truth = gaussian_sigma(epsilon, 1e-6)
    found = calibrate(ONE, epsilon, 1e-6, seed=1)
    assert truth < found.sigma < 1.01 * truth


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-5), (1.0, 1e-6), (2.0, 1e-4)])
def test_a_certified_sigma_is_a_little_above_that_of_independent_samples(epsilon, delta):
    found = calibrate(GRAM, epsilon, delta, seed=2)
    other = bins.estimate(GRAM, epsilon, delta, samples=2**15)
    assert found.sigma > other.sigma * (1 - 4 * other.relative_standard_error)
    assert found.sigma < other.sigma * (1.01 + 4 * other.relative_standard_error)


def test_few_samples_suffice_where_epsilon_is_small():
    """At epsilon 0.5, lines need less than a tenth of the samples that chains need."""
    gram = gram_matrix(banded_inverse_square_root(512, 8), 64)
    made = calibrate(gram, 0.5, 1e-6, seed=3)
    chains = bins.estimate(gram, 0.5, 1e-6, samples=2**12).pilot.margin_samples(0.05, math.log(8e9))
    assert made.samples < chains / 10


def test_too_little_noise_is_refused():
    sigma = estimate(GRAM, 1.0, 1e-3, samples=2**13).sigma
    for seed in range(5):
        with pytest.raises(NotCertifiedError, match="not certified"):
            certify(GRAM, 0.995 * sigma, 1.0, 1e-3, length=5, samples=20_000, rate=200.0, seed=seed)


def test_too_little_time_is_refused():
    with pytest.raises(NotCertifiedError, match="give more seconds"):
        calibrate(GRAM, 1.0, 1e-3, seconds=1e-4)


def test_a_rate_above_the_bound_is_refused():
    with pytest.raises(NotCertifiedError, match="rate"):
        small_certificate(rate=1e9)


# --- verification -------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers():
    made = small_certificate()
    assert made.verify(GRAM) == made == small_certificate(workers=1)


def test_another_seed_verifies_too_with_other_numbers():
    made = small_certificate()
    again = made.verify(GRAM, seed=8)
    assert again.remove != made.remove
    assert again.remove == pytest.approx(made.remove, rel=0.1)


TAMPERED = {
    "epsilon": 0.9,
    "delta": 0.5 * small_certificate().remove,
    "sigma": 8.199,
    "cycle": 7,
    "gram_marks": (1.0, 2.0, 3.0),
    "seed": 8,
    "length": 6,
    "samples": 25_000,
    "rate": 100.0,
    "weight_bound": 1e-9,
    "remove": 1e-7,
    "add_samples": 6_000,
    "add_rate": 100.0,
    "add": 1e-7,
    "failure": 0.5e-6,
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
    made = calibrate(GRAM, 1.0, 1e-3, seed=4)
    forged = replace(made, sigma=0.98 * made.sigma)
    for seed in (None, 1, 2):
        with pytest.raises(NotCertifiedError):
            forged.verify(GRAM, seed=seed)


def test_another_gram_matrix_is_refused():
    with pytest.raises(NotCertifiedError, match="another Gram"):
        small_certificate().verify(1.0001 * GRAM)


def test_certificates_survive_json():
    made = small_certificate()
    assert Certificate.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("name", "value"),
    [("length", 0), ("remove", math.nan), ("samples", 1), ("failure", 1e-2), ("gram_marks", [1.0]), ("seed", "x")],
)
def test_a_certificate_of_impossible_form_is_not_read(name, value):
    with pytest.raises(ValueError, match=name):
        Certificate.from_dict({**small_certificate().to_dict(), name: value})


def test_bounds_above_delta_are_no_certificate():
    with pytest.raises(NotCertifiedError, match="exceed"):
        replace(small_certificate(), remove=2e-3)
