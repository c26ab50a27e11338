"""What a run kept in memory is free again when nobody holds it: model, optimizer, and the noise that goes with them."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch

from bandmf.torch import Training
from training import losses, simple_plan, small_data, small_model, train

PLAN = simple_plan(steps=4, examples=60, batch_size=10, bands=2)


def open_run(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, losses, optimizer, small_data(60), PLAN, clip_norm=1.0, **options)


def never_iterated(training):
    assert training.steps_taken == 0


def left_in_the_middle(training):
    train(training, until=2)


def closed(training):
    train(training).close()


@pytest.mark.parametrize("clipping", ["auto", "vmap"])
@pytest.mark.parametrize("loop", [train, closed, left_in_the_middle, never_iterated])
def test_a_run_that_nobody_holds_is_free(loop, clipping):
    def run():
        training = open_run(small_model(), clipping=clipping)
        loop(training)
        parts = (training, training.model, training._trained.optimizers[0], training._stepper.noise)
        return [weakref.ref(part) for part in parts]

    kept = run()
    gc.collect()
    assert [there() for there in kept] == [None] * 4


@pytest.mark.parametrize("clipping", ["auto", "vmap"])
def test_a_model_does_not_keep_the_noise_of_a_run_that_was_closed(clipping):
    def run(model):
        training = open_run(model, clipping=clipping)
        closed(training)
        return weakref.ref(training._stepper.noise)

    model = small_model()
    noise = run(model)
    gc.collect()
    assert noise() is None
    torch.save(model, io.BytesIO())
