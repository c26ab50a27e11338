"""What float32 does not hold is refused wherever it enters: plans, clip norms, scales; honest plans are not."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.signal import lfilter

import bandmf
from bandmf import optimize
from bandmf.accounting.bins import gram_matrix
from bandmf.accounting.bins.copies import Copies
from bandmf.accounting.bins.loss import privacy_loss
from bandmf.noise import NumpyEngine
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.planning import Plan
from bandmf.sensitivities import certified_sensitivity
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    Identity,
    banded_inverse_square_root,
    lambda_cgd,
    stamping,
    tree_aggregation,
)
from bandmf.strategies.rounding import rounding_error
from bandmf.strategies.single_precision import check_noise, in_float32
from bandmf.strategies.square_root import square_root_coefficients
from bandmf.streaming import squared_norm

SMALL = {"epsilon": 8.0, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 20, "certify_seconds": 3}
KINDS = [{"sampling": "balls-in-bins"}, {"sampling": "cyclic-poisson"}, {"participation": Single()}]


@pytest.fixture(scope="module")
def plan():
    return bandmf.plan(**{**SMALL, "bands": 2})


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-37, 1e-46, 1e37, 1e46])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_strategy_that_float32_rounds_to_zero_or_infinity_is_refused(size, kind):
    strategy = BandedToeplitz(np.array([1, 0.5]) * size, 20, normalize_columns=False)
    for given in (strategy, Banded(strategy.columns()), Dense(strategy.materialize()), stamping(strategy, 1)):
        with pytest.raises(ValueError, match=r"of C's diagonal=.*1e-30, 1e\+30.*scale it"):
            bandmf.plan(**SMALL, **kind, strategy=given)


def test_a_banded_inverse_of_any_size_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"\|inverse_coefficients\[0\]\|=1e-31: must be .*scale it"):
        in_float32(BandedInverse([1e-31, -5e-32], 40))
    small = in_float32(BandedInverse([1e-29, -5e-30], 40))
    assert small.inverse_coefficients[1] == float(np.float32(-5e-30))
    assert small.inverse_coefficients[0] == float(np.float32(1e-29))


def test_a_noise_scale_beyond_float32_is_refused(plan):
    with pytest.raises(ValueError, match=r"noise_scale=.*must be .*\[1e-30, 1e\+30\]"):
        replace(plan, epsilon=math.inf, noise_multiplier=1e31)


@pytest.mark.parametrize("clip_norm", [1e-40, 1e-31, 1e31])
def test_a_clip_norm_beyond_float32_is_refused(plan, clip_norm):
    with pytest.raises(ValueError, match=r"clip_norm=.*must be .*\[1e-30, 1e\+30\].*scale it"):
        plan.deviation(clip_norm)


@pytest.mark.parametrize("clip_norm", [1e-16, 1e-30, 0.0, 1e-40, 1e38, math.nan])
def test_such_clip_norms_are_refused_in_pytorch(plan, clip_norm):
    """And those whose squares float32 does not hold: norms of gradients that small would be zero."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(1_000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"clip_norm=.*must be"):
        bandmf.torch.Training(
            model, lambda model, batch: model(*batch)[:, 0], optimizer, data, plan, clip_norm=clip_norm
        )


def test_a_deviation_beyond_float32_is_refused():
    """Each of the two is permitted, but their product would be no noise at all."""
    strategy = BandedToeplitz([1e-25, 5e-26], 20, normalize_columns=False)
    made = bandmf.plan(**SMALL, strategy=strategy, sampling="cyclic-poisson")
    assert made.deviation(1.0) == made.noise_scale
    with pytest.raises(ValueError, match=r"clip_norm \* noise_scale=.*must be"):
        made.deviation(1e-10)


def test_training_in_jax_refuses_such_a_clip_norm_and_a_plan_that_was_changed(plan):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    from bandmf.jax import Training, clipped_gradient

    def loss(weights, example):
        return weights @ example

    def begin(plan, clip_norm):
        training = Training(loss, optax.sgd(0.1), np.ones((1_000, 2), np.float32), plan, clip_norm=clip_norm)
        return training.init(jax.numpy.zeros(2))

    for bad in (0.0, 1e-40, 1e38, math.nan):
        with pytest.raises(ValueError, match="clip_norm="):
            begin(plan, bad)
        with pytest.raises(ValueError, match="clip_norm="):
            clipped_gradient(loss, clip_norm=bad)
    assert begin(plan, 1e-16).step == 0
    changed = replace(plan)
    assert changed.digest == plan.digest  # now cached
    object.__setattr__(changed, "noise_multiplier", 1e-6)
    with pytest.raises(ValueError, match="epsilon="):
        begin(changed, 1.0)


def engines():
    yield NumpyEngine, np.zeros(3, np.float32)
    torch = pytest.importorskip("torch")
    yield bandmf.torch.Engine, torch.zeros(3)
    jax = pytest.importorskip("jax")
    yield bandmf.jax.Engine, jax.numpy.zeros(3)


def test_engines_refuse_a_scale_that_float32_rounds_to_zero():
    for make, zeros in engines():
        engine = make(BandedToeplitz([1.0, 0.5], 4))
        state = engine.init({"w": zeros if make is not NumpyEngine else zeros.shape})
        for scale in (1e-50, 1e-40, 1e39):
            with pytest.raises(ValueError, match=r"scale=.*must be a finite number.*float32"):
                engine.add(state, {"w": zeros}, scale)
        engine.add(state, {"w": zeros}, 0.0)


# --- plans without a certificate ----------------------------------------------------------------------

MIDDLE = float((np.float64(np.float32(0.9)) + np.float64(np.nextafter(np.float32(0.9), np.float32(0)))) / 2)
NOT_FLOAT32 = {
    "BLT": BufferedToeplitz([100.0, -100.0], [MIDDLE + 1e-12, MIDDLE - 1e-12], 20),
    "banded inverse": BandedInverse([1.0, -0.1], 20),
    "stamped": stamping(lambda_cgd(10, 0.9), 2),
}


@pytest.mark.parametrize("name", NOT_FLOAT32)
@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_every_plan_has_parameters_that_float32_holds(name, kind, tmp_path, monkeypatch):
    made = bandmf.plan(**SMALL, **kind, strategy=in_float32(NOT_FLOAT32["stamped"]))
    with pytest.raises(ValueError, match="float32 does not hold"):
        replace(made, strategy=NOT_FLOAT32[name])
    with monkeypatch.context() as patch:  # as a file from elsewhere
        patch.setattr(sys.modules[Plan.__module__], "check_noise", lambda strategy: None)
        path = replace(made, strategy=NOT_FLOAT32[name]).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="float32 does not hold"):
        Plan.load(path)


def test_a_folder_is_no_plan(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(ValueError, match=r"path=.*plan.json': is a folder"):
        Plan.load(tmp_path / "plan.json")


# --- computed coefficients ----------------------------------------------------------------------------


def exact_coefficients(blt):
    """In whole numbers: doubles are multiples of a power of two."""
    from fractions import Fraction

    scales, decays = ([Fraction(float(x)) for x in each] for each in (blt.scales, blt.decays))
    powers, found = [Fraction(1)] * len(decays), [Fraction(1)]
    for _ in range(1, blt.steps):
        found.append(sum(s * p for s, p in zip(scales, powers, strict=True)))
        powers = [Fraction(round(p * d * 2**400), 2**400) for p, d in zip(powers, decays, strict=True)]
    return found


def exact_norm(coefficients, separation, count):
    total = [0] * len(coefficients)
    for start in range(0, separation * count, separation):
        for t, c in enumerate(coefficients[: len(total) - start]):
            total[start + t] += abs(c)
    return math.sqrt(sum(x * x for x in total))


ADJACENT = [float(1 - k * 2.0**-24) for k in (1, 2, 3)]
CANCELLING = {
    "far beyond float32": BufferedToeplitz([2.0**24, -(2.0**24)], [0.9 + 1e-8, 0.9 + 1e-8 - 1e-14], 80),
    "negative before": BufferedToeplitz([2.0**28, -(2.0**28)], [0.9 + 1e-8, 0.9 + 1e-8 - 1e-14], 80),
    "second difference": BufferedToeplitz([2.0**20, -(2.0**21), 2.0**20], ADJACENT, 500),
    "signs alternate": BufferedToeplitz([0.2, 0.3], [-0.5, 0.9], 40),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_the_sensitivity_of_a_blt_is_not_below_the_exact_one_where_it_cancels(name):
    blt = CANCELLING[name]
    exact = exact_coefficients(blt)
    found = certified_sensitivity(blt, Single())
    assert exact_norm(exact, 1, 1) <= found.value <= 1.001 * exact_norm(exact, 1, 1)
    assert not found.exact or found.value < (1 + 1e-8) * exact_norm(exact, 1, 1)
    once = certified_sensitivity(stamping(blt, 2), FixedEpochs(2)).value
    assert math.sqrt(2) * exact_norm(exact, 1, 1) <= once


def test_a_closed_form_would_be_below():
    """What the test above looks for is there if it is planted."""
    for name in ("far beyond float32", "second difference"):
        blt = CANCELLING[name]
        assert squared_norm(blt.matrices(), blt.steps) < exact_norm(exact_coefficients(blt), 1, 1) ** 2


@pytest.mark.parametrize("name", ["far beyond float32", "second difference"])
def test_also_where_an_example_takes_part_again(name):
    blt = CANCELLING[name]
    positive = [abs(c) for c in exact_coefficients(blt)]
    separation = blt.steps // 4
    found = certified_sensitivity(blt, MinSeparation(3, separation)).value
    # No coefficient of these is below zero, so that all contributions with one sign are permitted.
    assert exact_norm(positive, separation, 3) <= found


def test_the_gram_matrix_of_a_stamped_banded_inverse_is_raised_like_its_epoch_s():
    epoch = in_float32(BandedInverse(np.poly([0.97, 0.96, 0.95, 0.94]), 60))
    assert gram_matrix(stamping(epoch, 1), 4) == pytest.approx(gram_matrix(epoch, 4), rel=1e-13)
    plain = np.abs(epoch.materialize())
    m = np.array([plain[:, j::4].sum(axis=1) for j in range(4)])
    raised, rounding = gram_matrix(stamping(epoch, 1), 4), 1 + 2 * (60 + 15 + 2 * 60 + 24) * 2.0**-53
    assert (raised > m @ m.T * rounding * (1 + 1e-14)).all()  # by more than the sums' own rounding
    twice = gram_matrix(stamping(stamping(epoch, 1), 2), 4)
    assert twice == pytest.approx(2 * raised, rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_positions_far_below_the_largest_entry_keep_their_weight():
    """Exponentials of all of a row's entries vanish beside the largest of the matrix."""
    copies = Copies(privacy_loss(np.diag([1.0, 1e-6, 1e-6]), 0.012), 3)
    assert copies.loss.largest > 5_000
    assert np.isfinite(copies.log_scale)
    assert np.all(np.diff(copies.hubs._others) > -1e-15)
    small = copies.hubs._others[3:6] - 1  # hub 1: its row is nearly uniform
    np.testing.assert_allclose(small, [1 / 3, 2 / 3, 1], atol=0.01)


# --- honest plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 16, 256, 2048, 16384])
def test_honest_strategies_of_any_length_are_accepted(steps):
    bands = min(steps, 64)
    falling = 1 / np.sqrt(np.arange(1, bands + 1))
    honest = [
        Identity(steps), tree_aggregation(steps), lambda_cgd(steps, 0.9), lambda_cgd(steps, 1.0),
        banded_inverse_square_root(steps, bands), BandedToeplitz(falling, steps),
        BandedToeplitz(falling, steps, normalize_columns=False), BufferedToeplitz([0.2, 0.1], [0.99999, 0.5], steps),
        BufferedToeplitz([-0.2, 0.3], [-0.5, 0.9], steps),
        stamping(BandedToeplitz(falling, steps), 2), stamping(BandedInverse([1.0, -0.5][:steps], steps), 3),
    ]  # fmt: skip
    if steps <= 256:
        honest += [tree_aggregation(steps, "full"), Banded(BandedToeplitz(falling, steps).columns())]
        honest += [optimize.buffered_toeplitz(steps, 3).strategy, stamping(honest[7], 2)]
        honest += [BandedToeplitz(1 / np.sqrt(np.arange(1, steps + 1)), steps)]
    for strategy in honest:
        check_noise(in_float32(strategy))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_honest_strategies_of_any_size_are_accepted(size):
    check_noise(BandedToeplitz(size * np.array([1.0, 0.5]), 20, normalize_columns=False))
    check_noise(in_float32(BandedInverse(size * np.array([1.0, -0.5]), 20)))


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": "balls-in-bins", "strategy": BufferedToeplitz([0.2, 0.1], [0.98, 0.5], 20)},
        {"sampling": "balls-in-bins", "strategy": banded_inverse_square_root(20, 4)},
        {"sampling": "balls-in-bins", "strategy": BandedToeplitz([1.0, 0.5], 20)},
        {"sampling": "b-min-sep", "bands": 2},
        {"sampling": "cyclic-poisson"},
        {"participation": MinSeparation(20, 1), "bands": 4},
        {"participation": Single(), "epsilon": 1e-3, "bands": 4},
        {"sampling": "cyclic-poisson", "epsilon": 100.0},
        {"sampling": "cyclic-poisson", "steps": 1, "examples": 100},
    ],
    ids=str,
)
def test_honest_plans_are_accepted_with_any_usual_clip_norm(more, tmp_path):
    made = bandmf.plan(**{**SMALL, "certify_seconds": 1, **more})
    assert Plan.load(made.save(tmp_path / "plan.json")) == made
    for clip_norm in (1e-6, 1e-3, 1.0, 1e3, 1e6):
        assert made.deviation(clip_norm) == clip_norm * made.noise_scale


def late(steps):
    """A mode of C^-1 that begins with nearly nothing, and grows as long as the run lasts."""
    root = (0.1 ** (1 / 24) * np.exp(0.6j)) ** np.arange(24)
    factor, coefficients = np.convolve(root, root.conj()).real, np.array([1.0])
    for _ in range(3):
        coefficients = np.convolve(coefficients, factor)
    growth = 1.00266
    coefficients = np.convolve(coefficients, [1, -2 * growth * np.cos(0.6), growth**2])
    return BandedToeplitz(coefficients, steps, normalize_columns=False)


def test_noise_that_becomes_coarse_late_is_refused():
    """At first nothing shows it: an attack on 6,000 steps told with certainty whether an example was there."""
    assert rounding_error(late(500)) < 1e-4
    assert rounding_error(late(6_000)) > 0.1
    with pytest.raises(ValueError, match=r"rounding error of the noise=.*must be at most"):
        bandmf.plan(
            epsilon=8, delta=1e-5, batch_size=1, steps=6_000, strategy=late(6_000),
            participation=bandmf.participation.Single(),
        )  # fmt: skip


@pytest.mark.parametrize("coefficients", [[1, 0.5], [1, -0.9, 0.3], square_root_coefficients(64)])
def test_the_error_of_banded_noise_is_that_of_all_steps(coefficients):
    """By the coefficients of every partial sum, from either end."""
    theta, steps = np.array(coefficients, float), 20_000
    y = lfilter([1.0], theta, np.eye(1, steps)[0])
    ahead, behind = (np.cumsum(terms, axis=0) for terms in _both_ways(theta, y))
    largest = 1 + max((ahead**2).sum(axis=1).max(), (behind**2).sum(axis=1).max())
    products = (theta[1:] ** 2).sum() * (y**2).sum()
    expected = 2.0**-24 * np.sqrt(4 + len(theta) * largest + 3 * products)
    assert rounding_error(BandedToeplitz(theta, steps, normalize_columns=False)) == pytest.approx(expected, rel=1e-6)


def _both_ways(theta, y):
    """theta_r y_{i-r} by its coefficients, for r = 1, 2, ... and backwards."""
    terms = np.array([np.pad(theta[r] * y[:2_000], (r, len(theta) - r)) for r in range(1, len(theta))])
    return terms, terms[::-1]


@pytest.mark.parametrize(
    ("scales", "decays", "steps"),
    [([5.083e-5, -0.12711], [0.99997395, 0.9999724], 3_000), ([0.0012175, -2.5615165], [0.9974914, 0.778742], 300)],
)
def test_a_blt_that_overflows_is_refused(plan, scales, decays, steps):
    """Its variances come out as minus infinity."""
    held = ([float(np.float32(each)) for each in these] for these in (scales, decays))
    strategy = BufferedToeplitz(*held, steps)
    assert rounding_error(strategy) == math.inf
    with pytest.raises(ValueError, match=r"rounding error of the noise=inf|overflow"):
        check_noise(strategy)


@pytest.mark.parametrize("momentum", [0.99, 0.999])
def test_plans_with_strong_momentum_are_made(momentum):
    once = bandmf.participation.Single()
    made = bandmf.plan(
        epsilon=8, delta=1e-5, batch_size=1, steps=5_000, participation=once,
        workload=bandmf.workloads.momentum(5_000, momentum),
    )  # fmt: skip
    assert rounding_error(made.strategy) < 2.0**-13
