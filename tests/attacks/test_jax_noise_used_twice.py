"""In JAX: no way to have the noise of a step on two different sums, or on one that the ledger does not have."""

from __future__ import annotations

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_training as tiny
from bandmf.jax import Engine, Training
from bandmf.jax.clipping import Sums
from bandmf.jax.noise.digest import digest
from bandmf.jax.training import steps
from bandmf.ledger import Ledger
from bandmf.randomness.key import Key
from training import same_run, simple_plan

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
    ids=["negated", "two signs", "scaled far down", "doubled", "turned around", "two exchanged", "a last digit"],
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
    plan, found = simple_plan(examples=count, batch_size=half, bands=1), []
    for first in (0.5, 0.0):
        values[0] = first
        training = tiny.training(plan, loss=lambda w, e: w * e, data=values, clip_norm=1.0, micro_batch=rows)
        training.init(jnp.float32(0))
        found.append(float(tiny.clipped_sum(training, range(count))))
    return abs(found[0] - found[1])


@pytest.mark.parametrize("rows", [1, 8])
def test_one_example_more_does_not_move_how_others_are_rounded(rows):
    assert moved_by_half(rows) <= 0.5 + 0.01


def test_a_plain_running_sum_is_caught(monkeypatch):
    def plain(sums, more):
        return Sums(jax.tree.map(jnp.add, sums.total, more), sums.lost)

    monkeypatch.setattr(steps, "added", plain)
    assert moved_by_half(1) > 0.6


def test_a_ledger_with_two_lines_for_one_step_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Key(bytes(32)), {"plan": "p", "steps": 3})
    ledger.release(0, b"batch", b"sum")
    ledger._append({"kind": "step", "step": 0, "batch": "00" * 16, "sum": "00" * 16})
    ledger.close()
    with pytest.raises(ValueError, match="line 3 was changed"):
        Ledger(tmp_path / "ledger", Key(bytes(32)), {"plan": "p", "steps": 3})


# --- steps of a run -------------------------------------------------------------------------------------------


def begun(**more):
    training = tiny.training(**more)
    return training, training.init(tiny.first_weights())


def test_no_number_of_the_noise_is_used_twice():
    """Neither in another step, nor in another leaf, nor in another run with the same key."""

    def constant(weights, example):
        return 0.0 * weights["bias"].sum() + 0.0 * weights["weight"].sum()

    seen = []
    for run_id in ("5a" * 16, "77" * 16):  # the same in every test, as others would be near each other by chance
        with same_run(run_id):
            training = Training(
                constant, optax.sgd(1.0), tiny.data(), tiny.plan(bands=1), clip_norm=tiny.CLIP, key=tiny.KEY
            )
        before = tiny.flat(tiny.first_weights())
        for state in training.steps(training.init(tiny.first_weights())):
            before, added = tiny.flat(state.weights), tiny.flat(state.weights) - before
            seen.extend(added.tolist())
    assert len(seen) == 2 * tiny.STEPS * 6
    distances = np.abs(np.subtract.outer(seen, seen))[~np.eye(len(seen), dtype=bool)]
    assert np.sort(distances)[:2].max() > 1e-6  # of 144 numbers, two may be near each other by chance
    assert np.std(seen) * tiny.plan(bands=1).batch_size == pytest.approx(
        tiny.plan(bands=1).deviation(tiny.CLIP), rel=0.2
    )


@pytest.mark.parametrize("at_once", [1, 4])
def test_of_two_loops_from_one_state_one_takes_the_step(at_once):
    training, state = begun()
    one, other = training.steps(state, at_once=at_once), training.steps(state)
    next(one)
    with pytest.raises(RuntimeError, match="is not the last one"):
        next(other)
    assert training.spent() == tiny.plan().spent_after(at_once)
    for _ in one:
        pass
    np.testing.assert_allclose(tiny.flat(training.state.weights), tiny.weights_of(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_loss_with_the_other_sign_is_no_replay(tmp_path, at_once):
    """Half of the difference of two such releases would be the sum without noise."""
    training, state = begun(folder=tmp_path / "run", save_every=12)
    next(training.steps(state, at_once=at_once))
    training._let_go()
    negated, state = begun(folder=tmp_path / "run", save_every=12, loss=lambda *given: -tiny.loss(*given))
    state = next(negated.steps(state, at_once=at_once))
    assert state.step == 2 * at_once  # those that were released are lost
    assert negated._opened.ledger.replays == 0
    negated._let_go()


def test_steps_at_once_from_other_weights_are_lost_before_they_run(tmp_path, monkeypatch):
    training, state = begun(folder=tmp_path / "run", save_every=12)
    next(training.steps(state, at_once=4))
    training._let_go()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again, ran = tiny.training(folder=tmp_path / "run", save_every=12), []
    state = again.init(jax.tree.map(lambda leaf: leaf + 1, tiny.first_weights()))
    chunk = again._programs.chunk

    def watched(*given):
        program, identity = chunk(*given)
        return lambda *given: ran.append(1) or program(*given), identity

    monkeypatch.setattr(again._programs, "chunk", watched)
    assert next(again.steps(state, at_once=4)).step == 8
    assert ran == [1]  # for steps 5 to 8 alone
    again._let_go()


def test_an_interrupted_ledger_must_be_opened_again(tmp_path, monkeypatch):
    """Its last line may be on the disk and not in memory: another sum would follow it."""
    training, state = begun(folder=tmp_path / "run", save_every=12)
    steps = training.steps(state)
    next(steps), next(steps)
    monkeypatch.setattr(Ledger, "_apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="open the run again"):
        next(training.steps(training.state))
    training._let_go()
    with tiny.training(folder=tmp_path / "run", save_every=12) as again:
        assert again.spent() == tiny.plan().spent_after(3)  # the line is there, and counts
        np.testing.assert_array_equal(tiny.flat(tiny.trained(again).weights), tiny.weights_of())
