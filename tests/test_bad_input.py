"""Bad input gets one clear sentence, with the value and what is permitted; nothing is silently accepted."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from bandmf import optimize, streaming, workloads
from bandmf.error import per_step_error
from bandmf.optimize import banded, banded_toeplitz, dense, horizon, inverse_plus_constant
from bandmf.participation import FixedEpochs, MinSeparation
from bandmf.sensitivities import sensitivity
from bandmf.strategies import Banded, BandedToeplitz, Dense, Identity

NAN, INF = math.nan, math.inf
FAMILIES = [banded_toeplitz, banded, inverse_plus_constant, horizon]
NOT_WHOLE = [2.5, NAN, INF, "8", None, True, [8], 0, -3]


def refuse(call, *needles):
    """The call raises a ValueError of one sentence in one line that contains all the needles."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is examined below
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    for needle in needles:
        assert needle in text, f"{needle!r} is not in {text!r}"


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        Identity,
        lambda steps: BandedToeplitz([1.0], steps),
        workloads.prefix,
        lambda steps: workloads.momentum(steps, 0.9),
        lambda steps: workloads.toeplitz([1.0], steps),
        lambda steps: workloads.streaming_operator(streaming.prefix(), steps),
        workloads.cooldown,
        workloads.cosine,
        dense,
        *[lambda steps, family=family: family(steps, 1) for family in FAMILIES],
    ],
)
def test_steps_that_are_not_a_whole_number_of_at_least_one(make, value):
    refuse(lambda: make(value), f"steps={value!r}", "whole number", "1")


@pytest.mark.parametrize("value", [*NOT_WHOLE, 9, 10**9], ids=repr)
@pytest.mark.parametrize("family", [*FAMILIES, lambda steps, bands: dense(steps, bands=bands)])
def test_bands_of_zero_or_above_the_steps(family, value):
    if value is None:
        value = "none"
    refuse(lambda: family(8, value), f"bands={value!r}", "between 1 and steps=8")


STRATEGY_CASES = {
    "more coefficients than steps": (lambda: BandedToeplitz([1, 2, 3], 2), "bands=3", "steps=2"),
    "no coefficients": (lambda: BandedToeplitz([], 2), "coefficients", "(0,)"),
    "coefficients in a matrix": (lambda: BandedToeplitz([[1.0]], 2), "coefficients", "(1, 1)"),
    "a number as coefficients": (lambda: BandedToeplitz(1.0, 2), "coefficients", "()"),
    "words as coefficients": (lambda: BandedToeplitz(["a"], 2), "coefficients", "numbers"),
    "complex coefficients": (lambda: BandedToeplitz([1 + 2j], 2), "coefficients", "numbers"),
    "ragged coefficients": (lambda: BandedToeplitz([[1.0], [1.0, 2.0]], 2), "coefficients", "numbers"),
    "NaN coefficient": (lambda: BandedToeplitz([1.0, NAN], 2), "coefficients", "(1,) is nan"),
    "infinite coefficient": (lambda: BandedToeplitz([1.0, -INF], 2), "coefficients", "(1,) is -inf"),
    "zero diagonal of Toeplitz": (lambda: BandedToeplitz([0.0, 1.0], 2), "coefficients[0]=0", "zero"),
    "normalize_columns=1": (lambda: BandedToeplitz([1.0], 2, 1), "normalize_columns=1", "True, False"),
    "normalize_columns='no'": (lambda: BandedToeplitz([1.0], 2, "no"), "'no'", "True, False"),
    "more bands than steps": (lambda: Banded([[1.0, 0.5]]), "bands=2", "steps=1"),
    "columns that are one row": (lambda: Banded([1.0, 0.5]), "columns", "(2,)"),
    "entries below C": (lambda: Banded([[1, 0.5], [1, 0.5]]), "columns", "steps=2"),
    "zero diagonal of Banded": (lambda: Banded([[1, 0.5], [0, 0]]), "columns[1, 0]=0", "zero"),
    "NaN in Banded": (lambda: Banded([[1, NAN], [1, 0]]), "columns", "(0, 1) is nan"),
    "no columns": (lambda: Banded(np.zeros((0, 0))), "columns", "(0, 0)"),
    "not square": (lambda: Dense([[1.0, 0.0]]), "matrix", "(1, 2)"),
    "upper triangular": (lambda: Dense([[1, 2], [0, 1]]), "matrix", "lower triangular"),
    "zero diagonal of Dense": (lambda: Dense([[1, 0], [1, 0]]), "matrix[1, 1]=0", "zero"),
    "infinite entry of Dense": (lambda: Dense([[1, 0], [INF, 1]]), "matrix", "(1, 0) is inf"),
}
WORKLOAD_CASES = {
    "momentum of one": (lambda: workloads.momentum(5, 1.0), "momentum=1.0", "[0, 1)"),
    "negative momentum": (lambda: workloads.momentum(5, -0.1), "momentum=-0.1", "[0, 1)"),
    "momentum of NaN": (lambda: workloads.momentum(5, NAN), "momentum=nan", "[0, 1)"),
    "momentum as text": (lambda: workloads.momentum(5, "0.9"), "momentum='0.9'", "[0, 1)"),
    "too few rates": (lambda: workloads.momentum(5, 0.9, [1, 2]), "learning_rates", "2", "steps=5"),
    "a rate of NaN": (lambda: workloads.momentum(2, 0.9, [1, NAN]), "learning_rates", "(1,) is nan"),
    "negative decay": (lambda: workloads.momentum(5, 0.9, weight_decay=-1), "weight_decay=-1", "[0"),
    "decay that diverges": (lambda: workloads.momentum(5, 0.9, weight_decay=2), "weight_decay=2", "below 2"),
    "more than steps": (lambda: workloads.toeplitz([1, 2, 3], 2), "coefficients", "3", "steps=2"),
    "zero first": (lambda: workloads.toeplitz([0, 1], 2), "coefficients[0]=0", "zero"),
    "infinite": (lambda: workloads.toeplitz([1, INF], 2), "coefficients", "(1,) is inf"),
    "cooldown below zero": (lambda: workloads.cooldown(5, final=-0.1), "final=-0.1", "[0, 1]"),
    "cooldown over more than all": (lambda: workloads.cooldown(5, fraction=1.1), "fraction=1.1", "[0, 1]"),
    "cosine above one": (lambda: workloads.cosine(5, final=1.5), "final=1.5", "[0, 1]"),
    "NaN on a diagonal": (lambda: streaming.diagonal([1.0, NAN]), "values", "(1,) is nan"),
}
PARTICIPATION_CASES = {
    "no participation": (lambda: MinSeparation(0, 1), "max_participations=0", "at least 1"),
    "no separation": (lambda: MinSeparation(1, 0), "separation=0", "at least 1"),
    "half a separation": (lambda: MinSeparation(1, 0.5), "separation=0.5", "at least 1"),
    "NaN participations": (lambda: MinSeparation(NAN, 1), "max_participations=nan", "at least 1"),
    "no epochs": (lambda: FixedEpochs(0), "epochs=0", "at least 1"),
    "epochs and a half": (lambda: FixedEpochs(1.5), "epochs=1.5", "at least 1"),
    "do not divide": (lambda: sensitivity(Identity(5), FixedEpochs(2)), "epochs=2", "divide steps=5"),
}
OPTIMIZER_CASES = {
    "Toeplitz needs Toeplitz": (
        lambda: banded_toeplitz(8, 2, workload=workloads.momentum(8, 0.9, np.linspace(1, 0.5, 8))),
        "workload='momentum 0.9 with a schedule'",
        "Toeplitz",
    ),
    "horizon needs a limit": (
        lambda: horizon(8, 2, workload=workloads.toeplitz(np.cos(np.arange(8)), 8)),
        "workload='Toeplitz'",
        "settle",
    ),
    "banded needs an inverse": (
        lambda: banded(8, 2, workload=workloads.streaming_operator(streaming.prefix(), 8, "mine")),
        "workload='mine'",
        "banded",
    ),
    "normalize_columns=True": (
        lambda: banded_toeplitz(8, 2, normalize_columns=True),
        "normalize_columns=True",
        "False, 'after', 'optimized'",
    ),
    "normalize_columns='twice'": (
        lambda: inverse_plus_constant(8, 2, normalize_columns="twice"),
        "normalize_columns='twice'",
        "True, False",
    ),
    "terms below one": (lambda: banded_toeplitz(8, 2, terms=-3), "terms=-3", "at least"),
    "no terms": (lambda: banded_toeplitz(8, 2, terms=0), "terms=0", "at least"),
    "negative iterations": (lambda: banded(8, 2, max_iterations=-1), "max_iterations=-1", "at least"),
    "no dense iterations": (lambda: dense(8, max_iterations=0), "max_iterations=0", "at least"),
    "negative gap": (lambda: banded(8, 2, gap=-0.1), "gap=-0.1", "[0"),
    "a gap of NaN": (lambda: banded(8, 2, gap=NAN), "gap=nan", "[0"),
    "a negative gap for dense": (lambda: dense(8, gap=-0.1), "gap=-0.1", "[0"),
    "epochs that do not divide": (lambda: dense(8, epochs=3), "epochs=3", "divide steps=8"),
    "no epochs": (lambda: dense(8, epochs=0), "epochs=0", "between 1 and steps=8"),
    "too many dense steps": (lambda: dense(10**6), "steps=1000000", "between 1 and", "optimize.banded"),
    "a family of NaN": (
        lambda: optimize.parameterized(lambda p: np.full((4, 2), NAN), lambda p, g: p, np.ones(1)),
        "entries(start)",
        "(0, 0) is nan",
    ),
    "a start that is no vector": (
        lambda: optimize.parameterized(lambda p: np.ones((4, 1)), lambda p, g: p, 1.0),
        "start",
        "()",
    ),
}


@pytest.mark.parametrize("case", STRATEGY_CASES.values(), ids=STRATEGY_CASES.keys())
def test_a_strategy_is_validated_when_it_is_made(case):
    refuse(*case)


@pytest.mark.parametrize("case", WORKLOAD_CASES.values(), ids=WORKLOAD_CASES.keys())
def test_a_workload_is_validated_when_it_is_made(case):
    refuse(*case)


@pytest.mark.parametrize("case", PARTICIPATION_CASES.values(), ids=PARTICIPATION_CASES.keys())
def test_a_participation_is_validated(case):
    refuse(*case)


@pytest.mark.parametrize("case", OPTIMIZER_CASES.values(), ids=OPTIMIZER_CASES.keys())
def test_an_optimizer_validates_what_it_is_given(case):
    refuse(*case)


@pytest.mark.parametrize(
    "optimizer",
    [partial(banded_toeplitz, 8, 2), partial(banded, 8, 2), partial(dense, 8)],
    ids=["toeplitz", "banded", "dense"],
)
@pytest.mark.parametrize(
    ("objective", "needles"),
    [
        ("median", ("objective='median'", "'mean', 'max', 'last'")),
        (np.ones(7), ("7 weights", "steps=8")),
        (np.zeros(8), ("objective[0]=0", "positive")),
        (np.r_[np.ones(7), -1], ("objective[7]=-1", "positive")),
        (np.r_[np.ones(7), NAN], ("objective", "(7,) is nan")),
        (np.ones((8, 1)), ("objective", "(8, 1)")),
    ],
    ids=["unknown", "too few", "zero", "negative", "NaN", "a matrix"],
)
def test_an_objective_is_a_known_name_or_positive_weights(optimizer, objective, needles):
    refuse(lambda: optimizer(objective=objective), *needles)


@pytest.mark.parametrize(
    "combine",
    [
        lambda workload: per_step_error(Identity(8), workload=workload),
        lambda workload: banded_toeplitz(8, 2, workload=workload),
        lambda workload: banded(8, 2, workload=workload),
        lambda workload: horizon(8, 2, workload=workload),
        lambda workload: dense(8, workload=workload),
    ],
)
def test_a_workload_of_another_length_is_refused(combine):
    refuse(lambda: combine(workloads.prefix(9)), "steps=9", "steps=8")
