"""What one example adds in JAX where the compiler, a mesh or the caller comes between its norm and the sum."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import children
import jax_training as tiny
from bandmf.jax import Clipped, clipped_gradient, clipping
from children import HERE, environment
from jax_training import CLIP, Training, data, open_run
from sweeps import in_turn

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


def most(loss, size, rows=1, masked=True, tries=12, **more):
    """The largest contribution of one example, in clip norms."""
    gradient, found = jax.jit(clipped_gradient(loss, clip_norm=1.0, **more)), []
    for seed in range(tries):
        weights, example = cancelling(loss, size, np.random.default_rng(seed))
        batch = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)), example)
        mask = {"mask": np.arange(rows) == 0} if masked else {}
        found.append(length(gradient(weights, batch, **mask).total))
    return max(found)


@pytest.mark.parametrize(
    ("loss", "case"),
    in_turn(
        [pair, distance, both_sides],
        [(1, False, {}), (1, True, {}), (16, True, {}), (16, True, {"microbatch": 4})],
    ),
)
def test_norm_and_sum_come_from_the_same_numbers(loss, case):
    rows, masked, more = case
    for size in (1, 5):
        assert most(loss, size, rows, masked, tries=40 if size == 1 else 12, **more) <= 1 + 1e-6


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


CLAIMS = [
    "sum", "microbatches", "unchecked", "contribution", "explicit mesh", "fault", "cut weights", "training",
    "cut updates",
]  # fmt: skip


def test_single_examples_are_clipped_inside_of_shard_map():
    env = environment(XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = children.run(HERE / "jax_shard_map_clipping.py", env=env, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.removesuffix(" holds") for line in done.stdout.splitlines()] == CLAIMS


# --- what is clipped together -------------------------------------------------------------------------------


def begin():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    return training, run, next(run.batches(data())), training.begin()


@pytest.mark.parametrize("around", ["vmap", "map", "stack"])
def test_several_sums_are_not_one(around):
    """Of an ensemble each member was clipped by itself: an example would add to all of them."""
    training, run, batch, (weights, _) = begin()
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), weights)

    def ensemble(rows, mask):
        def each(own):
            return training.gradient(own, rows, mask=mask)

        if around == "vmap":
            return jax.vmap(each)(many)
        if around == "map":
            return jax.lax.map(each, many)
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), each(weights))

    state = training.optimizer.init(many)
    with pytest.raises(ValueError, match=r"what was clipped together has \(\(1,\), \(1, 5\)\)"):
        run.release(training.update, batch.sum(ensemble), many, state)
    with pytest.raises(ValueError, match="clip once for all parameters"):
        training.optimizer.update(batch.sum(ensemble), state, many, secret=run._secrets.of_step(run.plan, 0))
    assert run.ledger.steps_spent == 0


def test_two_sums_of_a_batch_are_not_added():
    training, run, batch, (weights, state) = begin()
    twice = jax.tree.map(jnp.add, training.sum(batch, weights), training.sum(batch, weights))
    with pytest.raises(ValueError, match=r"total is not what batch\.sum gave"):
        run.release(training.update, twice, weights, state)
    assert run.ledger.steps_spent == 0


def test_a_sum_that_was_put_in_another_claim_is_still_the_same():
    training, run, batch, (weights, state) = begin()
    plain = batch.sum(lambda rows, mask: training.gradient(weights, rows, mask=mask).total)
    run.release(training.update, Clipped(plain, CLIP), weights, state)
    assert run.steps_taken == 1


def test_the_first_batch_is_not_released_in_every_step():
    """To overfit one batch: its examples would take part twelve times, not three."""
    training, run, batch, (weights, state) = begin()
    total = training.sum(batch, weights)
    weights, state = run.release(training.update, total, weights, state)
    batch = next(run.batches(data()))
    with pytest.raises(RuntimeError, match="step=1: the batch was not read"):
        run.release(training.update, total, weights, state)
    training.sum(batch, weights)
    with pytest.raises(ValueError, match=r"step=1: total is not what batch\.sum gave"):
        run.release(training.update, total, weights, state)
    by_pieces = [training.gradient(weights, rows.data, mask=rows.mask) for rows in batch]
    run.release(training.update, by_pieces[0], weights, state)
    assert run.steps_taken == 2


def test_a_mask_that_is_forgotten_is_noticed_where_a_loss_swallows_nan():
    _, _, batch, _ = begin()

    def loss(weights, example):
        return jnp.where(example[0][0] > 0.5, 1.0, -1.0) * weights[0]

    gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP))
    with pytest.raises(ValueError, match="mask: rows that are masked count in the sum"):
        batch.sum(lambda rows, mask: gradient(jnp.zeros(3), rows))
    assert batch.sum(partial(gradient, jnp.zeros(3))).total.shape == (3,)


def test_a_forgotten_mask_is_noticed_in_a_plain_sum():
    """As another library gives it: the sum is named a Clipped only afterwards."""
    training, run, batch, (weights, state) = begin()

    def swallows(weights, example):
        return jnp.where(example[0][0] > 0.5, 1.0, -1.0) * (weights["weight"].sum() + weights["bias"].sum())

    gradient = jax.jit(clipped_gradient(swallows, clip_norm=CLIP))
    for forgotten in (
        lambda rows, mask: gradient(weights, rows).total,
        lambda rows, mask: (jnp.sum(mask), gradient(weights, rows).total),
    ):
        total = batch.sum(forgotten)
        total = total[1] if isinstance(total, tuple) else total
        with pytest.raises(ValueError, match="step=0: mask: rows that are masked count in the sum"):
            run.release(training.update, Clipped(total, CLIP), weights, state)
    assert run.ledger.steps_spent == 0
    # What else is computed of a batch may count them, and does not hide a sum that does.
    assert batch.sum(lambda rows, mask: jnp.float32(3)) == 3
    with pytest.raises(ValueError, match="mask: rows that are masked count in the sum"):
        batch.sum(lambda rows, mask: gradient(weights, rows))
    counted, total = batch.sum(lambda rows, mask: (jnp.ones(3), gradient(weights, rows, mask=mask).total))
    run.release(training.update, Clipped(total, CLIP), weights, state)
    assert (run.steps_taken, counted.shape) == (1, (3,))


# --- arguments ----------------------------------------------------------------------------------------------


def three(weights, x, y):
    return jnp.mean((x @ weights - y) ** 2)


def test_arguments_are_counted_from_the_end_too():
    x, y = jnp.ones((8, 3)), jnp.arange(8.0)
    found = clipped_gradient(three, clip_norm=1.0, argnums=-3, batch_argnums=(-2, -1))(jnp.zeros(3), x, y)
    expected = clipped_gradient(three, clip_norm=1.0, batch_argnums=(1, 2))(jnp.zeros(3), x, y)
    np.testing.assert_array_equal(found.total, expected.total)
    with pytest.raises(ValueError, match="may not be among"):
        clipped_gradient(three, clip_norm=1.0, argnums=1, batch_argnums=(-2, -1))(jnp.zeros(3), x, y)
    with pytest.raises(ValueError, match="there are 3 arguments"):
        clipped_gradient(three, clip_norm=1.0, batch_argnums=3)(jnp.zeros(3), x, y)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8, 2)])
def test_rows_that_every_example_would_see_are_refused_in_any_place(shape):
    gradient = clipped_gradient(lambda weights, x, y: jnp.sum(x @ weights) * y.sum(), clip_norm=1.0)
    with pytest.raises(ValueError, match=r"frozen weights, bind them: functools\.partial"):
        gradient(jnp.zeros(3), jnp.ones((8, 3)), jnp.ones(shape))


def test_two_sums_that_were_clipped_apart_are_not_one():
    """Of two towers, each clipped by itself, one example would add the root of two clip norms."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()

    def towers(rows, mask):
        def part(name):
            return clipped_gradient(
                lambda own, example: tiny.loss({**weights, **own}, example), clip_norm=CLIP
            )({name: weights[name]}, rows, mask=mask)

        return part("weight"), part("bias")

    first, second = next(run.batches(data())).sum(towers)
    together = Clipped({**first.total, **second.total}, CLIP)
    with pytest.raises(ValueError, match="put together from several sums, each clipped by itself"):
        run.release(training.update, together, weights, state)
    assert run.spent() == 0
