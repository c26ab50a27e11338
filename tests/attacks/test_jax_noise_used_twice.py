"""In JAX: no way to have the noise of a step on two different sums, or on one that the ledger does not have."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_training as tiny
from bandmf.jax import Clipped, Engine, clipped_gradient, clipping, privatize
from bandmf.jax.noise.digest import digest
from bandmf.ledger import Ledger
from bandmf.randomness.key import Key
from jax_training import CLIP, STEPS, Training, data, flat, open_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SEEDS = jnp.asarray([1, 2, 3, 4], jnp.uint32)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: -x,
        lambda x: x.at[:2].multiply(-1),
        lambda x: x * 2.0**-64,
        lambda x: x * 2,
        lambda x: x[::-1],
        lambda x: x.at[0].set(x[1]).at[1].set(x[0]),
        lambda x: x.at[3].set(jnp.nextafter(x[3], jnp.inf)),
    ],
    ids=[
        "negated",
        "two signs",
        "scaled far down",
        "doubled",
        "turned around",
        "two exchanged",
        "a last digit",
    ],
)
def test_a_digest_sees_every_change(change):
    for seed in range(30):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=6), jnp.float32)
        assert not np.array_equal(digest(x, SEEDS), digest(change(x), SEEDS))


def test_a_digest_sees_two_arrays_that_are_exchanged():
    """Of one shape and type, so that nothing but their order tells."""
    for seed in range(5):
        x, y = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 6)), jnp.float32)
        for one, other in ((x, y), (x[:3], x[3:])):
            assert not np.array_equal(digest([one, other], SEEDS), digest([other, one], SEEDS))


def test_a_loss_with_the_other_sign_is_no_replay(tmp_path):
    """Half of the difference of two such releases would be the sum without noise."""
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    training.steps(run, *training.begin(), until=1)
    run.close()
    negated = Training(plan)
    negated.gradient = jax.jit(clipped_gradient(lambda *given: -tiny.loss(*given), clip_norm=CLIP))
    with pytest.raises(ValueError, match="was released before with another sum"):
        negated.steps(open_run(plan, tmp_path), *negated.begin())


@pytest.mark.parametrize("before", [optax.scale(100.0), optax.sgd(10.0), optax.clip_by_global_norm(0.01)])
def test_a_sum_that_was_changed_on_its_way_gets_no_noise(before):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    training.optimizer = optax.chain(before, privatize(plan, clip_norm=CLIP), optax.sgd(0.1))
    weights, _ = training.steps(run, *training.begin(), until=1)
    assert np.isnan(flat(weights)).all()


def test_a_secret_is_for_one_sum():
    """Two updates in one function, each with a sum of its own."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()

    @jax.jit
    def twice(total, weights, state, secret):
        other = jax.tree.map(lambda leaf: leaf + 1, total)
        one, after = training._update(total, weights, state, secret)
        return one, training._update(other, weights, state, secret)[0], after

    total = training.sum(next(run.batches(data())), weights)
    one, two, _ = run.release(twice, total, weights, state)
    assert np.isfinite(flat(one)).all()
    assert np.isnan(flat(two)).all()


def test_a_sum_of_which_nothing_is_known_is_refused():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    next(run.batches(data()))
    with pytest.raises(ValueError, match="must be what clipped_gradient gives"):
        run.release(training.update, weights, weights, state)
    with pytest.raises(ValueError, match="must be a sum of clipped gradients"):
        training.optimizer.update(weights, state, weights, secret=run._secrets.of_step(plan, 0))
    assert run.ledger.steps_released == 0


def test_what_was_spent_is_known_as_soon_as_a_run_is_opened(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    training.steps(run, *training.begin(), until=7)
    spent = run.spent()
    run.close()
    assert spent == open_run(plan, tmp_path).spent() == pytest.approx(plan.spent_after(7))


def test_of_two_threads_one_releases_a_step(tmp_path):
    for trial in range(10):
        ledger, refused = Ledger(tmp_path / str(trial), Key(), {"plan": "p", "steps": 3}), []

        def release(total, ledger=ledger, refused=refused):
            try:
                ledger.release(0, b"batch", total)
            except ValueError:
                refused.append(total)

        threads = [threading.Thread(target=release, args=(bytes([k]),)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3


def test_a_finished_chunk_is_refused_with_other_weights_before_it_runs():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    run.release_chunk(training.advance, next(run.chunks(data(), steps=4)), *training.begin())
    run.steps_taken = 0
    run._noise.remember(None)
    seen = []

    def advance(rows, weights, state, secret):
        jax.debug.callback(lambda value: seen.append(value), weights["bias"])
        return training.advance(rows, weights, state, secret)

    with pytest.raises(ValueError, match="was released before, and not by this chunk"):
        run.release_chunk(advance, next(run.chunks(data(), steps=4)), *training.begin())
    assert seen == []


@pytest.mark.parametrize("kernels", ["xla", None])
def test_an_engine_that_was_made_for_another_model_is_refused(kernels):
    """It would give all columns of the first model the noise of one."""
    engine = Engine(tiny.plan().strategy, kernels=kernels)
    first = engine.init({"w": (4, 10)})
    engine.init({"w": (4, 1)})
    with pytest.raises(ValueError, match="is not of the model"):
        engine.add(first, {"w": jnp.zeros((4, 10))}, 1.0)


def moved_by_half(rows):
    """What an example with the gradient 0.5 moves. In a plain running sum it decides how all after it are rounded.

    Without it the sum stays just below a power of two, where numbers are finer: there small terms count.
    """
    count, half = 2**15, 2**14
    fine = float(np.spacing(np.float32(0.5 * half)))
    values = np.full(count, -0.49 * fine / rows, np.float32)
    values[: half + rows], values[1:rows], values[half + rows - 1] = 0.5, 0, 0.5 - fine
    order = np.arange(count).reshape(rows, -1).T.reshape(-1)  # in which microbatches take rows
    batch, first = np.empty_like(values), np.arange(count) == order[0]
    batch[order] = values
    gradient = jax.jit(clipped_gradient(lambda w, e: w * e, clip_norm=1.0, microbatch=rows))
    with_it, without = (
        float(gradient(jnp.float32(0), jnp.asarray(batch), mask=kept).total)
        for kept in (first | True, ~first)
    )
    return abs(with_it - without)


@pytest.mark.parametrize("rows", [1, 8])
def test_one_example_more_does_not_move_how_others_are_rounded(rows):
    assert moved_by_half(rows) <= 0.5 + 0.01


def test_a_plain_running_sum_is_caught(monkeypatch):
    def plain(sums, more):
        return clipping.Sums(jax.tree.map(jnp.add, sums.total, more), sums.lost)

    monkeypatch.setattr(clipping.microbatches, "added", plain)
    assert moved_by_half(1) > 0.6


def test_a_secret_becomes_no_constant_and_is_not_stored():
    import pickle

    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    total = Clipped(jax.tree.map(jnp.zeros_like, weights), CLIP)
    secret = run._secrets.of_step(plan, 0)
    with pytest.raises(ValueError, match="would become a constant"):
        jax.jit(lambda total, weights, state: training._update(total, weights, state, secret))(
            total, weights, state
        )
    with pytest.raises(TypeError, match="never stored"):
        pickle.dumps(secret)
    _, after = training.steps(run, weights, state, until=2)
    assert repr(after[0]) == "PrivateState(step=2)"
    assert repr(after[0].noise) == "State(step=2)"
    assert STEPS > 2


def test_an_argument_that_every_example_would_see_is_refused():
    """A forgotten batch_argnums: all labels went into every loss, and one moved the sum by 41 clip norms."""

    def loss(weights, x, y):
        return jnp.mean((x @ weights - y) ** 2)

    x, y = jnp.ones((8, 3)), jnp.ones(8)
    with pytest.raises(ValueError, match=r"batch_argnums=\(1,\): argument 2 has 8 rows too"):
        clipped_gradient(loss, clip_norm=1.0)(jnp.zeros(3), x, y)
    assert clipped_gradient(loss, clip_norm=1.0, batch_argnums=(1, 2))(jnp.zeros(3), x, y).total.shape == (3,)


def test_a_row_that_no_example_fills_adds_nothing_even_without_a_mask():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, _ = training.begin()
    batch = next(run.batches(data()))
    with_mask = training.sum(batch, weights).total
    with pytest.raises(ValueError, match="mask: rows that are masked count in the sum"):
        batch.sum(lambda rows, mask: training.gradient(weights, rows))
    (piece,) = batch
    forgotten = training.gradient(weights, piece.data).total
    for name, leaf in with_mask.items():
        np.testing.assert_array_equal(leaf, forgotten[name])


def test_a_step_of_a_chunk_has_one_noise():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    def twice(rows, weights, state, secret):
        training.advance(rows, weights, state, secret)
        return training.advance(rows, weights, state, secret)

    with pytest.raises(ValueError, match="used privatize 2 times"):
        run.release_chunk(twice, next(run.chunks(data(), steps=4)), *training.begin())
    assert run.ledger.steps_spent == 0


def test_a_sum_that_was_changed_on_its_way_is_named_at_the_next_step():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    training.optimizer = optax.chain(optax.scale(0.5), privatize(plan, clip_norm=CLIP), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"step=0: privatize was given another sum than run\.release"):
        training.whole(run)
    assert run.steps_taken == 1


def test_an_interrupted_ledger_must_be_opened_again(tmp_path, monkeypatch):
    """Its last line may be on the disk and not in memory: another sum would follow it."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    weights, state = training.steps(run, *training.begin(), until=2)
    monkeypatch.setattr(Ledger, "_apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training.steps(run, weights, state)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="open the run again"):
        training.steps(run, jax.tree.map(lambda leaf: leaf + 1, weights), state)
    run.close()
    assert open_run(plan, tmp_path).ledger.steps_released == 3  # the line is there, and counts


def test_a_ledger_with_two_lines_for_one_step_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Key(bytes(32)), {"plan": "p", "steps": 3})
    ledger.release(0, b"batch", b"sum")
    ledger._append({"kind": "step", "step": 0, "batch": "00" * 16, "sum": "00" * 16})
    ledger.close()
    with pytest.raises(ValueError, match="line 3 was changed"):
        Ledger(tmp_path / "ledger", Key(bytes(32)), {"plan": "p", "steps": 3})
