"""What a run kept in memory is free again when nobody holds it: model, optimizer, and the noise that goes with them."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch

from private_loops import plain, private_of, small_net, trained_weights, vectors


def never_iterated(private):
    assert private.steps_taken == 0


def left_in_the_middle(private):
    plain(private, next(iter(private.loader)))


def closed(private):
    trained_weights(private)
    private.close()


@pytest.mark.parametrize("mode", ["auto", "hooks"])
@pytest.mark.parametrize("loop", [trained_weights, closed, left_in_the_middle, never_iterated])
def test_a_run_that_nobody_holds_is_free(loop, mode):
    """Once the register of self-tests held every model that was ever trained."""

    def run():
        private = private_of(small_net(), vectors(), clipping=mode)
        loop(private)
        return [weakref.ref(part) for part in (private.model, private.optimizer, private)]

    kept = run()
    gc.collect()
    assert [there() for there in kept] == [None, None, None]


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
def test_a_model_does_not_keep_the_noise_of_a_run_that_was_closed(mode):
    def run(model):
        private = private_of(model, vectors(), clipping=mode)
        closed(private)
        return weakref.ref(private.stepper.noise)

    model = small_net()
    noise = run(model)
    gc.collect()
    assert noise() is None
    torch.save(model, io.BytesIO())
