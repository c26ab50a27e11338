"""Sweeps over many cases, of which `make test` takes a few and `make test-long` the others."""

from __future__ import annotations

from itertools import product

import pytest


def some_long(cases, ordinary):
    """The cases, marked long where `ordinary(case)` does not hold."""
    return [case if ordinary(case) else _long(case) for case in cases]


def spread(cases, ordinary):
    """The cases, marked long but for so many of them: the first, the last, and others at equal distances."""
    cases = list(cases)
    chosen = {round(place * (len(cases) - 1) / (ordinary - 1)) for place in range(ordinary)}
    return [case if place in chosen else _long(case) for place, case in enumerate(cases)]


def in_turn(*sides):
    """All combinations of the sides, marked long but for as many as the longest has: there every value has its turn."""
    turns = {tuple(turn % len(side) for side in sides) for turn in range(max(map(len, sides)))}
    places = product(*(range(len(side)) for side in sides))
    chosen = product(*sides)
    return [case if place in turns else _long(case) for place, case in zip(places, chosen, strict=True)]


def _long(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
