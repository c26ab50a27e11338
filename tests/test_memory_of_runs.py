"""What a run kept in memory is free again when nobody holds it: model, optimizer, and the noise that goes with them."""

from __future__ import annotations

import gc
import weakref

import pytest

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
