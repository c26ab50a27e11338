"""Noise that float32 leaves few values: a gradient is read off. Strategies that make such noise get no plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

import bandmf
from bandmf.noise import NumpyEngine
from bandmf.participation import Single
from bandmf.randomness.key import Key
from bandmf.strategies import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    banded_inverse_square_root,
    stamping,
)
from bandmf.strategies.rounding import rounding_error
from bandmf.strategies.single_precision import check_noise, in_float32

EPSILON, DELTA = 8.0, 1e-5
COORDINATES = 20_000
DOWN = float(np.nextafter(np.float32(1), np.float32(0)))


def powers(root, count, steps):
    """1 / (1 - root x)^count, the coefficients of a C whose inverse is large."""
    return in_float32(BandedInverse(np.poly([root] * count), steps)).toeplitz()


def integrators(scale, steps):
    """Two buffers that nearly cancel, after one that whitens."""
    return BufferedToeplitz([-0.999, scale, -scale], [0.0, 1.0, DOWN], steps)


COARSE = {
    "BLT, 400 steps": integrators(127.0, 400),
    "BLT, 100 steps": integrators(16.0, 100),
    "dense": Dense(np.tril(BandedInverse(np.poly([0.7] * 12), 40).materialize())),
    "Toeplitz": BandedToeplitz(powers(0.7, 8, 40), 40, normalize_columns=False),
    "normalized": BandedToeplitz(powers(0.7, 8, 40), 40),
    "banded inverse": BandedInverse(np.poly([1.0] * 4), 100),
    "stamped": stamping(BandedToeplitz(powers(0.7, 8, 40), 40), 2),
    "growing": BandedToeplitz([1.0, -3.0], 2_000),
}
FINE = {
    "banded inverse": banded_inverse_square_root(100, 16),
    "BLT": BufferedToeplitz([0.2, 0.1], [0.98, 0.5], 100),
    "Toeplitz": BandedToeplitz(1 / np.sqrt(np.arange(1, 17)), 100),
}


def last_release(strategy, scale, gradient, number):
    """Of as many runs as there are coordinates; the example takes part at the last step."""
    engine = NumpyEngine(strategy, Key(bytes([number]) * 32), kernels="numpy")
    state = engine.init({"w": (COORDINATES,)})
    for step in range(strategy.steps):
        released = np.full(COORDINATES, gradient if step == strategy.steps - 1 else 0.0, np.float32)
        state = engine.add(state, {"w": released}, scale)
    return released.astype(np.float64)


def on_grid(released, gradient, spacing):
    """Whether a release is `gradient` plus a multiple of a spacing that is coarse beside rounding."""
    noise = released - gradient
    rounding = 0.51 * (
        np.spacing(np.abs(released).astype(np.float32)) + np.spacing(np.abs(noise).astype(np.float32))
    )
    off = np.abs(noise - spacing * np.round(noise / spacing))
    return (off <= rounding) & (spacing > 40 * rounding)


def reached_delta(strategy, scale):
    """Of the best test that asks whether a release lies on a grid around 1 and not around 0."""
    without, present = (last_release(strategy, scale, gradient, gradient + 1) for gradient in (0, 1))
    best = 0.0
    for exponent in range(-24, 8):
        spacing = float(np.float32(scale)) * 2.0**exponent
        says = [on_grid(each, 1, spacing) & ~on_grid(each, 0, spacing) for each in (present, without)]
        best = max(best, says[0].mean() - math.exp(EPSILON) * says[1].mean())
    return best


@pytest.mark.parametrize("name", sorted(COARSE.keys() - {"growing"}))
def test_coarse_noise_shows_who_took_part(name):
    """What plans are refused for, and noise planned for delta = 1e-5."""
    strategy = COARSE[name]
    scale = bandmf.accounting.noise_multiplier(EPSILON, DELTA, sampling_probability=1.0, rounds=1)
    assert reached_delta(strategy, scale * strategy.largest_column_norm()) > 100 * DELTA


@pytest.mark.parametrize("name", FINE)
def test_the_same_attack_finds_nothing_in_noise_of_accepted_plans(name):
    args = {"epsilon": EPSILON, "delta": DELTA, "examples": 1_000, "batch_size": 10, "steps": 100}
    plan = bandmf.plan(**args, strategy=FINE[name], participation=Single())
    assert reached_delta(plan.strategy, plan.noise_scale) < 20 * DELTA


@pytest.mark.parametrize("sampling", ["balls-in-bins", "cyclic-poisson", None])
@pytest.mark.parametrize("name", COARSE)
def test_strategies_with_coarse_noise_get_no_plan(name, sampling):
    strategy = COARSE[name]
    more = {"participation": Single()} if sampling is None else {"sampling": sampling}
    args = {"epsilon": EPSILON, "delta": DELTA, "examples": 2_000, "batch_size": 2_000 / strategy.steps}
    with pytest.raises(ValueError, match=r"rounding error of the noise=.*could be read off"):
        bandmf.plan(**args, steps=strategy.steps, strategy=strategy, **more)


def measured_error(strategy):
    """The root mean square of C y - z at the worst step, for y of the engine."""
    engine, coordinates = NumpyEngine(strategy, Key(bytes(32)), kernels="numpy"), 1_000
    state, y = engine.init({"w": (coordinates,)}), []
    for _ in range(strategy.steps):
        y.append(np.zeros(coordinates, np.float32))
        state = engine.add(state, {"w": y[-1]}, 1.0)
    z = np.array([engine._source.draw(i, 0, 0, coordinates) for i in range(strategy.steps)], np.float64)
    error = strategy.materialize() @ np.array(y, np.float64) - z
    return float(np.sqrt((error**2).mean(axis=1)).max())


ACCURATE = stamping(integrators(127.0, 50), 2)  # in epochs it runs by its outputs, of which nothing cancels


@pytest.mark.parametrize(
    "strategy", [*FINE.values(), ACCURATE, COARSE["Toeplitz"], COARSE["banded inverse"]], ids=repr
)
def test_the_rounding_error_has_the_order_of_magnitude_of_the_engine_s(strategy):
    assert measured_error(strategy) / 4 < rounding_error(strategy) < 60 * measured_error(strategy)


def test_buffers_keep_what_they_round():
    """Partial sums alone would be below what the engine errs by."""
    strategy = integrators(16.0, 100)
    assert measured_error(strategy) < rounding_error(strategy) < 60 * measured_error(strategy)


def test_general_strategies_are_judged_as_the_toeplitz_ones_that_they_equal():
    toeplitz = BandedToeplitz(1 / np.sqrt(np.arange(1, 17)), 100, normalize_columns=False)
    expected = rounding_error(toeplitz)
    for same in (bandmf.strategies.Banded(toeplitz.columns()), Dense(toeplitz.materialize())):
        assert rounding_error(same) == pytest.approx(expected, rel=0.5)
    check_noise(toeplitz)
