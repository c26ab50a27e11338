"""The optimizers beyond BandMF: damping, banded inverses, and strategies for an unknown separation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose

import bandmf
from bandmf import optimize, strategies, workloads
from bandmf.optimize.banded_inverse import _losses
from bandmf.optimize.federated import _AveragedLoss, _pattern_matrix
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.sensitivities import certified_sensitivity
from bandmf.strategies import BandedToeplitz
from oracles import nuclear_norm_bound, slope


@pytest.mark.parametrize("n", [64, 256])
def test_dense_optima_lie_between_the_bound_and_normalized_fhu(n):
    best = optimize.dense(n).rmse
    assert nuclear_norm_bound(n) < best < bandmf.rmse(strategies.square_root(n, normalize_columns=True))


@pytest.mark.parametrize("participation", [None, FixedEpochs(4), MinSeparation(3, 40)], ids=str)
def test_no_other_damping_is_better(participation):
    solution = optimize.lti(256, participation=participation)
    assert solution.rmse == pytest.approx(bandmf.rmse(solution.strategy, participation=participation), rel=1e-12)
    for damping in np.geomspace(1e-5, 1, 40):
        assert bandmf.rmse(strategies.lti(256, damping), participation=participation) >= solution.rmse * (1 - 1e-9)
    assert solution.rmse <= bandmf.rmse(strategies.square_root(256), participation=participation)


@pytest.mark.parametrize("largest", [False, True])
def test_the_gradient_of_the_banded_inverse_is_right(largest):
    for workload in (workloads.prefix(50), workloads.momentum(50, 0.9)):
        for participation in (Single(), MinSeparation(3, 12), FixedEpochs(5)):
            points = (np.array([-0.4, -0.2, 0.1]), np.array([-0.9, 0.5, -0.1]))
            for loss, x in itertools.product(_losses(workload, participation, largest), points):
                assert_allclose(loss(x)[1], slope(lambda y, loss=loss: loss(y)[0], x, 1e-6), atol=1e-8)


@pytest.mark.parametrize("participation", [None, MinSeparation(4, 100)], ids=str)
def test_an_optimized_banded_inverse_beats_bisr_and_more_bands_are_better(participation):
    values = []
    for bands in (2, 4, 16):
        solution = optimize.banded_inverse(400, bands, participation=participation)
        bisr = strategies.banded_inverse_square_root(400, bands)
        assert solution.converged or not isinstance(participation, (Single, type(None)))
        assert solution.strategy.buffers == 0
        assert solution.rmse <= bandmf.rmse(bisr, participation=participation)
        values.append(solution.rmse)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("steps", "pattern", "better"),
    [
        (250, MinSeparation(5, 50), [-0.479, -0.132, -0.282]),
        (144, MinSeparation(3, 48), [-0.49, -0.126, -0.061, -0.21]),
    ],
)
def test_an_optimized_banded_inverse_need_not_have_coefficients_that_never_increase(steps, pattern, better):
    solution = optimize.banded_inverse(steps, len(better) + 1, participation=pattern)
    known = strategies.BandedInverse([1.0, *better], steps)
    assert np.diff(known.toeplitz()).max() > 0.01
    assert solution.converged
    assert solution.rmse <= bandmf.rmse(known, participation=pattern)


def test_two_inverse_bands_are_lambda_cgd_with_the_best_lambda():
    best = optimize.banded_inverse(300, 2)
    grid = [bandmf.rmse(strategies.lambda_cgd(300, value)) for value in np.linspace(0.8, 1, 201)]
    assert best.rmse <= min(grid)
    assert best.rmse == pytest.approx(min(grid), rel=1e-3)


@pytest.mark.parametrize("separation", [3, 7, 12])
def test_the_pattern_matrix_is_the_squared_sensitivity(separation):
    theta = np.linspace(1, 0.1, 20)
    strategy = BandedToeplitz(theta, 24, normalize_columns=False)
    value = theta @ _pattern_matrix(24, 20, separation, 4) @ theta
    assert value == pytest.approx(bandmf.sensitivity(strategy, MinSeparation(4, separation)) ** 2, rel=1e-12)


def test_the_gradient_of_the_averaged_loss_is_right():
    loss, x = _AveragedLoss(30, 8, [3, 5], 4), np.linspace(1, 0.3, 8)
    assert_allclose(loss(x)[1], slope(lambda y: loss(y)[0], x), atol=1e-8)


def test_the_heuristic_is_the_papers():
    plain = optimize.banded_toeplitz(100, 10, normalize_columns=False).strategy.coefficients
    robust = optimize.robust_banded_toeplitz(100, 4, 10, max_participations=5).strategy.coefficients
    expected = plain * [1, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    assert_allclose(robust, expected[:9] / np.linalg.norm(expected), rtol=1e-12)
    same = optimize.robust_banded_toeplitz(100, 10, 10, max_participations=5).strategy.coefficients
    assert_allclose(same, plain, rtol=1e-12)


@pytest.fixture(scope="module")
def federated():
    """n = 2000, five participations, separation 200 to 400: rmse by separation for each strategy."""
    strategies_by_name = {
        "plain": optimize.banded_toeplitz(2000, 400, normalize_columns=False).strategy,
        "heuristic": optimize.robust_banded_toeplitz(2000, 200, 400, 5).strategy,
        "averaged": optimize.averaged_banded_toeplitz(2000, range(200, 401, 5), 5).strategy,
        "blt": optimize.buffered_toeplitz(2000, 5, participation=MinSeparation(5, 400)).strategy,
    }

    def curve(strategy, separations):
        for s in (separations[0], separations[-1]):
            assert certified_sensitivity(strategy, MinSeparation(5, s)).exact
        return np.array([bandmf.rmse(strategy, participation=MinSeparation(5, s)) for s in separations])

    return lambda name, separations: curve(strategies_by_name[name], list(separations))


def test_the_heuristic_is_below_blt_at_every_separation(federated):
    within = range(200, 401, 5)
    assert np.all(federated("heuristic", within) < federated("blt", within))


def test_the_averaged_objective_is_below_the_heuristic_on_average(federated):
    within = range(200, 401, 5)
    assert federated("averaged", within).mean() < federated("heuristic", within).mean()
    assert np.all(federated("averaged", within) < federated("blt", within))


def test_blt_overtakes_plain_banded_once_the_separation_is_wrong_by_more_than_two(federated):
    assert federated("plain", [400]) < federated("blt", [400])
    far = [100, 125, 150, 175, 195, 801]
    assert np.all(federated("blt", far) < federated("plain", far))


def test_separations_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="smallest=30"):
        optimize.robust_banded_toeplitz(100, 30, 20, 5)
    with pytest.raises(ValueError, match="separations"):
        optimize.averaged_banded_toeplitz(100, [], 5)
    with pytest.raises(ValueError, match="separations=101"):
        optimize.averaged_banded_toeplitz(100, [101], 5)
