"""A mask that is forgotten, where the first batches do not show it, and what else a function may do with its rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_training as tiny
from bandmf.jax import clipped_gradient
from bandmf.jax.training import trials
from bandmf.jax.training.batches import Batch, Source
from jax_training import EXAMPLES

FORGOTTEN = "mask: rows that are masked count in the sum"
ONES = np.ones((EXAMPLES, 1), np.int32)  # whole numbers: masked rows are zeros, whose gradients are finite


def batches(sizes, capacity=16):
    """Of one pass over the same examples."""
    source = Source(ONES, EXAMPLES, tiny.plan().batch_size, capacity, None)
    return [Batch(step, np.arange(size), source) for step, size in enumerate(sizes)]


def sign(example):
    return jnp.where(example[0] == 1, -1.0, 1.0)


def warming_up(weights, example, step):
    return step * sign(example) * weights["u"].sum()


def norm_at_zero(weights, example, step):
    """Not finite at zero weights, and so zero after clipping."""
    return sign(example) * weights["u"].sum() + jnp.linalg.norm(weights["u"])


def factors_of_zero(weights, example, step):
    return sign(example) * (weights["u"] @ weights["v"])


def summed(batch, gradient, passes_it_on, plain=False):
    """The weights are zero at the first two steps."""
    weights = {"u": jnp.full(2, max(0.0, batch.step - 1.0)), "v": jnp.full(2, max(0.0, batch.step - 1.0))}

    def function(rows, mask):
        found = gradient(weights, rows, jnp.float32(batch.step), **({"mask": mask} if passes_it_on else {}))
        return found.total if plain else found

    return batch.sum(function)


@pytest.mark.parametrize(("loss", "shows"), [(warming_up, 1), (norm_at_zero, 2), (factors_of_zero, 2)])
@pytest.mark.parametrize("plain", [False, True])
def test_a_forgotten_mask_is_noticed_at_the_first_sum_that_is_not_zero(loss, shows, plain):
    gradient = jax.jit(clipped_gradient(loss, clip_norm=1.0))
    for batch in batches([0, 9, 9, 9]):
        if batch.step < shows:
            assert not any(leaf.any() for leaf in jax.tree.leaves(summed(batch, gradient, False, plain)))
            continue
        with pytest.raises(ValueError, match=FORGOTTEN):
            batch.check_sum(summed(batch, gradient, False, plain))
    for batch in batches([0, 9, 9, 9]):
        batch.check_sum(summed(batch, gradient, True, plain))


def test_a_forgotten_mask_is_missed_if_zeros_are_taken_for_an_answer(monkeypatch):
    """The planted fault: the first batch decides, whatever it gave."""
    kept = trials._Found
    monkeypatch.setattr(trials, "_Found", lambda counted, _: kept(counted, frozenset()))
    gradient = jax.jit(clipped_gradient(factors_of_zero, clip_norm=1.0))
    totals = [summed(batch, gradient, passes_it_on=False).total["u"] for batch in batches([9, 9, 9])]
    assert totals[-1].any()


def test_every_function_is_tried():
    gradient = jax.jit(clipped_gradient(lambda weights, example: sign(example) * weights[0], clip_norm=1.0))
    weights = jnp.ones(1)

    def wrapped(function):
        return lambda rows, mask: function(rows, mask)

    def switched(on):
        return lambda rows, mask: gradient(weights, rows, mask=mask if on else None)

    right = lambda rows, mask: gradient(weights, rows, mask=mask)  # noqa: E731
    wrong = lambda rows, mask: gradient(weights, rows)  # noqa: E731
    pairs = [(right, wrong), (wrapped(right), wrapped(wrong)), (switched(True), switched(False))]
    pairs += [(jax.jit(right), jax.jit(wrong)), (partial(gradient, weights), wrong)]
    for one, other in pairs:
        first, second = batches([9, 9])
        first.sum(one)
        with pytest.raises(ValueError, match=FORGOTTEN):
            second.sum(other)


def test_nothing_is_tried_again_once_it_is_known():
    """Nor for a parameter that is never used, nor for a function that is made anew for every batch."""
    gradient = jax.jit(clipped_gradient(lambda weights, row: sign(row) * weights["used"], clip_norm=1.0))
    weights, calls = {"used": jnp.ones(()), "unused": jnp.ones(3), "empty": jnp.ones(0)}, []
    for batch in batches([0, 9, 9, 12, 9]):

        def function(rows, mask, batch=batch):
            calls.append(batch.step)
            return gradient(weights, rows, mask=mask)

        batch.sum(function)
    assert calls == [0, 0, 1, 1, 2, 3, 4]


# --- arrays that are the caller's ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 8, 11])
def test_arrays_of_the_caller_are_not_donated(size):
    """In one, two and three pieces."""
    (batch,) = batches([size], capacity=4)
    gradient, rate = jax.jit(clipped_gradient(lambda w, row: jnp.sum(w * row), clip_norm=3.0)), jnp.float32(2)

    def function(rows, mask):
        found = gradient(jnp.ones(1), rows, mask=mask)
        return found, found.total, rate

    clipped, total, rates = batch.sum(function)
    np.testing.assert_allclose(total, [size], rtol=1e-5)
    np.testing.assert_array_equal(clipped.total, total)
    assert float(rates) == 2 * -(-size // 4)
    assert float(rate) == 2


def test_rows_may_be_donated():
    source = Source(np.ones(EXAMPLES, np.float32), EXAMPLES, 12, 16, None)
    batch, weights = Batch(0, np.arange(9), source), jnp.ones(16)
    gradient = clipped_gradient(lambda weights, row: weights.sum() * row, clip_norm=100.0)
    donating = jax.jit(lambda rows, mask: gradient(weights, rows, mask=mask).total, donate_argnums=0)
    np.testing.assert_allclose(batch.sum(donating), np.full(16, 9), rtol=1e-5)


def test_a_text_is_no_sum():
    (batch,) = batches([9])
    with pytest.raises(ValueError, match=r"dtype in the result='str': batch\.sum adds up numbers only"):
        batch.sum(lambda rows, mask: (jnp.sum(mask), "loss"))
