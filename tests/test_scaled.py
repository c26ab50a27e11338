"""Step scales, C = T D: what only they have. The conformance lists have them as one more family."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import bandmf
from bandmf import Key, error, workloads
from bandmf.accounting.bins import gram_matrix
from bandmf.error import mean_squared_error, per_step_error
from bandmf.noise import NumpyEngine
from bandmf.participation import FixedEpochs, MinSeparation
from bandmf.planning.labels import labeled
from bandmf.sensitivities import certified_sensitivity
from bandmf.strategies import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Identity,
    Scaled,
    ScaledRecurrence,
    banded_inverse_square_root,
    load,
    save,
    stamping,
    tree_aggregation,
)
from bandmf.strategies.single_precision import in_float32
from noise_families import ENGINES, FAMILIES, SHAPES, numpy_noise, options
from sweeps import in_turn
from test_sensitivity import check, participations, steps_for

N = 24
SCALES = np.exp(np.random.default_rng(3).normal(size=N))
BLT = BufferedToeplitz([0.3, 0.1], [0.9, 0.5], N)


# --- the family ---------------------------------------------------------------------------------------


def test_scales_of_scales_are_one_diagonal():
    twice = Scaled(Scaled(BLT, SCALES), SCALES)
    assert twice.strategy is BLT
    assert_array_equal(twice.scales, SCALES * SCALES)


def test_a_stamped_strategy_is_scaled_outside_and_not_within():
    with pytest.raises(ValueError, match="must not be scaled; scale what stamping"):
        stamping(Scaled(BLT, SCALES), 2)
    outside = Scaled(stamping(BLT, 2), np.tile(SCALES, 2))
    assert_allclose(outside.materialize(), np.kron(np.eye(2), Scaled(BLT, SCALES).materialize()))


@pytest.mark.parametrize(
    ("strategy", "scales", "complaint"),
    [
        (BLT, SCALES[1:], "there are 23 of them, but the strategy has steps=24"),
        (BLT, np.append(SCALES[1:], 0.0), "scales=0.0: .*finite number in"),
        (BLT, np.append(SCALES[1:], -1.0), "scales=-1.0: "),
        (BLT, np.append(SCALES[1:], np.nan), "every entry must be finite"),
        (BLT, SCALES[None], "1 dimension"),
        (np.eye(N), SCALES, "must be a strategy"),
    ],
)
def test_scales_that_cannot_be_are_refused(strategy, scales, complaint):
    with pytest.raises(ValueError, match=complaint):
        Scaled(strategy, scales)


@pytest.mark.parametrize("unscaled", [BLT, stamping(Identity(12), 2), tree_aggregation(N)])
def test_a_file_holds_both_factors(unscaled, tmp_path):
    loaded = load(save(Scaled(unscaled, SCALES), tmp_path / "scaled"))
    assert type(loaded.strategy) is type(unscaled)
    assert_array_equal(loaded.materialize(), Scaled(unscaled, SCALES).materialize())


def test_banded_scales_are_those_of_a_banded_matrix():
    """Banded knows any banded C: all that is computed of a scaled one must agree with it."""
    scaled = Scaled(BandedToeplitz([1.0, 0.5, 0.3], N), SCALES)
    plain = Banded(scaled.columns())
    assert_array_equal(scaled.materialize(), plain.materialize())
    assert mean_squared_error(scaled) == pytest.approx(mean_squared_error(plain), rel=1e-12)
    assert_allclose(gram_matrix(scaled, 7), gram_matrix(plain, 7), rtol=1e-12)
    for participation in (FixedEpochs(12), MinSeparation(5, 2), MinSeparation(8, 3)):
        assert certified_sensitivity(scaled, participation).value == pytest.approx(
            certified_sensitivity(plain, participation).value, rel=1e-12
        )


# --- sensitivity --------------------------------------------------------------------------------------


coefficient = st.sampled_from([-0.7, -0.1, 0.0, 0.1, 0.5, 0.8, 1.0])


@given(
    participation=participations,
    rest=st.lists(coefficient, max_size=6),
    seed=st.integers(0, 10**6),
    falling=st.booleans(),
    kind=st.sampled_from(["plain", "normalized", "buffered", "inverse"]),
    data=st.data(),
)
def test_sensitivities_of_scaled_strategies_are_certified(participation, rest, seed, falling, kind, data):
    n = steps_for(data, participation)
    dice = np.random.default_rng(seed)
    scales = np.exp(dice.normal(size=n))
    theta = [1.0, *(sorted(map(abs, rest), reverse=True) if falling else rest)][:n]
    strategy = {
        "plain": lambda: BandedToeplitz(theta, n, normalize_columns=False),
        "normalized": lambda: BandedToeplitz(theta, n),
        "buffered": lambda: BufferedToeplitz(dice.uniform(-0.3, 0.6, 2), dice.uniform(0, 1, 2), n),
        "inverse": lambda: BandedInverse(np.append(1.0, dice.uniform(-0.4, 0.1, min(n, 3) - 1)), n),
    }[kind]()
    scaled = Scaled(strategy, np.sort(scales)[::-1] if falling else scales)
    check(certified_sensitivity(scaled, participation), scaled.materialize(), participation)


def test_it_is_exact_where_coefficients_and_scales_fall():
    strategy = Scaled(BandedToeplitz([1.0, 0.7, 0.4, 0.1], 9, normalize_columns=False), np.linspace(2, 1, 9))
    claim = certified_sensitivity(strategy, MinSeparation(3, 1))
    assert claim.exact
    check(claim, strategy.materialize(), MinSeparation(3, 1))
    blt = Scaled(BufferedToeplitz([0.1] * 4, [0.999, 0.99, 0.9, 0.5], 16384), np.linspace(1, 0.1, 16384))
    start = time.process_time()
    assert certified_sensitivity(blt, MinSeparation(8, 2048)).exact
    assert time.process_time() - start < 1


def test_scales_that_rise_are_not_taken_for_falling(monkeypatch):
    """The planted error: the pattern of the first columns, whatever the scales."""
    strategy = Scaled(BandedToeplitz([1.0, 0.7, 0.4, 0.1], 9, normalize_columns=False), np.linspace(1, 2, 9))
    check(certified_sensitivity(strategy, MinSeparation(3, 1)), strategy.materialize(), MinSeparation(3, 1))
    monkeypatch.setattr("bandmf.strategies.scaled.np.diff", lambda scales: -np.abs(scales))
    with pytest.raises(AssertionError, match="below"):
        check(certified_sensitivity(strategy, MinSeparation(3, 1)), strategy.materialize(), MinSeparation(3, 1))


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 100, 1_021])
@pytest.mark.parametrize("unscaled", ["buffered", "inverse"])
def test_the_error_in_blocks_is_that_of_one_step_after_another(steps, unscaled):
    make = {
        "buffered": lambda: BufferedToeplitz([0.3, 0.1], [0.99, 0.5], steps),
        "inverse": lambda: banded_inverse_square_root(steps, min(steps, 5)),
    }
    strategy = Scaled(make[unscaled](), np.sqrt(workloads.cosine(steps, 0.01)))
    rates = workloads.cosine(steps, 0.1)
    for workload in (workloads.prefix(steps), workloads.momentum(steps, 0.9, rates, weight_decay=0.01)):
        slow = error._per_step_error_by_state(workload.operator @ strategy.inverse(), steps)
        assert_allclose(per_step_error(strategy, workload=workload), slow, rtol=1e-11)


def test_a_planted_step_too_late_is_caught(monkeypatch):
    strategy = Scaled(BLT, SCALES)
    slow = error._per_step_error_by_state(workloads.prefix(N).operator @ strategy.inverse(), N)
    from bandmf.error.scaled import ScaledError

    right = ScaledError._joint
    monkeypatch.setattr(ScaledError, "_joint", lambda self, steps: right(self, np.maximum(steps - 1, 0)))
    with pytest.raises(AssertionError):
        assert_allclose(per_step_error(strategy), slow, rtol=1e-3)


def test_errors_of_many_steps_are_fast():
    steps = 16_384
    scales = np.sqrt(workloads.cosine(steps, 0.01))
    schedule = workloads.momentum(steps, 0.9, workloads.cosine(steps, 0.001))
    start = time.process_time()
    for unscaled in (
        BufferedToeplitz([0.1] * 4, [0.999, 0.99, 0.9, 0.5], steps),
        banded_inverse_square_root(steps, 16),
        BandedToeplitz(1 / np.sqrt(np.arange(1, 17)), steps),
    ):
        mean_squared_error(Scaled(unscaled, scales), workload=schedule)
    assert time.process_time() - start < 2  # one step after another: 4


# --- noise --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-7, 1e7), min_size=1, max_size=20), st.floats(1e-30, 1e30))
def test_no_step_has_less_noise_than_with_the_exact_scales(scales, deviation):
    """What engines multiply by, rounded as they round it, against the rounded deviation over the exact scale."""
    strategy = Scaled(Identity(len(scales)), scales)
    made = np.float32(deviation) * strategy.gains
    assert made.dtype == np.float32
    assert np.all(made.astype(np.float64) * strategy.scales >= np.float64(np.float32(deviation)) * (1 - 2.0**-51))
    assert np.all(strategy.gains * strategy.scales <= 1 + 2.0**-22)


def test_gains_that_are_rounded_to_the_nearest_are_caught():
    scales = np.linspace(0.5, 2, 200)
    nearest = (1 / scales).astype(np.float32)
    made = (np.float32(1.7) * nearest).astype(np.float64) * scales
    assert np.any(made < np.float64(np.float32(1.7)) * (1 - 2.0**-51))


@pytest.mark.parametrize(
    ("engine", "family"), in_turn(list(ENGINES), ["normalized", "inverse_partly_kept", "buffered", "tree"])
)
def test_the_noise_is_that_of_the_unscaled_strategy_times_a_number_bit_for_bit(engine, family):
    """In every engine: one multiplication, by the same float32 number; history is that of the unscaled strategy."""
    unscaled, key, deviation = FAMILIES[family], Key(), 0.37
    scaled = Scaled(unscaled, 1 + np.arange(unscaled.steps) / 7)
    noise = ENGINES[engine](scaled, key, scale=deviation, **options(family))
    reference = numpy_noise(unscaled, key, **options(family))
    factors = np.float32(deviation) * scaled.gains
    alone = ENGINES[engine](unscaled, key, scale=1.0, **options(family))
    for step, factor, white, base in zip(noise, factors, alone, reference, strict=True):
        for name in SHAPES:
            assert_array_equal(step[name], np.float32(factor) * white[name])
            assert_allclose(white[name], base[name], atol=2e-5)


def test_a_lost_scale_is_caught_by_the_tests_of_engines(monkeypatch):
    from noise_families import largest_difference, oracle_noise

    strategy, key = FAMILIES["scaled"], Key()
    expected = oracle_noise(strategy, key)
    assert largest_difference(numpy_noise(strategy, key), expected) < 1e-4
    monkeypatch.setattr("bandmf.noise.schedule.Schedule.scale", lambda self, i, scale: scale)
    assert largest_difference(numpy_noise(strategy, key), expected) > 1e-2


def test_engines_of_other_scales_do_not_take_each_others_states():
    key = Key()
    mine, other = (NumpyEngine(Scaled(BLT, scales), key) for scales in (SCALES, SCALES[::-1]))
    with pytest.raises(ValueError, match="another plan"):
        other.add(mine.init({"w": (3,)}), {"w": np.zeros(3, np.float32)}, 1.0)
    assert isinstance(Scaled(BLT, SCALES).recurrence, ScaledRecurrence)


def test_scales_that_float32_does_not_hold_are_refused():
    scales = np.where(np.arange(N) == 5, 1e-9, 1.0)
    with pytest.raises(ValueError, match=r"smallest of scales=1e-09: .*only ratios matter"):
        in_float32(Scaled(BLT, scales))
    engine = NumpyEngine(Scaled(Identity(2), [1.0, 1e-60]))
    state = engine.add(engine.init({"w": (3,)}), {"w": np.zeros(3, np.float32)}, 1.0)
    gradients = {"w": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"scale / scales\[1\]=inf: must be a finite number"):
        engine.add(state, gradients, 1.0)
    assert state.step == 1
    assert not gradients["w"].any()
    assert engine.add(state, gradients, 0.0).step == 2


# --- plans --------------------------------------------------------------------------------------------

SMALL = {"epsilon": 8.0, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 80, "certify_seconds": 3}


@pytest.mark.parametrize(
    ("sampling", "unscaled", "mechanism"),
    [
        ("balls-in-bins", BufferedToeplitz([0.2, 0.1], [0.98, 0.5], 80), "blt"),
        ("balls-in-bins", banded_inverse_square_root(80, 4), "banded-inverse"),
        ("cyclic-poisson", BandedToeplitz([1.0, 0.6, 0.4], 80), "banded"),
    ],
)
def test_a_plan_for_step_scales_is_kept_shown_and_verified(sampling, unscaled, mechanism, tmp_path):
    rates = workloads.cosine(80, 0.05)
    schedule = workloads.momentum(80, 0.9, rates)
    plan = bandmf.plan(**SMALL, strategy=Scaled(unscaled, np.sqrt(rates)), sampling=sampling, workload=schedule)
    assert plan.mechanism == mechanism
    assert isinstance(plan.strategy, Scaled)
    assert plan.rmse == pytest.approx(
        plan.noise_multiplier * np.sqrt(mean_squared_error(plan.strategy, workload=schedule))
    )
    again = bandmf.Plan.load(plan.save(tmp_path / "plan.json"))
    assert again == plan
    assert_array_equal(again.strategy.scales, plan.strategy.scales)
    assert "step scales" in plan.explain()
    assert "step scales" in repr(plan)
    assert plan.summary()["step_scales"] == (plan.strategy.scales.min(), plan.strategy.scales.max())
    assert labeled(plan.summary())["step scales"] == "0.224424 to 1"
    assert plan.plot() is not None
    plan.verify()


def test_a_candidate_says_that_it_has_step_scales():
    plan = bandmf.plan(**SMALL, strategy=Scaled(BandedToeplitz([1.0, 0.6], 80), np.linspace(2, 1, 80)))
    candidate = plan.candidates[0]._replace(scaled=True)
    assert candidate.name == "2 bands with step scales"
    assert candidate._replace(sampling="balls-in-bins", mechanism="blt").name == "BLT(2) with step scales in bins"


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscaled", [BandedToeplitz([1.0, 0.5, 0.3], 12), BandedToeplitz([1.0], 12)], ids=str)
def test_a_killed_run_with_step_scales_ends_with_the_weights_of_one_that_was_not(unscaled, tmp_path):
    pytest.importorskip("torch")
    from test_training_restart import killed, open_run
    from training import simple_plan, train, weights

    scaled = Scaled(unscaled, np.linspace(2, 0.5, 12))
    plan = simple_plan(steps=12, examples=60, batch_size=10, strategy=scaled)
    whole = train(open_run(None, plan))
    first = train(open_run(tmp_path, plan), until=6)
    killed(first)
    resumed = train(open_run(tmp_path, plan))
    assert_array_equal(weights(resumed.model), weights(whole.model))
    plain = train(open_run(None, simple_plan(steps=12, examples=60, batch_size=10, strategy=unscaled)))
    assert not np.array_equal(weights(plain.model), weights(whole.model))


def test_training_in_jax_takes_step_scales_one_by_one_and_at_once():
    pytest.importorskip("jax")
    import jax_training as tiny
    from training import simple_plan

    scaled = Scaled(BandedToeplitz([1.0, 0.5, 0.3], tiny.STEPS), np.linspace(2, 0.5, tiny.STEPS))
    plans = [
        simple_plan(steps=tiny.STEPS, examples=tiny.EXAMPLES, batch_size=12, strategy=strategy)
        for strategy in (scaled, scaled.strategy)
    ]
    found, unscaled = (tiny.weights_of(plan, at_once=5) for plan in plans)
    assert_allclose(found, tiny.weights_of(plans[0]), rtol=0, atol=1e-6)
    assert np.abs(found - unscaled).max() > 1e-3
