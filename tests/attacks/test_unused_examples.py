"""A fixed order that leaves examples out says so: when it is made, and in the words of its plan."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf import Key
from bandmf.participation import FixedEpochs, MinSeparation, Single
from bandmf.sampling import sampler, used_examples
from training import simple_plan


def order(participation, steps, examples, batch_size):
    plan = simple_plan(
        steps=steps, examples=examples, batch_size=batch_size, bands=1, participation=participation,
        adjacency="zero-out",
    )  # fmt: skip
    return plan, lambda: sampler(plan, Key())


@pytest.mark.parametrize(
    ("participation", "steps", "examples", "batch_size", "unused", "remedy"),
    [
        (Single(), 10, 1000, 20, 800, "batch_size=100"),
        (FixedEpochs(2), 20, 109, 10, 9, "batch_size=10.9"),
        (MinSeparation(1, 50), 15, 100, 5, 25, "take at least 20 steps"),
        (MinSeparation(1, 10), 10, 100, 5, 50, "take at least 20 steps"),
    ],
)
def test_examples_that_are_never_used_are_named(participation, steps, examples, batch_size, unused, remedy):
    plan, make = order(participation, steps, examples, batch_size)
    sentence = f"{unused} of examples={examples} are never used"
    with pytest.warns(UserWarning, match=f"{re.escape(sentence)}.*{re.escape(remedy)}"):
        make()
    assert sentence in plan.explain()
    assert remedy in plan.explain()


@pytest.mark.parametrize("participation", [FixedEpochs(3), MinSeparation(3, 20)])
def test_an_order_that_uses_all_examples_says_nothing(participation):
    plan, make = order(participation, 60, 100, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()
    assert "never used" not in plan.explain()


@given(st.integers(1, 40), st.integers(1, 200), st.floats(0.5, 30), st.integers(1, 50), st.integers(0, 2))
def test_the_number_of_unused_examples_is_that_of_the_batches(steps, examples, batch_size, separation, kind):
    participation = [Single(), FixedEpochs(1), MinSeparation(steps, separation)][kind]
    batch_size = min(batch_size, examples)
    try:
        plan, make = order(participation, steps, examples, batch_size)
    except ValueError:  # the participation does not permit this many steps
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = make()
    drawn = np.concatenate([batches.batch(step) for step in range(steps)])
    assert len(np.unique(drawn)) == used_examples(participation, steps, examples, batch_size)
    assert plan.epochs == pytest.approx(len(drawn) / examples, abs=steps / examples)
