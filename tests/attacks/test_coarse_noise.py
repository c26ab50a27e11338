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
from bandmf.strategies.single_precision import in_float32

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
    "banded inverse": banded_inverse_square_root(20, 16),
    "BLT": BufferedToeplitz([0.2, 0.1], [0.98, 0.5], 20),
    "Toeplitz": BandedToeplitz(1 / np.sqrt(np.arange(1, 17)), 20),
}


def last_release(strategy, scale, gradient, number, coordinates=COORDINATES):
    """Of as many runs as there are coordinates; the example takes part at the last step."""
    engine = NumpyEngine(strategy, Key(bytes([number]) * 32))
    state = engine.init({"w": (coordinates,)})
    for step in range(strategy.steps):
        released = np.full(coordinates, gradient if step == strategy.steps - 1 else 0.0, np.float32)
        state = engine.add(state, {"w": released}, scale)
    return released.astype(np.float64)


def on_grid(released, gradient, spacing):
    """Whether a release is `gradient` plus a multiple of a spacing that is coarse beside rounding."""
    noise = released - gradient
    rounding = 0.51 * (np.spacing(np.abs(released).astype(np.float32)) + np.spacing(np.abs(noise).astype(np.float32)))
    off = np.abs(noise - spacing * np.round(noise / spacing))
    return (off <= rounding) & (spacing > 40 * rounding)


def verdicts(strategy, scale, gradient, coordinates=COORDINATES):
    """Of tests that ask whether a release lies on a grid around `gradient` and not around 0: (present, without)."""
    releases = [last_release(strategy, scale, g, n, coordinates) for n, g in enumerate((gradient, 0.0))]
    for exponent in range(-24, 8):
        spacing = float(np.float32(scale)) * 2.0**exponent
        yield tuple(on_grid(each, gradient, spacing) & ~on_grid(each, 0, spacing) for each in releases)


def reached_delta(strategy, scale, epsilon=EPSILON, gradient=1.0, coordinates=COORDINATES):
    """Of the best such test."""
    tests = verdicts(strategy, scale, gradient, coordinates)
    return max(present.mean() - math.exp(epsilon) * without.mean() for present, without in tests)


@pytest.mark.parametrize("name", sorted(COARSE.keys() - {"growing"}))
def test_coarse_noise_shows_who_took_part(name):
    """What plans are refused for, and noise planned for delta = 1e-5."""
    strategy = COARSE[name]
    scale = bandmf.accounting.noise_multiplier(EPSILON, DELTA, sampling_probability=1.0, rounds=1)
    assert reached_delta(strategy, scale * strategy.largest_column_norm()) > 100 * DELTA


def accepted(strategy, epsilon):
    args = {"epsilon": epsilon, "delta": DELTA, "examples": 10 * strategy.steps, "batch_size": 10}
    return bandmf.plan(**args, steps=strategy.steps, strategy=strategy, participation=Single())


@pytest.mark.parametrize("name", FINE)
def test_the_same_attack_finds_nothing_in_noise_of_accepted_plans(name):
    """In one coordinate that holds the whole clip norm. With epsilon = 1 a false alarm outweighs 3 hits, not 3,000."""
    plan = accepted(FINE[name], 1.0)
    assert reached_delta(plan.strategy, plan.noise_scale, 1.0, coordinates=100_000) < 10 * DELTA


def test_last_bits_of_accepted_noise_show_a_small_entry():
    """What docs/guarantees.md names as not covered: a coordinate with a sixteenth of the clip norm, all else known."""
    plan = accepted(FINE["Toeplitz"], 1.0)
    assert reached_delta(plan.strategy, plan.noise_scale, 1.0, 1 / 16, coordinates=100_000) > 100 * DELTA


def test_last_bits_of_many_coordinates_show_who_took_part():
    """Not covered either: 256 coordinates of one gradient, epsilon = 8, and a plan for momentum."""
    strategy = bandmf.optimize.banded_toeplitz(100, 100, workload=bandmf.workloads.momentum(100, 0.9)).strategy
    plan, size, runs, hits = accepted(strategy, EPSILON), 256, 200, 4
    reached = 0.0
    for present, without in verdicts(plan.strategy, plan.noise_scale, 1 / 16, size * runs):
        often = (present.reshape(runs, size).sum(axis=1) >= hits).mean()
        rate = (without.sum() + 3) / without.size  # an upper end, of single coordinates
        reached = max(reached, often - math.exp(EPSILON) * (size * rate) ** hits / math.factorial(hits))
    assert reached > 1000 * DELTA


@pytest.mark.parametrize("sampling", ["balls-in-bins", "cyclic-poisson", None])
@pytest.mark.parametrize("name", COARSE)
def test_strategies_with_coarse_noise_get_no_plan(name, sampling):
    strategy = COARSE[name]
    more = {"participation": Single()} if sampling is None else {"sampling": sampling}
    args = {"epsilon": EPSILON, "delta": DELTA, "examples": 2_000, "batch_size": 2_000 / strategy.steps}
    with pytest.raises(ValueError, match=r"rounding error of the noise=.*could be read off"):
        bandmf.plan(**args, steps=strategy.steps, strategy=strategy, **more)
