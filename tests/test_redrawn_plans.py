"""Bins redrawn every epoch, from the sampler to a trained model: the law of the places, plans, restarts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bandmf
from bandmf import Key
from bandmf.accounting import redrawn
from bandmf.accounting.bins import NotCertifiedError
from bandmf.planning.plan import Plan
from bandmf.randomness import chacha
from bandmf.sampling import BallsInBins, RedrawnBins, sampler
from bandmf.strategies import BandedToeplitz, BufferedToeplitz, Scaled
from chance import assert_uniform, keys

(KEY,) = keys(1)
REDRAWN = "balls-in-bins-redrawn"
SMALL = {"epsilon": 8, "delta": 1e-3, "examples": 60, "batch_size": 6, "steps": 23, "sampling": REDRAWN}
MINE = Scaled(BandedToeplitz([1.0, 0.5, 0.25], 23), np.linspace(1, 0.5, 23))


# --- the places -------------------------------------------------------------------------------------------


def places_of(batches, epoch) -> np.ndarray:
    """The place of every example in an epoch; -1 where that is past the last step."""
    places = np.full(batches.examples, -1)
    for place in range(min(batches.cycle, batches.steps - epoch * batches.cycle)):
        places[batches.batch(epoch * batches.cycle + place)] = place
    return places


def oracle(key: Key, examples: int, cycle: int, epoch: int) -> np.ndarray:
    """The same from the block function of the cipher, one example at a time."""
    secret = chacha.key_words(key.derive("redrawn-bins").secret)
    places = []
    for example in range(examples):
        words = chacha.block(secret, (epoch, 0, 0), np.array([example // 8], np.uint32))[0]
        low, high = (int(word) for word in words[2 * (example % 8) : 2 * (example % 8) + 2])
        places.append((low + (high << 32)) % cycle)
    return np.array(places)


@pytest.mark.parametrize(("examples", "cycle", "epochs"), [(1, 1, 2), (7, 3, 3), (203, 10, 2)])
def test_places_are_the_words_of_the_cipher(examples, cycle, epochs):
    batches = RedrawnBins(KEY, examples=examples, steps=cycle * epochs, cycle=cycle)
    for epoch in range(epochs):
        np.testing.assert_array_equal(places_of(batches, epoch), oracle(KEY, examples, cycle, epoch))


@given(examples=st.integers(1, 60), steps=st.integers(1, 40), data=st.data())
def test_each_example_takes_part_once_an_epoch(examples, steps, data):
    """In the last epoch, which may be cut off, those whose place is past the last step do not."""
    cycle = data.draw(st.integers(1, steps))
    batches = RedrawnBins(KEY, examples=examples, steps=steps, cycle=cycle)
    counts = np.zeros((-(-steps // cycle), examples), int)
    for step in range(steps):
        batch = batches.batch(step)
        assert (np.diff(batch) > 0).all()
        counts[step // cycle, batch] += 1
    assert (counts[: steps // cycle] == 1).all()
    if steps % cycle:
        expected = oracle(KEY, examples, cycle, steps // cycle) < steps % cycle
        np.testing.assert_array_equal(counts[-1], expected)


@given(examples=st.integers(1, 300), cycle=st.integers(1, 50), more=st.integers(1, 9))
def test_other_examples_and_more_steps_change_no_place(examples, cycle, more):
    smaller = RedrawnBins(KEY, examples=examples, steps=2 * cycle, cycle=cycle)
    larger = RedrawnBins(KEY, examples=examples + more, steps=2 * cycle + more, cycle=cycle)
    for epoch in range(2):
        np.testing.assert_array_equal(places_of(larger, epoch)[:examples], places_of(smaller, epoch))


def check_places(places_of_key, count=4000):
    """Fail unless, over many keys, two examples have all combinations of places in two epochs equally often."""
    cells = np.zeros((3,) * 4)
    for key in keys(count, first=5000):
        cells[tuple(places_of_key(key))] += 1
    assert_uniform(cells)
    for others in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2), (2, 3), (1, 3), (0, 2)):
        assert_uniform(cells.sum(axis=others))


def real(key: Key) -> np.ndarray:
    batches = RedrawnBins(key, examples=2, steps=6, cycle=3)
    return np.concatenate([places_of(batches, 0), places_of(batches, 1)])


def fixed(key: Key) -> np.ndarray:
    """Planted: the places of the first epoch again."""
    return np.tile(real(key)[:2], 2)


def shuffled(key: Key) -> np.ndarray:
    """Planted: two examples that are never at the same place."""
    found = real(key)
    found[[1, 3]] = (found[[0, 2]] + 1 + found[[1, 3]] % 2) % 3
    return found


def test_places_are_uniform_and_independent_between_examples_and_epochs():
    check_places(real)
    for planted in (fixed, shuffled):
        with pytest.raises(AssertionError):
            check_places(planted)


def test_a_restart_continues_with_the_same_batches():
    """Any step of a new sampler is that of the old one, in any order."""
    first, again = (RedrawnBins(KEY, examples=400, steps=30, cycle=8) for _ in range(2))
    batches = [first.batch(step) for step in range(30)]
    for step in (29, 3, 17, 3, 8, 24):
        np.testing.assert_array_equal(again.batch(step), batches[step])
    assert first.provenance == again.provenance
    batches[5][:] = 0
    assert not np.array_equal(first.batch(5), batches[5])


def test_they_are_not_the_fixed_bins():
    redrawn_bins, bins = (kind(KEY, examples=400, steps=16, cycle=8) for kind in (RedrawnBins, BallsInBins))
    assert redrawn_bins.provenance != bins.provenance
    assert not np.array_equal(redrawn_bins.batch(0), bins.batch(0))
    assert not np.array_equal(redrawn_bins.batch(0), redrawn_bins.batch(8))


# --- plans ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    return bandmf.plan(**SMALL, strategy=MINE, certify_seconds=2)


def test_a_plan_is_certified_for_its_own_sampling(plan):
    assert (plan.sampling, plan.cycle, plan.in_bins) == (REDRAWN, 10, True)
    assert isinstance(plan.certificate, redrawn.Certificate)
    assert plan.certificate.cycle == 10
    found = redrawn.estimate(plan.strategy, 10, 8.0, 1e-3, samples=2**14)
    assert 1 < plan.noise_multiplier / found.sigma < 1.05
    assert plan.sampling_probability is plan.rounds is None
    assert "draws one of them anew" in plan.explain()
    assert isinstance(sampler(plan, KEY), RedrawnBins)


def test_a_plan_is_saved_loaded_and_verified(plan, tmp_path):
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    assert loaded.verify() == plan.certificate
    assert loaded.verify(seed=11).sigma == plan.certificate.sigma


@pytest.mark.parametrize("change", [{"sampling": "balls-in-bins"}, {"noise_multiplier": 0.4}, {"strategy": None}])
def test_a_changed_plan_is_refused(plan, change):
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    with pytest.raises((NotCertifiedError, ValueError), match="certificate"):
        Plan(**values | (change if "strategy" not in change else {"strategy": BandedToeplitz([1.0, 0.6, 0.25], 23)}))


def test_a_blt_with_decay_is_planned():
    blt = BufferedToeplitz(scales=[0.3], decays=[0.6], steps=23)
    found = bandmf.plan(**SMALL, strategy=blt, certify_seconds=2)
    assert (found.mechanism, found.vectors) == ("blt", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": MINE, "adjacency": "replace"}, "not against adjacency='replace'"),
        ({"strategy": MINE, "max_batch_size": 9}, "max_batch_size=9"),
        ({"strategy": MINE, "mechanism": "blt"}, "has no meaning"),
        ({"strategy": MINE, "inverse_bands": 4}, "is for balls-in-bins"),
    ],
)
def test_what_cannot_be_honored_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        bandmf.plan(**SMALL, **changes)


# --- training in JAX (PyTorch: test_training_bins.py) -------------------------------------------------------


@pytest.mark.long
def test_jax_trains_with_these_batches_and_goes_on_within_an_epoch(plan, monkeypatch, tmp_path):
    tiny, asked = pytest.importorskip("jax_training"), []
    batch = RedrawnBins.batch
    monkeypatch.setattr(RedrawnBins, "batch", lambda self, step: asked.append(step) or batch(self, step))
    data = tiny.data(plan.examples)
    whole = tiny.weights_of(plan, data=data)
    assert set(asked) == set(range(plan.steps))
    with tiny.training(plan, data=data, folder=tmp_path, save_every=1) as first:
        tiny.trained(first, until=14)  # the second epoch has the steps 11 to 20
    asked.clear()
    again = tiny.weights_of(plan, data=data, folder=tmp_path, at_once=4)
    assert min(asked) >= 13
    np.testing.assert_allclose(again, whole, rtol=0, atol=1e-6)
