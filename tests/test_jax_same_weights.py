"""bandmf.jax.Training gives the weights of Run and privatize, bit for bit, for the same plan, run key and data."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import bandmf
import jax_training as tiny
from bandmf import Key, participation
from bandmf.jax import Training
from training import same_run

EXAMPLES, SIZE, STEPS = tiny.EXAMPLES, 12, 10


def planned(**more):
    return bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, batch_size=SIZE, steps=STEPS, **more)


PLANS = {
    "cyclic": lambda: planned(bands=4, sampling="cyclic-poisson"),
    "bins with BLT": lambda: planned(sampling="balls-in-bins", mechanism="blt"),
    "bins with banded inverse": lambda: planned(sampling="balls-in-bins", mechanism="banded-inverse"),
    "b-min-sep": lambda: planned(bands=3, sampling="b-min-sep"),
    "unamplified": lambda: planned(participation=participation.FixedEpochs(2), adjacency="zero-out"),
    "one band": lambda: planned(bands=1, sampling="cyclic-poisson"),
}


def new_weights(plan, **more):
    with same_run():
        training = Training(
            tiny.loss, optax.adam(0.1), tiny.data(), plan, clip_norm=tiny.CLIP, key=Key(bytes(32)), **more
        )
    for state in training.steps(training.init(tiny.first_weights())):
        pass
    return tiny.flat(state.weights)


def old_weights(plan, capacity):
    with same_run():
        run = tiny.open_run(plan)
    return tiny.flat(tiny.Training(plan, optax.adam(0.1)).whole(run, capacity=capacity))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_the_weights_are_those_of_run_and_privatize_bit_for_bit(name, micro_batch):
    plan = PLANS[name]()
    new = new_weights(plan, micro_batch=micro_batch)
    with same_run():
        capacity = Training(
            tiny.loss, optax.adam(0.1), tiny.data(), plan, clip_norm=tiny.CLIP, micro_batch=micro_batch
        )._source.size
    np.testing.assert_array_equal(new, old_weights(plan, capacity))
