"""Certificates for bins redrawn every epoch: they hold, and what was changed or made for something else is refused."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from bandmf import optimize
from bandmf.accounting.redrawn import Certificate, NotCertifiedError, calibrate, certify, estimate, privacy_loss
from bandmf.accounting.redrawn.copies import Copies
from bandmf.accounting.redrawn.divergences import add_sums, remove_sums
from bandmf.accounting.samples import upper_bound
from bandmf.strategies import BandedToeplitz, Dense, Identity
from bins_oracles import TWO, gaussian_sigma, two_position_deltas

C = Dense(np.linalg.cholesky(TWO[::-1, ::-1]).T[::-1, ::-1])  # one epoch of two steps: C'C is the reference's
EPSILON = 2.0
REMOVE, ADD = two_position_deltas(TWO, EPSILON)
SMALL = BandedToeplitz([1.0, 0.5, 0.3], steps=48)


def small_certificate(**changes):
    """A certificate that takes a fraction of a second."""
    return certify(SMALL, 12, 1.6, 4.0, 1e-4, **{"samples": 4000, "seed": 7, **changes})


# --- coverage -----------------------------------------------------------------------------------------


def misses(direction, certificates, count, failure, bound_of=upper_bound):
    """The share of certificates, of `count` samples each, whose bound is below the true divergence."""
    loss, missed = privacy_loss(C, 1.0, 2), 0
    proposal, truth = Copies(loss, 3), REMOVE if direction == "remove" else ADD
    for seed in range(certificates):
        if direction == "remove":
            sums, bound = remove_sums(proposal, EPSILON, count, seed, 1), proposal.bound(EPSILON)
        else:
            sums, bound = add_sums(loss, EPSILON, count, seed, 1)
        missed += bound_of(sums, bound, failure) < truth
    return missed / certificates


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("count", [40, 400])
def test_a_certificate_covers_the_truth(direction, count):
    assert misses(direction, 300, count, 0.05) <= 0.05


def test_a_planted_bound_without_margin_is_caught_by_the_coverage():
    assert misses("remove", 300, 400, 0.05, lambda sums, bound, failure: sums.mean) > 0.3


def false_certificates(tries, samples):
    """The share of seeds that certify a delta which, less the failure of 5 percent, is just below the truth."""
    failure, passed = 0.05, 0
    for seed in range(tries):
        given = {"samples": samples, "seed": seed, "copies": 3, "failure": failure, "workers": 1}
        try:
            certify(C, 2, 1.0, EPSILON, REMOVE * (1 - 1e-9) + failure, **given)
            passed += 1
        except NotCertifiedError:
            pass
    return passed / tries


def test_false_certificates_are_as_rare_as_they_say():
    assert false_certificates(150, 100) <= 0.05


def test_planted_certificates_without_margin_are_caught(monkeypatch):
    module = importlib.import_module("bandmf.accounting.redrawn.certificate")
    monkeypatch.setattr(module, "upper_bound", lambda sums, bound, failure: sums.mean)
    assert false_certificates(150, 100) > 0.2


# --- certificates -------------------------------------------------------------------------------------


def test_a_certificate_can_be_computed_again_from_its_file():
    certificate = small_certificate()
    assert certificate.remove + certificate.failure <= certificate.delta
    again = Certificate.from_dict(json.loads(json.dumps(certificate.to_dict())))
    assert again == certificate
    assert again.verify(SMALL) == certificate
    assert again.verify(SMALL, workers=1) == certificate
    fresh = again.verify(SMALL, seed=1234)
    assert fresh.remove != certificate.remove
    assert fresh.remove == pytest.approx(certificate.remove, rel=0.3)


def test_too_small_a_sigma_is_refused():
    found = estimate(SMALL, 12, 4.0, 1e-4, samples=2**12)
    for factor in (0.9, 0.99):
        with pytest.raises(NotCertifiedError, match="raise sigma") as caught:
            certify(SMALL, 12, factor * found.sigma, 4.0, 1e-4, samples=4000, seed=1)
        assert caught.value.remove > 1e-4
    assert certify(SMALL, 12, 1.06 * found.sigma, 4.0, 1e-4, samples=4000, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": 1.5},
        {"remove": 1e-6},
        {"weight_bound": 1e-9},
        {"add": 1e-12},
        {"samples": 3999},
        {"seed": 8},
        {"copies": 2},
        {"cycle": 13},
        {"epsilon": 3.9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_certificate_is_not_verified(change):
    with pytest.raises(NotCertifiedError):
        replace(small_certificate(), **change).verify(SMALL)


def test_a_certificate_is_for_its_strategy_alone():
    for other in (BandedToeplitz([1.0, 0.5, 0.31], steps=48), BandedToeplitz([1.0, 0.5, 0.3], steps=49)):
        with pytest.raises(NotCertifiedError, match="another strategy"):
            small_certificate().verify(other)


def test_bounds_above_delta_are_no_certificate():
    with pytest.raises(NotCertifiedError, match="exceed"):
        replace(small_certificate(), remove=1e-4)
    with pytest.raises(ValueError, match="missing or unknown"):
        Certificate.from_dict({"sigma": 1.0})


def test_the_bound_without_samples_is_valid_too():
    """Where the weights' bound, a Renyi divergence, is below delta, two samples suffice."""
    certificate = certify(SMALL, 12, 3.0, 4.0, 1e-3, samples=2, seed=1)
    assert certificate.remove == pytest.approx(certificate.weight_bound)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-6), (8.0, 1e-5)])
def test_a_certified_sigma_is_a_little_above_the_true_one(epsilon, delta):
    """Without a choice: the Gaussian mechanism with sensitivity 2."""
    certificate = calibrate(Identity(4), 1, epsilon, delta, seconds=2, seed=3)
    assert 1 < certificate.sigma / (2 * gaussian_sigma(epsilon, delta)) < 1.02
    assert certificate.verify(Identity(4)) == certificate


def test_too_little_time_is_said():
    with pytest.raises(NotCertifiedError, match="seconds=1e-06"):
        calibrate(Identity(8), 2, 4.0, 1e-4, seconds=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "bands", "decay", "rmse"), [(8.0, 64, 0.985, 4.40), (4.0, 48, 0.99, 7.84)])
def test_certified_errors_of_a_thousand_steps(epsilon, bands, decay, rmse):
    """8 epochs, delta 1e-6, Toeplitz with decay: fixed bins have 4.93 and 8.08."""
    theta = np.array(optimize.banded_toeplitz(1024, bands, normalize_columns=False).strategy.coefficients)
    decayed = BandedToeplitz(theta * decay ** np.arange(bands), 1024, normalize_columns=False)
    certificate = calibrate(decayed, 128, epsilon, 1e-6, seconds=60)
    error = np.sqrt(np.square(np.cumsum(np.linalg.inv(decayed.materialize()), axis=0)).sum() / 1024)
    assert certificate.sigma * error < 1.005 * rmse
