"""b-min-sep Poisson sampling: the law it claims, from the first step on, for each example on its own."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bandmf import Key
from bandmf.accounting.min_separation import joining_probability, start_probabilities
from bandmf.randomness import chacha
from bandmf.sampling import MinSeparationPoisson
from bandmf.sampling import min_separation as module
from chance import RARE, assert_fits, keys
from min_separation_oracles import step_sets

(KEY,) = keys(1)
STEPS, SEPARATION, PROBABILITY, EXAMPLES = 7, 3, 0.3, 200_000


def taken(batches) -> np.ndarray:
    """examples x steps: who takes part when."""
    present = np.zeros((batches.examples, batches.steps), bool)
    for step in range(batches.steps):
        present[batches.batch(step), step] = True
    return present


def sampler(key=KEY, examples=40, steps=20, separation=4, probability=0.25):
    return MinSeparationPoisson(key, examples=examples, steps=steps, separation=separation, probability=probability)


def oracle(key, example, steps, separation, probability):
    """The steps of one example, from the block function of the cipher: free or waiting, gap after gap."""
    secret = chacha.key_words(key.derive("min-separation").secret)

    @cache
    def uniform(stream):
        words = chacha.block(secret, (stream, 0, 0), np.array([example // 8], np.uint32))[0]
        low, high = (int(word) for word in words[2 * (example % 8) : 2 * (example % 8) + 2])
        return (low + (high << 32)) / 2.0**64

    wait = int(np.searchsorted(np.cumsum(start_probabilities(separation, probability)), uniform(0)))
    steps_taken, time, stream = [], wait, 1
    while time < steps:
        below = 1 - (1 - probability)  # P(gap <= 0)
        while uniform(stream) >= below:
            time, below = time + 1, 1 - (1 - below) * (1 - probability)
        if time < steps:
            steps_taken.append(time)
        time, stream = time + separation, stream + 1
    return steps_taken


@pytest.mark.parametrize(("steps", "separation", "probability"), [(9, 3, 0.4), (20, 1, 0.2), (12, 4, 1.0)])
def test_steps_come_from_the_examples_own_words_of_the_cipher(steps, separation, probability):
    present = taken(sampler(examples=40, steps=steps, separation=separation, probability=probability))
    for example, row in enumerate(present):
        expected = oracle(KEY, example, steps, separation, probability)
        assert np.flatnonzero(row).tolist() == expected


# --- the law: every set of steps as often as it should ------------------------------------------------


def check_law(present) -> None:
    """Fail unless all sets of steps are as frequent as the stationary law says, and neighbors are independent."""
    sets = step_sets(STEPS, SEPARATION, PROBABILITY)
    code = present @ (1 << np.arange(STEPS))
    codes = [sum(1 << step for step in steps_taken) for steps_taken in sets]
    chances = np.array(list(sets.values()))
    counts = np.array([(code == number).sum() for number in codes])
    assert counts.sum() == len(present)  # no other set occurs
    assert_law(counts, chances)
    for distance in (1, 8):  # a block of the cipher holds eight words
        coarse = present.argmax(axis=1)  # the first step, or 0 if there is none or it is the first
        firsts = np.array([steps_taken[0] if steps_taken else 0 for steps_taken in sets])
        single = np.bincount(firsts, weights=chances, minlength=STEPS)
        pairs = np.bincount(STEPS * coarse[distance:] + coarse[:-distance], minlength=STEPS**2)
        assert_law(pairs, np.outer(single, single).ravel())


def assert_law(counts, chances) -> None:
    used = chances > 0
    assert counts[~used].sum() == 0
    expected = counts.sum() * chances[used]
    statistic = float(((counts[used] - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, used.sum() - 1) > RARE
    assert stats.chi2.cdf(statistic, used.sum() - 1) > RARE


def simulated(waits, separation=SEPARATION, probability=PROBABILITY) -> np.ndarray:
    """A sampler of its own, step by step, from these waits."""
    dice, wait = np.random.default_rng(3), waits.copy()
    present = np.zeros((len(waits), STEPS), bool)
    for step in range(STEPS):
        joins = (wait == 0) & (dice.random(len(waits)) < probability)
        present[:, step] = joins
        wait = np.where(joins, separation - 1, np.maximum(wait - 1, 0))
    return present


def stationary(separation=SEPARATION, probability=PROBABILITY) -> np.ndarray:
    chances = start_probabilities(separation, probability)
    return np.random.default_rng(4).choice(separation, EXAMPLES, p=chances)


def following() -> np.ndarray:
    """Now and then an example does what its neighbor does."""
    present = simulated(stationary())
    same = np.random.default_rng(5).random(EXAMPLES) < 0.02
    return np.where(same[:, None], np.roll(present, 1, axis=0), present)


PLANTED = {
    "cold start": lambda: simulated(np.zeros(EXAMPLES, int)),
    "uniform waits": lambda: simulated(np.random.default_rng(4).integers(0, SEPARATION, EXAMPLES)),
    "separation too small": lambda: simulated(stationary(2), separation=2),
    "separation too large": lambda: simulated(stationary(4), separation=4),
    "probability two percent off": lambda: simulated(stationary(probability=0.306), probability=1.02 * PROBABILITY),
    "neighbors alike": following,
}


def test_every_set_of_steps_is_as_frequent_as_the_stationary_law_says():
    check_law(taken(sampler(KEY, EXAMPLES, STEPS, SEPARATION, PROBABILITY)))
    check_law(simulated(stationary()))


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_samplers_that_are_not_are_caught(fault):
    with pytest.raises(AssertionError):
        check_law(PLANTED[fault]())


def test_all_batches_have_the_same_expected_size_from_the_first_on():
    steps, separation, epochs = 64, 8, 4
    p = joining_probability(steps, epochs, separation)
    batches = sampler(examples=100_000, steps=steps, separation=separation, probability=p)
    sizes = [len(batches.batch(step)) for step in range(steps)]
    for step in (0, 1, 7, 8, 40, 63):
        assert_fits([sizes[step]], epochs / steps, 100_000)
    assert sum(sizes) / 100_000 == pytest.approx(epochs, rel=0.005)
    cold = np.random.default_rng(1).binomial(100_000, p)  # the first batch of a cold start
    with pytest.raises(AssertionError):
        assert_fits([cold], epochs / steps, 100_000)


def test_over_keys_an_example_follows_the_same_law():
    first = [taken(sampler(key, 3, 2, 2, 0.4))[1] for key in keys(4000, first=900)]
    counts = np.bincount([2 * row[1] + row[0] for row in first], minlength=4)
    sets = step_sets(2, 2, 0.4)
    assert_law(counts, np.array([sets[()], sets[(0,)], sets[(1,)], 0.0]))


def test_with_probability_one_it_is_balls_in_bins():
    present = taken(sampler(examples=30_000, steps=12, separation=4, probability=1.0))
    first = present.argmax(axis=1)
    for bin_ in range(4):
        assert (present[first == bin_] == (np.arange(12) % 4 == bin_)).all()
    assert_law(np.bincount(first), np.full(4, 0.25))


# --- guarantees ---------------------------------------------------------------------------------------

LAWS = {
    "examples": st.integers(1, 60),
    "steps": st.integers(1, 40),
    "separation": st.integers(1, 12),
    "probability": st.sampled_from([0.01, 0.3, 0.9, 1.0]),
}


@given(**LAWS)
def test_the_separation_is_never_violated(examples, steps, separation, probability):
    batches = sampler(KEY, examples, steps, separation, probability)
    last = np.full(examples, -separation)
    for step in range(steps):
        batch = batches.batch(step)
        assert (np.diff(batch) > 0).all()
        assert (step - last[batch] >= separation).all()
        last[batch] = step


@given(**LAWS)
def test_an_example_more_or_less_does_not_change_the_steps_of_others(examples, steps, separation, probability):
    smaller = taken(sampler(KEY, examples, steps, separation, probability))
    larger = taken(sampler(KEY, examples + 1, steps, separation, probability))
    np.testing.assert_array_equal(larger[:-1], smaller)


def test_more_steps_continue_the_same_batches():
    np.testing.assert_array_equal(taken(sampler(steps=30))[:, :20], taken(sampler(steps=20)))


def test_steps_do_not_depend_on_the_size_of_chunks(monkeypatch):
    whole = taken(sampler(examples=1000))
    monkeypatch.setattr(module, "_CHUNK", 64)
    np.testing.assert_array_equal(taken(sampler(examples=1000)), whole)


def test_a_restart_continues_with_the_same_batches():
    """It has no state: any step of a new one is that of the old one, in any order."""
    first, again = sampler(examples=400), sampler(examples=400)
    batches = [first.batch(step) for step in range(20)]
    for step in (19, 3, 17, 3):
        np.testing.assert_array_equal(again.batch(step), batches[step])
    assert first.provenance == again.provenance
    batches[3][:] = 0  # a batch is the caller's to change
    np.testing.assert_array_equal(first.batch(3), again.batch(3))


def test_different_keys_draw_different_batches():
    one, two, run = (taken(sampler(key, examples=500)) for key in (*keys(2, first=77), KEY.for_run("ab" * 16)))
    assert (one != two).any(axis=1).mean() > 0.9
    assert (one != run).any(axis=1).mean() > 0.9


def test_provenance_tells_samplers_apart():
    base = sampler().provenance
    assert base["kind"] == "MinSeparationPoisson"
    changes = [{"key": Key()}, {"examples": 41}, {"steps": 21}, {"separation": 5}, {"probability": 0.26}]
    assert all(sampler(**change).provenance != base for change in changes)


def test_it_holds_one_number_per_participation():
    batches = sampler(examples=10_000, steps=64, separation=8, probability=joining_probability(64, 4, 8))
    assert batches._placed.dtype == np.int64
    assert len(batches._placed) == sum(len(batches.batch(step)) for step in range(64))


@pytest.mark.parametrize("step", [-1, 20, 1.5])
def test_steps_outside_the_plan_are_refused(step):
    with pytest.raises(ValueError, match="step="):
        sampler().batch(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples=0"),
        ({"examples": 2**40}, "examples=1099511627776"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2**62}, "steps=4611686018427387904.*take fewer steps"),
        ({"separation": 0}, "separation=0"),
        ({"separation": 2.5}, "separation=2.5"),
        ({"probability": 0.0}, "probability=0.0"),
        ({"probability": 1.1}, "probability=1.1.*joining_probability"),
        ({"probability": float("nan")}, "probability=nan"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sampler(**change)


def test_the_joining_probability_gives_so_many_epochs():
    for steps, epochs, separation in ((1024, 8, 32), (100, 10, 10), (64, 1.5, 1)):
        p = joining_probability(steps, epochs, separation)
        assert steps * p / (1 + (separation - 1) * p) == pytest.approx(epochs)
    with pytest.raises(ValueError, match=r"separation=11: must be at most steps / epochs = 10"):
        joining_probability(100, 10, 11)
