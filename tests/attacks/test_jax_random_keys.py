"""What a loss draws at random or calls outside of JAX: each example by itself, wherever it is in the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_training as tiny
from bandmf.jax import clipped_gradient
from training import simple_plan

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROWS, FEATURES = 48, 20
DICE = np.random.default_rng(0)
X = DICE.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = np.sign(X[:, 0])
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
    return lax.rng_bit_generator(jnp.tile(jax.random.key_data(key), 2)[:4], (FEATURES,), jnp.uint32)[1] % 2 > 0


PLACES = [drawn, in_a_scan, in_a_choice, in_a_loop, in_a_program, in_a_rule]


def keyed(draw):
    return lambda weights, example: loss(weights, *example[:2], draw(example[2]))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("draw", PLACES)
def test_examples_that_would_draw_from_the_key_of_the_first_are_refused(draw, implementation):
    """One example less moved the sum of 100 by 9.5 clip norms, where one is allowed."""
    keys = jax.random.split(jax.random.key(0, impl=implementation), ROWS)
    gradient = jax.jit(clipped_gradient(keyed(draw), clip_norm=1.0))
    with pytest.raises(ValueError, match=r"^random keys: .* from the key of the first one.*impl='threefry2x32'"):
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
    gradient = clipped_gradient(keyed(drawn), clip_norm=1.0)
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


# --- keys of Training -------------------------------------------------------------------------------------------


def begun(loss, data=(X, Y), **more):
    """A run of which nothing was released yet."""
    plan = simple_plan(examples=ROWS, batch_size=12, steps=4)
    training = tiny.training(plan, optax.sgd(1.0), loss, data, clip_norm=1.0, **more)
    return training, training.init(WEIGHTS)


@pytest.mark.parametrize("at_once", [1, 2])
def test_training_refuses_keys_of_the_data_by_which_all_draw_from_the_first(at_once):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), ROWS)
    training, state = begun(keyed(drawn), (X, Y, keys))
    with pytest.raises(ValueError, match=r"^random keys: .* from the key of the first one"):
        next(training.steps(state, at_once=at_once))
    assert training.spent() == 0


@pytest.mark.parametrize("default", ["threefry2x32", "rbg"])
def test_the_key_that_a_loss_is_given_goes_with_the_example_and_not_with_its_row(default):
    """Keys split over the rows once moved the sum by 8.7 clip norms: without one example, all others are elsewhere."""
    with jax.default_prng_impl(default):
        training, _ = begun(lambda weights, example, key: loss(weights, *example, drawn(key)), micro_batch=10)
        some = DICE.permutation(ROWS)[:25]
        every = tiny.clipped_sum(training, some)
        without = tiny.clipped_sum(training, some[:0:-1])
        assert 0.1 < jnp.linalg.norm(every - without) < 1.001
        assert jnp.linalg.norm(every - tiny.clipped_sum(training, some, step=1)) > 1  # drawn anew in every step


# --- what is outside of JAX -------------------------------------------------------------------------------------

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def by_the_host(value, method):
    return jax.pure_callback(lambda given: np.float32(given / np.abs(given).max()), NUMBER, value, vmap_method=method)


def foreign(value, method):
    return jax.ffi.ffi_call("planted", NUMBER, vmap_method=method)(value)


def by_buffers(value, method):
    return buffer_callback(lambda *_: None, NUMBER, vmap_method=method)(value)


def in_a_loop_of(call):
    def looped(value, method):
        return lax.fori_loop(0, 3, lambda _, found: found + call(value, method), jnp.float32(0))

    return looped


def scaled(call, method):
    return lambda weights, example: (weights @ example[0]) * call(example[0][0], method)


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
@pytest.mark.parametrize("call", [by_the_host, foreign, by_buffers, in_a_loop_of(by_the_host), in_a_loop_of(foreign)])
def test_functions_outside_of_jax_that_are_given_all_examples_at_once_are_refused(call, method):
    """One example moved the sum by eight clip norms."""
    training, state = begun(scaled(call, method))
    with pytest.raises(ValueError, match=r"given all examples at once.*vmap_method='sequential'"):
        next(training.steps(state))
    assert training.spent() == 0


def test_functions_of_the_host_for_single_examples_are_taken():
    training, _ = begun(scaled(by_the_host, "sequential"), micro_batch=16)
    every = tiny.clipped_sum(training, range(40))
    parts = [tiny.clipped_sum(training, range(k, k + 8)) for k in range(0, 40, 8)]
    np.testing.assert_allclose(every, sum(parts), atol=1e-4)


@custom_vmap
def centered(row):
    return row


@centered.def_vmap
def _(_size, _batched, rows):
    return rows - rows.mean(0), True


@custom_vmap
def centered_again(row):
    return row


@centered_again.def_vmap
def _(_size, _batched, rows):
    return centered_again(rows - rows.mean(0)), True


@custom_vmap
def centered_beside(row):
    return row


@centered_beside.def_vmap
def _(_size, _batched, rows):
    return rows - centered_beside(rows.mean(0)), True


@pytest.mark.parametrize("rule", [centered, centered_again, centered_beside])
def test_a_rule_for_batches_is_refused(rule):
    """A batch norm that is not seen in a loss of one example: it moved the sum by 14 clip norms.

    A rule may call the function once more, on all rows or on one of their shape, so that it seems to be still there.
    """
    training, state = begun(lambda weights, example: (rule(example[0]) @ weights - example[1]) ** 2)
    with pytest.raises(ValueError, match=r"rule of its own for batches .*the loss sees one example"):
        next(training.steps(state))
    assert training.spent() == 0


def test_rules_and_foreign_functions_mix_examples_where_programs_are_not_looked_at(monkeypatch):
    """The planted fault."""
    monkeypatch.setattr("bandmf.jax.clipping.gradient.check_own_draws", lambda *given: None)
    far = X * np.where(np.arange(ROWS) == 3, 1e4, 1).astype(np.float32)[:, None]
    training, _ = begun(lambda weights, example: (centered(example[0]) @ weights - example[1]) ** 2, (far, Y))
    every, without = (tiny.clipped_sum(training, range(first, 20)) for first in (3, 4))
    assert jnp.linalg.norm(every - without) > 3


@pytest.mark.parametrize("collective", [lax.psum, lax.pmean, lax.all_gather, lax.pmax])
def test_a_loss_has_no_axis_over_which_it_could_see_others(collective):
    """Neither the batch nor the mesh, whose rows are cut."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def together(weights, example):
        return jnp.sum(collective(example[0], "data") @ weights) - example[1]

    training, state = begun(together, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(NameError, match="unbound axis name"):
        next(training.steps(state))
    assert training.spent() == 0
