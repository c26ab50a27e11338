"""bandmf.jax.Training: one item, one private update; what it promises and what it refuses."""

from __future__ import annotations

import gc
import logging
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_training as tiny
from bandmf import Key
from bandmf.jax import Training
from bandmf.jax.training.data import Source
from bandmf.ledger import Ledger
from bandmf.noise import NumpyEngine
from training import simple_plan

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def clipped_by_hand(weights, rows, loss=tiny.loss):
    """The sum of jax.grad, one example at a time and clipped."""
    total = jax.tree.map(jnp.zeros_like, weights)
    for row in zip(*rows, strict=True):
        gradient = jax.grad(loss)(weights, row)
        factor = jnp.minimum(1, tiny.CLIP / optax.tree.norm(gradient))
        total = jax.tree.map(lambda a, b, f=factor: a + f * b, total, gradient)
    return total


def test_a_step_releases_the_clipped_sum_and_the_noise_over_the_planned_size():
    assert_follows_algorithm_2(tiny.plan())


def assert_follows_algorithm_2(plan):
    """The weights after each step, and the batches that were drawn."""
    training, batches = tiny.training(plan, optax.sgd(1.0)), []
    own, weights = training._opened.run_key, tiny.first_weights()
    engine = NumpyEngine(plan.strategy, own)
    state = engine.init({name: leaf.shape for name, leaf in weights.items()})
    for after in training.steps(training.init(weights)):
        batch = training._sampler.batch(after.step - 1)
        batches.append(batch)
        total = clipped_by_hand(weights, [part[batch] for part in tiny.data()])
        noisy = {name: np.array(leaf) for name, leaf in total.items()}
        state = engine.add(state, noisy, plan.deviation(tiny.CLIP))
        weights = {name: leaf - noisy[name] / plan.batch_size for name, leaf in weights.items()}
        largest = np.abs(tiny.flat(weights)).max()
        np.testing.assert_allclose(tiny.flat(after.weights), tiny.flat(weights), rtol=0, atol=1e-5 * max(1, largest))
    return batches


def test_an_empty_batch_is_a_step_of_noise_alone():
    batches = assert_follows_algorithm_2(tiny.plan(batch_size=0.05, bands=1))
    assert not all(map(len, batches))


def test_a_state_is_weights_optimizer_and_step_and_nothing_of_the_noise():
    training = tiny.training(optimizer=optax.adam(0.1))
    state = next(training.steps(training.init(tiny.first_weights())))
    assert state._fields == ("weights", "optimizer", "step")
    assert state.step == training.steps_taken == 1
    kept = {id(leaf) for leaf in jax.tree.leaves(training._held.noise)}
    assert not kept & {id(leaf) for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize("at_once", [2, 5, 100])
def test_steps_at_once_are_single_steps(at_once):
    plan, adam = tiny.plan(), optax.adam(0.1)
    alone = tiny.weights_of(plan, adam)
    np.testing.assert_allclose(tiny.weights_of(plan, adam, at_once=at_once), alone, rtol=0, atol=1e-6)


def test_items_of_several_steps_end_at_every_checkpoint(tmp_path):
    training = tiny.training(folder=tmp_path / "run", save_every=5)
    found = [state.step for state in training.steps(training.init(tiny.first_weights()), at_once=3)]
    assert found == [3, 5, 8, 10, 12]
    training.close()


@pytest.mark.parametrize("at_once", [1, 12])
def test_the_loss_is_traced_once_for_all_steps(at_once):
    calls = []

    def loss(weights, example):
        calls.append(1)
        return tiny.loss(weights, example)

    training = tiny.training(loss=loss, micro_batch=5)
    steps = training.steps(training.init(tiny.first_weights()), at_once=at_once)
    assert calls == []
    next(steps)
    assert len(calls) == 1
    assert sum(1 for _ in steps) == tiny.STEPS / at_once - 1
    assert len(calls) == 1


def test_micro_batches_change_nothing_but_rounding():
    alone = tiny.weights_of()
    for micro_batch in (1, 7, 1000):
        np.testing.assert_allclose(tiny.weights_of(micro_batch=micro_batch), alone, atol=1e-6)


def test_rows_hold_every_example_of_a_batch_once_however_large_it_is():
    source = Source(tiny.data(), tiny.plan(), 5, None)
    for size in (0, 1, 5, 23, 60):
        batch = np.random.default_rng(size).permutation(60)[:size]
        rows = source.rows([batch], 0, Key(bytes(32)))
        places = np.asarray(rows.places).reshape(-1)
        assert sorted(places[places >= 0]) == sorted(batch)
        held = np.asarray(rows.data[0]).reshape(-1, 5)[places >= 0]
        np.testing.assert_array_equal(held, tiny.data()[0][places[places >= 0]])


def test_a_key_is_the_examples_own_and_another_one_in_every_step():
    seen = []

    def loss(weights, example, key):
        words = jax.random.key_data(key)
        jax.debug.callback(lambda *w: seen.append(tuple(map(int, w))), example[2], *words)
        return tiny.loss(weights, example[:2])

    data = (*tiny.data(), np.arange(tiny.EXAMPLES))
    training = tiny.training(loss=loss, data=data, plan=tiny.plan(bands=1, batch_size=30, steps=4))
    tiny.trained(training)
    jax.effects_barrier()
    keys = {}
    for index, *words in seen:
        keys.setdefault(tuple(words), set()).add(index)
    assert len(keys) > 60
    assert sum(len(owners) > 1 for owners in keys.values()) <= 4  # of rows without an example: one a step


def test_a_run_that_is_begun_again_gives_a_loss_the_same_keys_and_another_run_does_not():
    def loss(weights, example, key):
        kept = jax.random.bernoulli(key, 0.5, (5,))
        return tiny.loss(weights, (example[0] * kept, example[1]))

    def first_sum(key):
        training = tiny.training(loss=loss, key=key)
        training.init(tiny.first_weights())
        return tiny.flat(tiny.clipped_sum(training, range(20)))

    assert np.abs(first_sum(tiny.KEY) - first_sum(Key(bytes([1] * 32)))).max() > 0.1
    one, same = tiny.weights_of(loss=loss), tiny.weights_of(loss=loss)
    np.testing.assert_array_equal(one, same)
    other = tiny.weights_of(loss=loss, at_once=4)
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(one - tiny.weights_of()).max() > 1e-3


def test_weights_that_are_not_trained_stay_and_are_no_constants_of_the_program():
    weights = {**tiny.first_weights(), "base": jnp.full((1, 5), 0.25), "count": jnp.arange(3)}

    def loss(weights, example):
        x, y = example
        return jnp.mean(((weights["weight"] + weights["base"]) @ x + weights["bias"] - y) ** 2)

    training = tiny.training(loss=loss, trainable={"weight": True, "bias": True, "base": False, "count": False})
    state = tiny.trained(training, weights)
    np.testing.assert_array_equal(state.weights["base"], weights["base"])
    np.testing.assert_array_equal(state.weights["count"], weights["count"])
    assert np.abs(np.asarray(state.weights["weight"] - weights["weight"])).max() > 0.01
    assert set(training._held.noise.history) == {"weight", "bias"}
    assert not any(np.shape(leaf) == (1, 5) for leaf in jax.tree.leaves(training._held.optimizer))
    by_function = tiny.training(loss=loss, trainable=lambda tree: {name: name in ("weight", "bias") for name in tree})
    np.testing.assert_array_equal(tiny.flat(tiny.trained(by_function, weights).weights), tiny.flat(state.weights))


@pytest.mark.parametrize("trainable", [False, {"weight": 1, "bias": True}, {"weight": True}, lambda tree: {"x": True}])
def test_what_is_not_trainable_is_refused(trainable):
    with pytest.raises(ValueError, match="trainable"):
        tiny.training(trainable=trainable).init(tiny.first_weights())


def test_an_item_is_valid_until_the_next_is_asked_for():
    training = tiny.training()
    first = training.init(tiny.first_weights())
    steps = training.steps(first)
    second = next(steps)
    assert np.isfinite(tiny.flat(second.weights)).all()
    next(steps)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(second.weights["weight"])
    for stale in (first, second):
        with pytest.raises(RuntimeError, match="is not the last one"):
            training.steps(stale)


def test_the_weights_that_were_given_stay_the_users():
    weights = tiny.first_weights()
    tiny.trained(tiny.training(), weights)
    np.testing.assert_array_equal(tiny.flat(weights), tiny.flat(tiny.first_weights()))


@pytest.mark.parametrize("edit", ["replaced", "in place", "optimizer"])
def test_an_edited_state_is_refused(edit):
    training = tiny.training(optimizer=optax.adam(0.1))
    steps = training.steps(training.init(tiny.first_weights()))
    state = next(steps)
    if edit == "replaced":
        with pytest.raises(RuntimeError, match="is not the last one"):
            training.steps(state._replace(weights=tiny.first_weights()))
        return
    if edit == "in place":
        state.weights["bias"] = state.weights["bias"] * 0
    else:
        state.optimizer[0].mu["bias"] = state.optimizer[0].mu["bias"] * 0
    with pytest.raises(RuntimeError, match="was edited"):
        next(steps)


def test_nothing_is_handed_out_before_its_digest_is_recorded(monkeypatch):
    training, recorded = tiny.training(), []
    release = Ledger.release
    monkeypatch.setattr(Ledger, "release", lambda *given: recorded.append(given[1]) or release(*given))
    for state in training.steps(training.init(tiny.first_weights())):
        assert recorded[-1] == state.step - 1
    assert recorded == list(range(tiny.STEPS))


def test_a_step_that_was_released_and_not_applied_is_refused_with_the_way_on(tmp_path, monkeypatch):
    training = tiny.training(folder=tmp_path / "run", save_every=2)
    steps = training.steps(training.init(tiny.first_weights()))
    for _ in range(3):
        state = next(steps)

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(training._programs, "advance", fails)
    with pytest.raises(MemoryError):
        next(steps)
    for again in (partial(training.steps, state), training.save):
        with pytest.raises(RuntimeError, match=r"step=4: was released.*construct Training again"):
            again()
    training.close()
    np.testing.assert_array_equal(tiny.weights_of(folder=tmp_path / "run"), tiny.weights_of())


def test_a_refused_release_leaves_the_state_as_it_was(monkeypatch):
    training = tiny.training()
    state = training.init(tiny.first_weights())

    def refuses(*_):
        raise ValueError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(Ledger, "release", refuses)
        with pytest.raises(ValueError, match="planted"):
            next(training.steps(state))
    for _ in training.steps(state):
        pass
    np.testing.assert_array_equal(tiny.flat(training.state.weights), tiny.weights_of())


def test_what_was_spent_is_known_at_every_step():
    plan, training = tiny.plan(), tiny.training()
    assert training.spent() == 0
    for state in training.steps(training.init(tiny.first_weights())):
        assert training.spent() == plan.spent_after(state.step)
    assert training.finished
    assert "Guarantee" in training.explain()
    assert "written out" in training.explain()
    assert "step 12 of 12" in repr(training)


def test_a_run_that_ends_early_says_so_once(caplog):
    caplog.set_level(logging.WARNING, "bandmf")
    training = tiny.training()
    next(training.steps(training.init(tiny.first_weights())))
    training.close()
    training.close()
    del training
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        "the run ended after step 1 of 12; without a folder it cannot go on"
    ]
    with tiny.training() as whole:
        tiny.trained(whole)
    assert len(caplog.records) == 1


def test_weights_that_are_not_finite_are_warned_of(caplog):
    caplog.set_level(logging.WARNING, "bandmf")
    tiny.trained(tiny.training(optimizer=optax.scale(float("inf"))))
    assert "weights are not finite any more" in caplog.text
    caplog.clear()
    tiny.trained(tiny.training())
    assert "finite" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": 3}, "loss='int': must be a function"),
        ({"loss": lambda weights: 0.0}, r"loss='\(weights\)': must take \(weights, example\)"),
        ({"loss": lambda a, b, c, d: 0.0}, "must take"),
        ({"loss": lambda weights, x, y: 0.0}, "the third argument is the example's random key; name it key, not y"),
        ({"optimizer": 0.1}, "optimizer='float': must be a gradient transformation"),
        ({"data": np.zeros((3, 2))}, r"len\(data\)=3: must be the plan's examples=60"),
        ({"data": np.array(["a"] * 60)}, "must be a pytree of arrays of numbers"),
        ({"plan": 8}, "plan"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"save_every": 0}, "save_every=0: must be a whole number"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"clipping": "ghost"}, "clipping='ghost'"),
        ({"sharding": jax.devices()[0]}, "must be a NamedSharding"),
        ({"moved": "sold"}, "moved='sold'"),
    ],
)
def test_every_argument_is_checked_before_the_folder_is_opened(change, message, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises((ValueError, TypeError), match=message):
        tiny.training(folder=folder, **change)
    assert not folder.exists()


def test_a_constructor_that_fails_leaves_nothing_locked(tmp_path):
    folder = tmp_path / "run"
    tiny.training(folder=folder).close()
    with pytest.raises(ValueError, match="clip_norm"):
        tiny.training(folder=folder, clip_norm=0.25)
    tiny.training(folder=folder).close()


@pytest.mark.parametrize("optimizer", [optax.lbfgs(), optax.contrib.reduce_on_plateau(), optax.polyak_sgd()])
def test_an_optimizer_that_wants_more_than_gradients_is_told_and_spends_nothing(optimizer):
    training = tiny.training(optimizer=optimizer)
    with pytest.raises(TypeError, match=r"from gradients alone .*optax\.lookahead needs an ad"):
        next(training.steps(training.init(tiny.first_weights())))
    assert training.spent() == 0


def test_a_mesh_without_devices_is_refused():
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    plan = simple_plan(examples=tiny.EXAMPLES, batch_size=12, devices=2, parameters=6)
    with pytest.raises(ValueError, match="sharding='AbstractMesh': has no devices"):
        tiny.training(plan, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


def test_a_run_without_a_folder_has_nowhere_to_save():
    training = tiny.training()
    training.init(tiny.first_weights())
    with pytest.raises(ValueError, match="folder=None: there is nowhere to save"):
        training.save()
    with pytest.raises(ValueError, match="save_every=3: there is nowhere to save"):
        tiny.training(save_every=3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda weights, example: weights["weight"] @ example[0], "must give one number for one example"),
        (lambda weights, example: (tiny.loss(weights, example), {}), "loss='tuple'"),
    ],
)
def test_a_loss_that_is_no_number_is_told_so(loss, message):
    training = tiny.training(loss=loss)
    with pytest.raises(ValueError, match=message):
        next(training.steps(training.init(tiny.first_weights())))


@pytest.mark.parametrize("name", ["key", "rng", "dropout_rng", "_", "seed"])
def test_a_third_argument_is_the_examples_key(name):
    made = {}
    exec(f"def loss(weights, example, {name}): return seen(weights, example, {name})", made)
    keys = []
    made["seen"] = lambda weights, example, key: keys.append(key) or tiny.loss(weights, example)
    tiny.trained(tiny.training(loss=made["loss"]), until=1)
    assert keys
    assert all(jnp.issubdtype(key.dtype, jax.dtypes.prng_key) for key in keys)


@pytest.mark.parametrize("own", [True, False])
def test_draws_that_are_the_same_for_all_examples_are_warned_of(own, caplog):
    fixed = jax.random.key(0)

    def loss(weights, example, key):
        return tiny.loss(weights, example) * jax.random.bernoulli(key if own else fixed)

    tiny.trained(tiny.training(loss=loss), until=1)
    assert ("draws the same random numbers for all examples" in caplog.text) is not own


def test_the_state_of_an_optimizer_is_none_of_the_weights():
    class TrainState(NamedTuple):
        params: dict
        opt_state: dict

    training = tiny.training()
    with pytest.raises(ValueError, match=r"weights='TrainState': holds the state of an optimizer.* state\.params"):
        training.init(TrainState(tiny.first_weights(), {}))


def test_a_batch_dimension_is_kept_where_it_is_wanted():
    def loss(weights, example):
        x, y = example
        return jnp.mean((x @ weights["weight"].T + weights["bias"] - y) ** 2)

    np.testing.assert_allclose(tiny.weights_of(loss=loss, keep_batch_dim=True), tiny.weights_of(), atol=1e-6)


def test_messages_tell_no_sizes_of_batches():
    sizes = {len(tiny.training()._sampler.batch(step)) for step in range(tiny.STEPS)}
    training = tiny.training(data=lambda indices: (tiny.data()[0][indices][:-1], tiny.data()[1][indices]))
    with pytest.raises(ValueError, match="one row for each index") as told:
        next(training.steps(training.init(tiny.first_weights())))
    assert not any(str(size) in str(told.value) for size in sizes)


def test_a_plan_for_another_number_of_parameters_is_refused():
    training = tiny.training(tiny.plan(parameters=7))
    with pytest.raises(ValueError, match=r"plan.parameters=7: the weights have 6 entries"):
        training.init(tiny.first_weights())


@pytest.mark.parametrize("activation", [jax.nn.relu, "relu"])
def test_weights_with_what_is_no_array_are_told_to_split_it_off(activation):
    with pytest.raises(ValueError, match=r"has a function or a text in it.*eqx.partition"):
        tiny.training().init({**tiny.first_weights(), "activation": activation})


def test_a_second_init_is_refused():
    training = tiny.training()
    training.init(tiny.first_weights())
    with pytest.raises(RuntimeError, match="init: was called before"):
        training.init(tiny.first_weights())


def test_runs_with_one_key_share_no_noise_and_no_batches():
    key = Key(bytes(32))
    one, other = (
        Training(tiny.loss, optax.sgd(0.5), tiny.data(), tiny.plan(), clip_norm=tiny.CLIP, key=key) for _ in range(2)
    )
    assert not np.array_equal(one._sampler.batch(0), other._sampler.batch(0))
    assert not np.array_equal(one._secrets.noise, other._secrets.noise)
    assert not np.array_equal(one._secrets.draws, other._secrets.draws)


def test_secrets_are_in_no_program():
    training = tiny.training()
    state = training.init(tiny.first_weights())
    rows = training._source.rows([training._sampler.batch(0)], 0, training._examples_key)
    given = (training._held.trained, [], rows, np.int32(0), training._secrets)
    text = training._programs.clip.lower(*given).as_text()
    total = jax.tree.map(jnp.zeros_like, state.weights)
    text += training._programs.advance.lower(total, training._held, training._secrets.noise).as_text()
    planted = jax.jit(lambda x: x + training._secrets.noise).lower(np.zeros(8, np.uint32)).as_text()
    words = [str(int(word)) for part in training._secrets for word in part]
    hexed = [np.asarray(part).tobytes().hex().upper() for part in training._secrets]
    assert not any(word in text for word in words if len(word) > 6)
    assert not any(each in text.upper() for each in hexed)
    assert any(word in planted for word in words) or hexed[0] in planted.upper()  # the search finds what is there


def test_an_accumulating_optimizer_works_inside():
    several = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=3)
    training = tiny.training(optimizer=several)
    seen = [tiny.flat(state.weights) for state in training.steps(training.init(tiny.first_weights()))]
    changed = [not np.array_equal(one, other) for one, other in pairwise(seen)]
    assert changed == [False, True, False] * 3 + [False, True]


def test_learning_rates_that_an_optimizer_keeps_stay_of_one_type():
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    np.testing.assert_allclose(tiny.weights_of(optimizer=adam), tiny.weights_of(optimizer=optax.adam(0.1)), atol=1e-5)
    tiny.weights_of(optimizer=adam, at_once=4)


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_optimizer_that_cannot_be_traced_spends_nothing(at_once):
    training = tiny.training(optimizer=optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    with pytest.raises(TypeError):
        tiny.trained(training, at_once=at_once)
    assert training.spent() == 0
