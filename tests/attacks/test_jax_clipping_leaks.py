"""What one example adds in JAX where the compiler, a mesh or padding comes between its norm and the sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import children
import jax_training as tiny
from bandmf.jax import clipped_gradient, clipping
from children import HERE, environment
from jax_training import CLIP
from sweeps import in_turn, spread
from training import simple_plan

f = np.float32


def length(tree):
    return float(np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(tree))))


# --- norm and sum of the same numbers -----------------------------------------------------------------------


def pair(weights, example):
    """Gradients that are nothing but rounding errors: a fused multiply-add finds them, a plain product does not."""
    x, y, product = example
    return jnp.sum(weights["a"] * (x * y - product)) + jnp.sum(weights["b"] * (product - x * y))


def distance(weights, example):
    x, y = example
    return jnp.sqrt(jnp.sum((x * weights["a"] - y * weights["b"]) ** 2) + 1e-12)


def both_sides(weights, example):
    x, y = example
    error = x * weights["a"] + weights["b"] - y
    return jnp.sum(jax.nn.relu(error) + jax.nn.relu(-error))


def cancelling(loss, size, dice):
    """Weights and one example for which terms cancel."""
    a, b = dice.normal(size=size).astype(f), dice.normal(size=size).astype(f)
    x = (dice.normal(size=size) * 10.0 ** dice.integers(3, 12)).astype(f)
    if loss is pair:
        y = (dice.normal(size=size) * 1e5).astype(f)
        return {"a": a, "b": b}, (x, y, (x * y).astype(f))
    if loss is distance:
        return {"a": a, "b": b}, (x, (x * a / b).astype(f))
    return {"a": a, "b": 0 * b}, (x, (x * a).astype(f))


def in_turns(loss, turns, holds=None):
    """The sum of a batch, part after part, in a loop of one's own."""
    gradient = clipped_gradient(loss, clip_norm=1.0)

    def summed(weights, batch, mask):
        def turn(sums, part):
            return clipping.added(sums, gradient(weights, part[0], mask=part[1], holds=holds).total), None

        nothing = jax.tree.map(jnp.zeros_like, weights)
        parts = jax.tree.map(lambda leaf: leaf.reshape(turns, -1, *leaf.shape[1:]), (batch, mask))
        return clipping.together(lax.scan(turn, clipping.Sums(nothing, nothing), parts)[0])

    return summed


def most(loss, size, rows=1, masked=True, tries=12, turns=None):
    """The largest contribution of one example, in clip norms."""
    plain = clipped_gradient(loss, clip_norm=1.0)
    gradient = jax.jit((lambda *given, **mask: plain(*given, **mask).total) if turns is None else in_turns(loss, turns))
    found = []
    for seed in range(tries):
        weights, example = cancelling(loss, size, np.random.default_rng(seed))
        batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)), example)
        mask = {"mask": np.arange(rows) == 0} if masked else {}
        found.append(length(gradient(weights, batch, **mask)))
    return max(found)


@pytest.mark.parametrize(
    ("loss", "case"),
    in_turn([pair, distance, both_sides], [(1, False, None), (1, True, None), (16, True, None), (16, True, 4)]),
)
def test_norm_and_sum_come_from_the_same_numbers(loss, case):
    rows, masked, turns = case
    for size in (1, 5):
        assert most(loss, size, rows, masked, tries=40 if size == 1 else 12, turns=turns) <= 1 + 1e-6


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.long), 16])
def test_weights_that_are_constants_of_the_program_change_nothing(rows):
    """Nor those of several models: without the examples, a compiler could know that the conditional always holds."""
    gradient, found = clipped_gradient(pair, clip_norm=1.0), []
    for seed in range(6):
        weights, example = cancelling(pair, 5, np.random.default_rng(seed))
        batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)), example)
        mask, models = np.arange(rows) == 0, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), weights)
        closed = jax.jit(lambda rows, mask, weights=weights: gradient(weights, rows, mask=mask).total)
        several = jax.jit(
            jax.vmap(lambda weights, rows, mask: gradient(weights, rows, mask=mask).total, (0, None, None))
        )
        found.append(length(closed(batch, mask)))
        found.append(length(jax.tree.map(lambda leaf: leaf[0], several(models, batch, mask))))

        def of_groups(each, weights=weights):
            """Four groups of rows, each by a jitted gradient."""
            whole = jax.vmap(jax.jit(lambda rows, which: gradient(weights, rows, mask=which).total))
            return jax.tree.map(lambda leaf: leaf.sum(0), whole(*each))

        cut = jax.tree.map(lambda leaf: np.stack([leaf] * 4), (batch, mask))
        cut = (cut[0], cut[1] & (np.arange(4) == 0)[:, None])
        found.append(length(jax.jit(of_groups)(cut)))
    assert 0 < max(found) <= 1 + 1e-6


def test_gradients_that_are_computed_twice_are_caught(monkeypatch):
    """The planted fault: without the conditional the norm is that of other numbers than the sum."""
    monkeypatch.setattr(clipping.gradient, "computed_once", lambda function, given, *_: function(given))
    assert most(pair, 5) > 1000


@pytest.mark.parametrize("masked", [False, True])
def test_the_conditional_is_in_the_compiled_program(masked):
    weights, example = cancelling(pair, 5, np.random.default_rng(0))
    batch = jax.tree.map(lambda leaf: leaf[None], example)
    mask = {"mask": np.ones(1, bool)} if masked else {}
    lowered = jax.jit(clipped_gradient(pair, clip_norm=1.0)).lower(weights, batch, **mask)
    assert lowered.compile().as_text().count(" conditional(") == 1


# --- devices ------------------------------------------------------------------------------------------------


CLAIMS = ["sum", "turns", "unchecked", "contribution", "explicit mesh", "fault", "cut weights"]


def test_single_examples_are_clipped_inside_of_shard_map():
    env = environment(XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = children.run(HERE / "jax_shard_map_clipping.py", env=env, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.removesuffix(" holds") for line in done.stdout.splitlines()] == CLAIMS


# --- Training -----------------------------------------------------------------------------------------------

MANY, THE_ONE = 20, 1  # an example of the first batch, and not of the second


def moved(loss, seed, at_once=1, **more):
    """By how much one example moves what a run releases, in clip norms; all others have no gradient."""
    weights, example = cancelling(loss, 5, np.random.default_rng(seed))
    plan, last = simple_plan(4, MANY, 5, bands=4, noise_multiplier=1e-3), []
    for factor in (1, 0):
        here = (factor * (np.arange(MANY) == THE_ONE)).astype(f)
        examples = jax.tree.map(lambda leaf, here=here: np.multiply.outer(here, leaf), example)
        training = tiny.training(plan, optax.sgd(5.0), loss, examples, clip_norm=1.0, **more)
        assert [THE_ONE in training._sampler.batch(step) for step in range(2)] == [True, False]
        state = next(training.steps(training.init(weights), at_once=at_once))
        last.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.weights))
    return length(jax.tree.map(np.subtract, *last))


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (pair, {}), (pair, {"at_once": 2}), (pair, {"at_once": 2, "micro_batch": 3}),
        (distance, {"micro_batch": 1}),
    ],
)  # fmt: skip
def test_one_example_moves_what_is_released_by_at_most_the_clip_norm(loss, more):
    found = [moved(loss, seed, **more) for seed in range(3)]
    assert 0.5 < max(found) <= 1 + 1e-5  # weights near one, in float32


def test_a_training_that_computes_gradients_twice_is_caught(monkeypatch):
    """The planted fault."""
    monkeypatch.setattr(clipping.gradient, "computed_once", lambda function, given, *_: function(given))
    assert max(moved(pair, seed) for seed in range(3)) > 1000


def test_the_conditional_is_in_the_programs_of_training():
    """The step decides it there, which no compiler knows: each of them has one."""
    training = tiny.training(micro_batch=5)
    training.init(tiny.first_weights())
    held, frozen, secrets = training._held, training._frozen, training._secrets
    for count in (1, 2):
        rows = training._source.rows([np.arange(12)] * count, 0, training._examples_key)
        if count == 1:
            program = training._programs.clip.lower(held.trained, frozen, rows, np.int32(0), secrets).compile()
        else:
            program, _ = training._programs.chunk(held, frozen, rows, np.int32(0), secrets)
        assert program.as_text().count(" conditional(") == 1


@pytest.mark.parametrize("scale", spread([1e-36, 1e-30, 1e-20, 1e15, 1e30], 3))
def test_very_small_and_very_large_gradients_are_clipped_like_others(scale):
    training = tiny.training(
        loss=lambda weights, example: jnp.float32(scale) * tiny.loss(weights, example), clip_norm=1.0
    )
    training.init(tiny.first_weights())
    for index in range(8):
        alone = length(tiny.clipped_sum(training, [index]))
        assert alone <= 1 + 1e-6
        assert (alone == 0) if scale > 1e20 else (alone > 0.999) if scale > 1e10 else (alone < 1e-15)


def test_rows_that_no_example_fills_add_nothing_whatever_a_loss_makes_of_them():
    """Where NaN is swallowed, and the gradient is the same of every row."""

    def loss(weights, example):
        return jnp.where(example[0][0] > 0.5, 1.0, -1.0) ** 2 * (weights["weight"].sum() + weights["bias"].sum())

    sums = []
    for micro_batch in (1, 4, 7, 1000):
        training = tiny.training(loss=loss, micro_batch=micro_batch)
        training.init(tiny.first_weights())
        sums.append([length(tiny.clipped_sum(training, range(size))) for size in (0, 1, 9)])
    np.testing.assert_allclose(sums, [[0, CLIP, 9 * CLIP]] * 4, rtol=2e-5)


def test_an_example_that_is_not_finite_counts_nothing_and_spoils_nothing():
    x, y = tiny.data()
    x[3], y[5] = np.nan, np.inf
    training = tiny.training(data=(x, y), micro_batch=4)
    training.init(tiny.first_weights())
    every, without = (tiny.clipped_sum(training, some) for some in (range(8), [0, 1, 2, 4, 6, 7]))
    np.testing.assert_allclose(tiny.flat(every), tiny.flat(without), rtol=1e-6, atol=1e-7)
    assert length(every) > CLIP


def test_padding_is_no_nan_where_jax_is_told_to_stop_at_them():
    with jax.debug_nans(True):
        tiny.weights_of(plan=tiny.plan(steps=2, bands=1))


def test_weights_that_are_cut_over_an_explicit_mesh_are_refused_in_a_sentence():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    weights = jax.device_put(jnp.ones((5, 2)), NamedSharding(mesh, PartitionSpec(None, "model")))
    gradient = clipped_gradient(lambda weights, row: jnp.sum(row @ weights), clip_norm=1.0)
    with pytest.raises(ValueError, match=r"cut over the explicit mesh axes \['model'\]"):
        gradient(weights, jnp.ones((4, 5)))
