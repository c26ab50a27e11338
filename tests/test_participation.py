"""Participation: the patterns are those that the words permit, all of them and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf.participation import FixedEpochs, MinSeparation, Single
from oracles import epoch_patterns, separated_patterns

small = st.integers(1, 9)


def largest_only(patterns):
    """Those that are not part of a larger one."""
    sets = [frozenset(p) for p in patterns]
    return {s for s in sets if not any(s < other for other in sets)}


@given(steps=small)
def test_single_permits_each_step_alone(steps):
    assert list(Single().patterns(steps)) == [(i,) for i in range(steps)]


@given(steps=small, times=st.integers(1, 4), separation=st.integers(1, 10))
def test_min_separation_lists_every_largest_pattern_once(steps, times, separation):
    listed = list(MinSeparation(times, separation).patterns(steps))
    assert len(set(listed)) == len(listed)
    assert {frozenset(p) for p in listed} == largest_only(separated_patterns(steps, times, separation))


@given(steps=small, times=st.integers(1, 4), separation=st.integers(1, 10))
def test_count_is_the_most_that_fits(steps, times, separation):
    most = max(len(p) for p in separated_patterns(steps, times, separation))
    assert MinSeparation(times, separation).count(steps) == most


@given(length=st.integers(1, 5), epochs=st.integers(1, 5))
def test_fixed_epochs_takes_the_same_place_in_every_epoch(length, epochs):
    steps, participation = length * epochs, FixedEpochs(epochs)
    assert list(participation.patterns(steps)) == epoch_patterns(steps, epochs)
    assert participation.separation(steps) == length


def test_epochs_must_divide_the_steps():
    with pytest.raises(ValueError, match="epochs=3: must divide steps=10"):
        FixedEpochs(3).patterns(10)


def test_equal_participations_are_equal_and_hashable():
    assert len({Single(), Single(), MinSeparation(2, 3), MinSeparation(2, 3), FixedEpochs(2)}) == 3


def test_whole_numbers_of_any_type_become_int():
    assert list(MinSeparation(2.0, 3.0).patterns(5)) == list(MinSeparation(2, 3).patterns(5))
    assert FixedEpochs(2.0).separation(6) == 3
    assert isinstance(FixedEpochs(2.0).separation(6), int)
