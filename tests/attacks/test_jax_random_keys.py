"""Random numbers of examples in JAX: each example draws from a key of its own, wherever it is in the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bandmf.jax.training.batches import Batch
from jax import lax

from bandmf.jax import clipped_gradient
from jax_training import Source

ROWS, FEATURES = 48, 20
DICE = np.random.default_rng(0)
X = DICE.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y, IDS = np.sign(X[:, 0]), np.arange(ROWS, dtype=np.int32)
WEIGHTS = jnp.zeros(FEATURES)


def loss(weights, x, y, kept):
    return 0.5 * (jnp.where(kept, 2 * x, 0) @ weights - y) ** 2


def drawn(key):
    return jax.random.bernoulli(key, 0.5, (FEATURES,))


# --- keys of which all rows use the first ----------------------------------------------------------------------


def in_a_scan(key):
    return lax.scan(lambda carry, _: (carry | drawn(key), None), jnp.zeros(FEATURES, bool), None, length=1)[0]


def in_a_choice(key):
    return lax.cond(jax.random.key_data(key)[0] % 3 < 2, drawn, lambda _: jnp.ones(FEATURES, bool), key)


def in_a_loop(key):
    return lax.while_loop(lambda kept: ~kept.any(), lambda _: drawn(key), jnp.zeros(FEATURES, bool))


def in_a_program(key):
    return jax.checkpoint(jax.jit(drawn))(key)


def in_a_rule(key):
    @jax.custom_jvp
    def ruled(key):
        return drawn(key).astype(jnp.float32)

    ruled.defjvp(lambda given, moved: (ruled(*given), jnp.zeros(FEATURES)))
    return ruled(key) > 0


def of_the_device(key):
    return (
        lax.rng_bit_generator(jnp.tile(jax.random.key_data(key), 2)[:4], (FEATURES,), jnp.uint32)[1] % 2 > 0
    )


PLACES = [drawn, in_a_scan, in_a_choice, in_a_loop, in_a_program, in_a_rule]


def keyed(draw):
    return lambda weights, example: loss(weights, *example[:2], draw(example[2]))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("draw", PLACES)
def test_examples_that_would_draw_from_the_key_of_the_first_are_refused(draw, implementation):
    """One example less moved the sum of 100 by 9.5 clip norms, where one is allowed."""
    keys = jax.random.split(jax.random.key(0, impl=implementation), ROWS)
    gradient = jax.jit(clipped_gradient(keyed(draw), clip_norm=1.0))
    with pytest.raises(
        ValueError, match=r"^random keys: .* from the key of the first one.*impl='threefry2x32'"
    ):
        gradient(WEIGHTS, (X, Y, keys))


@pytest.mark.parametrize("draw", [*PLACES, of_the_device])
def test_keys_that_draw_row_by_row_are_not_refused_and_those_of_the_device_are(draw):
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), ROWS)
    gradient = jax.jit(clipped_gradient(keyed(draw), clip_norm=1.0))
    if draw is of_the_device:
        with pytest.raises(ValueError, match=r"^random keys: "):
            gradient(WEIGHTS, (X, Y, keys))
        return
    without = gradient(WEIGHTS, (X[1:], Y[1:], keys[1:])).total
    assert jnp.linalg.norm(gradient(WEIGHTS, (X, Y, keys)).total - without) < 1.001


def test_raw_keys_are_refused_too_where_another_implementation_is_the_default():
    gradient = clipped_gradient(keyed(drawn), clip_norm=1.0, microbatch=16)
    with jax.default_prng_impl("rbg"):
        keys = jnp.stack([jax.random.PRNGKey(seed) for seed in range(ROWS)])
        assert keys.dtype == jnp.uint32
        with pytest.raises(ValueError, match=r"^random keys: "):
            gradient(WEIGHTS, (X, Y, keys))


def test_a_key_that_all_examples_share_may_be_of_any_implementation():
    """Its numbers depend on no example; nor do those of keys that lie in one example."""
    shared = jax.random.key(0, impl="rbg")

    def several(weights, example):
        kept = jax.vmap(drawn)(jax.random.split(shared, 3)).any(0)
        return loss(weights, *example, kept & drawn(shared))

    gradient = clipped_gradient(several, clip_norm=1.0)
    without = gradient(WEIGHTS, (X[1:], Y[1:])).total
    assert jnp.linalg.norm(gradient(WEIGHTS, (X, Y)).total - without) < 1.001


def test_the_first_key_moves_all_examples_where_programs_are_not_looked_at(monkeypatch):
    """The planted fault."""
    monkeypatch.setattr("bandmf.jax.clipping.gradient.check_own_draws", lambda *given: None)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), ROWS)
    gradient = clipped_gradient(keyed(drawn), clip_norm=1.0)
    without = gradient(WEIGHTS, (X[1:], Y[1:], keys[1:])).total
    assert jnp.linalg.norm(gradient(WEIGHTS, (X, Y, keys)).total - without) > 3


# --- keys by the place of an example ---------------------------------------------------------------------------

GRADIENT = jax.jit(
    clipped_gradient(
        lambda weights, example, key: loss(weights, *example, drawn(key)), clip_norm=1.0, batch_argnums=(1, 2)
    )
)


def by_row(weights, rows, mask):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 3), len(mask))
    return GRADIENT(weights, rows[:2], keys, mask=mask)


def by_number(weights, rows, mask):
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(jax.random.key(0), 3)))(rows[2])
    return GRADIENT(weights, rows[:2], keys, mask=mask)


def summed(function, indices):
    source = Source((X, Y, IDS), ROWS, ROWS, ROWS, None)
    return Batch(3, indices, source).sum(partial(function, WEIGHTS)).total


def test_keys_split_over_the_rows_are_refused():
    """Without the first example all others are one row further up, and drop other units: 8.7 clip norms."""
    with pytest.raises(ValueError, match=r"^sum: .* depends on the row that it is in.*fold_in"):
        summed(by_row, np.arange(40))
    rows, mask = tuple(jnp.asarray(leaf[:40]) for leaf in (X, Y, IDS)), jnp.ones(40, bool)
    without = by_row(WEIGHTS, tuple(jnp.roll(leaf, -1, 0) for leaf in rows), mask.at[-1].set(False))
    assert jnp.linalg.norm(by_row(WEIGHTS, rows, mask).total - without.total) > 3


def test_keys_by_a_number_of_the_example_are_its_own():
    with_all, without = summed(by_number, np.arange(40)), summed(by_number, np.arange(1, 40))
    assert jnp.linalg.norm(with_all - without) < 1.001


# --- functions of the host --------------------------------------------------------------------------------------


def by_the_largest(method):
    """A loss with a callback that divides by the largest of all that it is given."""

    def loss(weights, row):
        def scaled(values):
            return (values / np.abs(values).max()).astype(np.float32)

        size = jax.ShapeDtypeStruct((), jnp.float32)
        return (weights @ row) * jax.pure_callback(scaled, size, row[0], vmap_method=method)

    return clipped_gradient(loss, clip_norm=1.0)


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_callbacks_that_are_given_all_examples_at_once_are_refused(method):
    """One example moved the sum by eight clip norms."""
    with pytest.raises(ValueError, match=r"given all examples at once.*vmap_method='sequential'"):
        jax.jit(by_the_largest(method))(jnp.ones(FEATURES), jnp.ones((ROWS, FEATURES)))


def test_callbacks_for_single_examples_are_taken():
    rows = jnp.asarray(DICE.normal(size=(ROWS, FEATURES)).astype(np.float32))
    gradient = jax.jit(by_the_largest("sequential"))
    parts = [gradient(jnp.ones(FEATURES), rows[k : k + 8]).total for k in range(0, ROWS, 8)]
    np.testing.assert_allclose(gradient(jnp.ones(FEATURES), rows).total, sum(parts), atol=1e-4)
