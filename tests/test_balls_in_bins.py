"""Balls-in-bins: every example draws its own place in the cycle, and nothing else moves it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf import Key
from bandmf.randomness import chacha
from bandmf.sampling import BallsInBins
from bandmf.sampling import bins as module
from chance import assert_fits, assert_uniform, keys

(KEY,) = keys(1)


def bins_of(batches) -> np.ndarray:
    """The bin of every example."""
    bins = np.full(batches.examples, -1)
    for place in range(batches.cycle):
        bins[batches.batch(place)] = place
    return bins


def oracle(key: Key, examples: int, cycle: int) -> np.ndarray:
    """The bin of every example, from the block function of the cipher, one example at a time."""
    secret = chacha.key_words(key.derive("bins").secret)
    bins = []
    for example in range(examples):
        words = chacha.block(secret, (0, 0, 0), np.array([example // 8], np.uint32))[0]
        low, high = (int(word) for word in words[2 * (example % 8) : 2 * (example % 8) + 2])
        bins.append((low + (high << 32)) % cycle)
    return np.array(bins)


@pytest.mark.parametrize(("examples", "cycle"), [(1, 1), (7, 3), (100, 1), (203, 10), (64, 100)])
def test_bins_are_the_words_of_the_cipher(examples, cycle):
    batches = BallsInBins(KEY, examples=examples, steps=cycle, cycle=cycle)
    np.testing.assert_array_equal(bins_of(batches), oracle(KEY, examples, cycle))


def test_bins_do_not_depend_on_the_size_of_chunks(monkeypatch):
    whole = bins_of(BallsInBins(KEY, examples=1000, steps=7, cycle=7))
    monkeypatch.setattr(module, "_CHUNK", 64)
    np.testing.assert_array_equal(bins_of(BallsInBins(KEY, examples=1000, steps=7, cycle=7)), whole)


# --- each example takes part once an epoch, at one place --------------------------------------------------


@given(examples=st.integers(1, 60), steps=st.integers(1, 40), data=st.data())
def test_each_example_takes_part_once_an_epoch_in_the_same_place(examples, steps, data):
    cycle = data.draw(st.integers(1, steps))
    batches = BallsInBins(KEY, examples=examples, steps=steps, cycle=cycle)
    assert batches.cycle == cycle
    taken = [[] for _ in range(examples)]
    for step in range(steps):
        batch = batches.batch(step)
        assert (np.diff(batch) > 0).all()
        for example in batch:
            taken[example].append(step)
    for steps_taken in taken:
        assert len(steps_taken) <= -(-steps // cycle)
        assert steps_taken == list(range(steps_taken[0], steps, cycle))
        assert steps_taken[0] < cycle


def test_the_last_epoch_is_cut_off():
    batches = BallsInBins(KEY, examples=500, steps=10, cycle=4)  # epochs of 4, 4 and 2 steps
    bins, counts = bins_of(batches), np.zeros(500, int)
    for step in range(10):
        counts[batches.batch(step)] += 1
    np.testing.assert_array_equal(counts, np.where(bins < 2, 3, 2))


def test_a_restart_continues_with_the_same_batches():
    """It has no state: any step of a new one is that of the old one, in any order."""
    first = BallsInBins(KEY, examples=400, steps=30, cycle=8)
    batches = [first.batch(step) for step in range(30)]
    again = BallsInBins(KEY, examples=400, steps=30, cycle=8)
    for step in (29, 3, 17, 3):
        np.testing.assert_array_equal(again.batch(step), batches[step])
    assert first.provenance == again.provenance


def test_a_batch_is_the_callers_to_change():
    batches = BallsInBins(KEY, examples=50, steps=4, cycle=2)
    before = batches.batch(1).copy()
    batches.batch(1)[:] = 0
    np.testing.assert_array_equal(batches.batch(3), before)


@given(examples=st.integers(1, 300), cycle=st.integers(1, 50))
def test_an_example_more_or_less_does_not_change_the_bins_of_others(examples, cycle):
    smaller = bins_of(BallsInBins(KEY, examples=examples, steps=cycle, cycle=cycle))
    larger = bins_of(BallsInBins(KEY, examples=examples + 1, steps=cycle, cycle=cycle))
    np.testing.assert_array_equal(larger[:-1], smaller)


# --- bins are uniform and independent ---------------------------------------------------------------------

CYCLE = 5


def check_bins(bins_of_key, count=12_000) -> None:
    """Fail unless, over many keys, the first three of twelve examples are each in every bin equally often, and
    in every combination of bins two by two and all together."""
    cells = np.zeros((CYCLE,) * 3)
    for key in keys(count, first=5000):
        cells[tuple(bins_of_key(key)[:3])] += 1
    for others in ((1, 2), (0, 2), (0, 1), (0,), (1,), (2,), ()):
        assert_uniform(cells.sum(axis=others))


def real(key: Key) -> np.ndarray:
    return bins_of(BallsInBins(key, examples=12, steps=CYCLE, cycle=CYCLE))


def biased(key: Key) -> np.ndarray:
    """One of ten examples of bin 0 goes to bin 1 instead."""
    dice = np.random.default_rng(list(key.secret))
    bins = dice.integers(0, CYCLE, 12)
    return np.where((bins == 0) & (dice.random(12) < 0.1), 1, bins)


def shuffled(key: Key) -> np.ndarray:
    """Bins of equal size, as by a shuffle: each uniform, but not independent."""
    return np.random.default_rng(list(key.secret)).permutation(np.arange(12) % CYCLE)


def neighbors(key: Key) -> np.ndarray:
    """Now and then an example follows its neighbor."""
    dice = np.random.default_rng(list(key.secret))
    bins = dice.integers(0, CYCLE, 12)
    return np.where(dice.random(12) < 0.05, np.roll(bins, 1), bins)


def test_over_keys_bins_are_uniform_and_independent():
    check_bins(real)


@pytest.mark.parametrize("planted", [biased, shuffled, neighbors])
def test_planted_bins_that_are_not_are_caught_by_the_same_chi_square(planted):
    with pytest.raises(AssertionError):
        check_bins(planted)


def test_with_one_key_bins_of_many_examples_are_uniform_and_independent():
    bins = bins_of(BallsInBins(KEY, examples=1_000_000, steps=20, cycle=20))
    assert_uniform(np.bincount(bins))
    for distance in (1, 2, 7, 8, 64):  # a block of the cipher holds eight
        assert_uniform(np.bincount(20 * bins[distance:] + bins[:-distance], minlength=400))
    uneven = np.where((bins == 0) & (np.arange(1_000_000) % 20 == 0), 1, bins)  # one of twenty of bin 0 moved
    with pytest.raises(AssertionError):
        assert_uniform(np.bincount(uneven))
    alternating = np.sort(bins.reshape(-1, 2), axis=1).ravel()  # the same counts, in another order
    with pytest.raises(AssertionError):
        assert_uniform(np.bincount(20 * alternating[1:] + alternating[:-1], minlength=400))


def test_sizes_of_batches_are_binomial():
    sizes = [len(BallsInBins(key, examples=400, steps=12, cycle=4).batch(6)) for key in keys(300)]
    assert_fits(sizes, 1 / 4, 400)
    with pytest.raises(AssertionError):
        assert_fits([100] * 300, 1 / 4, 400)  # equal sizes


def test_different_keys_draw_different_and_independent_bins():
    one, two = (bins_of(BallsInBins(key, examples=20_000, steps=8, cycle=8)) for key in keys(2, first=77))
    assert_uniform(np.bincount(8 * one + two, minlength=64))
    run = bins_of(BallsInBins(KEY.for_run("ab" * 16), examples=20_000, steps=8, cycle=8))
    mine = bins_of(BallsInBins(KEY, examples=20_000, steps=8, cycle=8))
    assert_uniform(np.bincount(8 * run + mine, minlength=64))


# --- provenance, cost, refusals ---------------------------------------------------------------------------


def test_provenance_tells_samplers_apart():
    def provenance(key=KEY, examples=400, steps=30, cycle=8):
        return BallsInBins(key, examples=examples, steps=steps, cycle=cycle).provenance

    assert provenance()["kind"] == "BallsInBins"
    others = [provenance(key=Key()), provenance(examples=401), provenance(cycle=6)]
    assert all(other != provenance() for other in others)
    assert provenance(steps=31) == provenance()  # the cycle is 8, too: the same batches, and one more


def test_it_holds_one_number_per_example_and_a_step_costs_the_batch():
    examples = 2_000_000
    tracemalloc.start()
    batches = BallsInBins(KEY, examples=examples, steps=40_000, cycle=20_000)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    sizes = [len(batches.batch(step)) for step in range(200)]
    of_batches = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert held < 8 * examples + 1e6  # one 64-bit number each, and the bounds
    assert peak < 8 * examples + 5 * 8 * module._CHUNK
    assert of_batches < 1e5
    assert_fits([sum(sizes)], 200 / 20_000, examples)


@pytest.mark.long
def test_a_hundred_million_examples():
    batches = BallsInBins(KEY, examples=10**8, steps=2048, cycle=1024)
    assert batches._placed.nbytes == 8 * 10**8
    assert_uniform([len(batches.batch(step)) for step in range(1024)])


@pytest.mark.parametrize("step", [-1, 8, 1.5])
def test_steps_outside_the_plan_are_refused(step):
    with pytest.raises(ValueError, match="step="):
        BallsInBins(KEY, examples=10, steps=8, cycle=4).batch(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples=0"),
        ({"examples": 2**40}, "examples=1099511627776"),
        ({"steps": 0}, "steps=0"),
        ({"cycle": 0}, r"cycle=0: must be a whole number between 1 and 8 \(steps=8\)"),
        ({"cycle": 9}, r"cycle=9: must be a whole number between 1 and 8 \(steps=8\)"),
        ({"cycle": 2.5}, "cycle=2.5"),
        ({"steps": 2**62, "cycle": 2**62}, "cycle=4611686018427387904: must be a whole number between 1 and 9223"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BallsInBins(KEY, **{"examples": 10, "steps": 8, "cycle": 4, **change})
