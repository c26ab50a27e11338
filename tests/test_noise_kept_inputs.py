"""Banded inverses that keep some of the last z: as much memory as was asked for, and the same noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bandmf
from bandmf import Key
from bandmf.noise import NumpyEngine, normals
from bandmf.noise.schedule import Schedule, vectors_held
from bandmf.noise.sealing import fresh_salt
from bandmf.strategies import BandedInverse, Identity, tree_aggregation
from noise_families import ENGINES, largest_difference, numpy_noise, oracle_noise, toeplitz
from test_noise_engines import Driver

INVERSE = BandedInverse([1.5, -0.5, 0.2, 0.1, -0.3], 14)
SHAPES = {"w": (3, 5), "b": (2,)}


def followed(schedule: Schedule) -> tuple[np.ndarray, int]:
    """C^-1 as the steps of a schedule spell it out, and the most draws of any of them: the slow way.

    Each slot is a note of whose z lies there.
    """
    matrix, slots, most = np.zeros((schedule.steps, schedule.steps)), [None] * schedule.slots, 0
    for i in range(schedule.steps):
        step = schedule.step(i)
        for drawn, feed in step.draws:
            matrix[i, drawn] += feed
        for slot, weight in step.reads:
            assert slots[slot] is not None, "a slot is read before anything is there"
            matrix[i, slots[slot]] += weight
        assert step.draws[0][0] == i
        if step.store is not None:
            assert step.stores_input
            slots[step.store] = i
        most = max(most, len(step.draws))
    return matrix, most


@pytest.mark.parametrize(
    "strategy", [INVERSE, BandedInverse([2.0, 0.0, -0.5], 9), BandedInverse([1.0], 4), tree_aggregation(11)]
)
def test_every_schedule_spells_out_the_inverse(strategy):
    expected = strategy.inverse().materialize(strategy.steps)
    needed = Schedule(strategy, kept_inputs=None).kept_inputs
    assert needed == min(strategy.recurrence.bands, strategy.steps) - 1
    for kept in range(needed + 1):
        schedule = Schedule(strategy, kept_inputs=kept)
        matrix, draws = followed(schedule)
        np.testing.assert_allclose(matrix, expected, rtol=1e-14, atol=0)  # double rounding: the tree sums another way
        assert draws <= 1 + needed - kept
        assert schedule.vectors == schedule.slots == kept


def test_inputs_are_drawn_again_unless_told_otherwise():
    assert Schedule(INVERSE).vectors == vectors_held(INVERSE) == 0
    assert Schedule(INVERSE, max_vectors=3).vectors == 0


@pytest.mark.parametrize(("limit", "kept"), [(None, 4), (9, 4), (4, 4), (3, 3), (1, 1), (0, 0)])
def test_under_a_memory_limit_the_most_recent_are_kept_that_fit(limit, kept):
    schedule = Schedule(INVERSE, max_vectors=limit, kept_inputs=None)
    assert schedule.vectors == kept == vectors_held(INVERSE, max_vectors=limit, kept_inputs=None)
    step = schedule.step(13)
    assert [drawn for drawn, _ in step.draws] == [13, *range(12 - kept, 8, -1)]
    assert len(step.reads) == kept
    state = NumpyEngine(INVERSE, max_vectors=limit, kept_inputs=None).init({"w": (1000,)})
    assert state.history["w"].size + state.prepared["w"].size == 1000 * kept


def test_the_limit_of_a_plan_is_never_passed():
    plan = bandmf.plan(
        epsilon=4, delta=1e-6, steps=40, examples=1000, batch_size=50, adjacency="zero-out",
        participation=bandmf.participation.MinSeparation(2, 20),
        strategy=BandedInverse([1.0, -0.5, -0.1, -0.05], 40), parameters=100, memory=900,
    )  # fmt: skip
    assert plan.max_vectors == 2
    assert plan.memory == 800  # as training runs it: two of three past z are kept
    assert Schedule(plan.strategy, max_vectors=plan.max_vectors, kept_inputs=None).vectors == 2


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (INVERSE, {"kept_inputs": 5}, r"kept_inputs=5: must be a whole number between 0 and 4 \(bands of C\^-1"),
        (INVERSE, {"kept_inputs": -1}, "kept_inputs=-1: must be a whole number between 0 and 4"),
        (INVERSE, {"kept_inputs": 1.5}, "kept_inputs=1.5"),
        (INVERSE, {"kept_inputs": 3, "max_vectors": 2}, r"between 0 and 2 \(max_vectors=2\)"),
        (INVERSE, {"kept_inputs": None, "max_vectors": -1}, "max_vectors=-1"),
        (toeplitz(9, 3), {"kept_inputs": 1}, r"kept_inputs=1: .* 0 \(only for banded C\^-1\)"),
    ],
)
@pytest.mark.parametrize("name", ENGINES)
def test_more_than_is_needed_or_fits_is_refused(name, strategy, options, message):
    with pytest.raises(ValueError, match=message):
        Driver(name, strategy, **options)


def test_strategies_without_past_inputs_keep_none():
    assert Schedule(toeplitz(9, 3), kept_inputs=None).kept_inputs == 0
    assert Schedule(Identity(3), kept_inputs=None).kept_inputs == 0


def test_all_kept_are_all_drawn_again_bit_for_bit():
    key = Key()
    again = numpy_noise(INVERSE, key, SHAPES)
    assert largest_difference(again, numpy_noise(INVERSE, key, SHAPES, kept_inputs=None)) == 0
    assert largest_difference(again, numpy_noise(INVERSE, key, SHAPES, kept_inputs=2)) < 2e-6


@pytest.mark.parametrize("name", ENGINES)
def test_the_history_is_the_last_z(name):
    driver = Driver(name, INVERSE, kept_inputs=3)
    state = driver.engine.init(SHAPES)
    zeros = {tensor: np.zeros(shape) for tensor, shape in SHAPES.items()}
    for _ in range(8):
        state, _ = driver.add(state, {tensor: driver.array(value) for tensor, value in zeros.items()})
    history = np.asarray(driver.engine.state_dict(state)["history"]["w"]).reshape(3, 15)
    secret = driver.key.derive("noise").secret
    for step in (5, 6, 7):  # "w" is tensor 1 of the sorted names
        np.testing.assert_allclose(history[step % 3], normals.reference(secret, step, 1, 0, 15), atol=2e-6)


@pytest.mark.parametrize("planted", ["y is stored", "one step too old", "nothing is stored"])
def test_a_wrong_history_is_seen_by_the_comparison_with_the_oracle(planted, monkeypatch):
    right = Schedule.step

    def wrong(self, i, refreshed=-1):
        step = right(self, i, refreshed)
        if planted == "y is stored":
            return replace(step, stores_input=False)
        if planted == "one step too old":
            return replace(step, reads=tuple(((slot - 1) % self.slots, weight) for slot, weight in step.reads))
        return replace(step, store=None)

    key = Key()
    expected = oracle_noise(INVERSE, key, SHAPES)
    assert largest_difference(numpy_noise(INVERSE, key, SHAPES, kept_inputs=4), expected) < 1e-5
    monkeypatch.setattr(Schedule, "step", wrong)
    assert largest_difference(numpy_noise(INVERSE, key, SHAPES, kept_inputs=4), expected) > 0.1


@pytest.mark.parametrize("name", ENGINES)
def test_a_state_that_keeps_another_number_is_refused(name):
    """Its slots mean other steps."""
    key = Key()
    mine = Driver(name, INVERSE, key, kept_inputs=3)
    gradients = {tensor: mine.array(np.zeros(shape)) for tensor, shape in SHAPES.items()}
    for kept in (0, 2):
        other = Driver(name, INVERSE, key, kept_inputs=kept)
        state = other.engine.init(SHAPES)
        with pytest.raises(ValueError, match="keeps another number of vectors"):
            mine.add(state, gradients)
        with pytest.raises(ValueError, match="keeps another number of vectors"):
            mine.engine.load_state_dict(mine.engine.init(SHAPES), other.engine.state_dict(state))


def test_a_sealed_history_of_inputs_is_encrypted_and_comes_back():
    torch = pytest.importorskip("torch")
    from bandmf.torch import Engine
    from bandmf.torch.noise import sealing

    key, alone = Key(), lambda value: [value]
    engine = Engine(INVERSE, key, kept_inputs=2)

    def noise_of(state, steps):
        made = []
        for _ in range(steps):
            gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            engine.add(state, gradients, 1.0)
            made.append({name: value.numpy() for name, value in gradients.items()})
        return made

    state = engine.init(SHAPES)
    noise_of(state, 6)
    clear = state.history["w"].clone()
    with sealing.sealed(state, key, alone, fresh_salt()) as kept:
        saved = engine.state_dict(state)
    assert torch.equal(state.history["w"], clear)
    assert not torch.isclose(saved["history"]["w"], clear).any()
    again = engine.load_state_dict(engine.init(SHAPES), saved)
    sealing.unseal(again, kept, key, alone)
    assert torch.equal(again.history["w"], clear)
    expected = oracle_noise(INVERSE, key, SHAPES)
    assert largest_difference(noise_of(again, 8), expected[6:]) < 1e-5
    saved["history"]["w"].view(torch.int32)[1, 3] ^= 1
    changed = engine.load_state_dict(engine.init(SHAPES), saved)
    with pytest.raises(ValueError, match="its tag does not fit"):
        sealing.unseal(changed, kept, key, alone)
