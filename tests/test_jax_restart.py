"""Runs in JAX that end anywhere and go on: the same weights, nothing released twice, nothing secret in the files."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import children
import jax_training as tiny
from bandmf.jax import Training
from bandmf.jax.training import checkpoint
from bandmf.ledger import Ledger, checkpoints, run_folder
from children import HERE

pytestmark = pytest.mark.usefixtures("compiled_quickly")
ADAM = optax.adam(0.1)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def expected():
    return tiny.weights_of(optimizer=ADAM)


def stopped(folder, until, at_once=1, **more):
    """A run that is left after so many steps, and its folder as a kill would leave it: unlocked, nothing more saved."""
    training = tiny.training(**{"optimizer": ADAM, "folder": folder} | more)
    try:
        tiny.trained(training, at_once=at_once, until=until)
    finally:
        training._let_go()
    return training


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("until", [2, 6, 7])
def test_a_run_that_stopped_ends_with_the_weights_of_one_that_did_not(folder, expected, until, at_once):
    stopped(folder, until, at_once, save_every=6)
    with tiny.training(optimizer=ADAM, folder=folder, save_every=6) as again:
        begun = again.init(tiny.first_weights())
        assert begun.step == (until - 1) // 6 * 6  # saved when the next item was asked for
        spent = again.spent()
        assert spent >= tiny.plan().spent_after(until)
        last = tiny.flat([state.weights for state in again.steps(begun, at_once=at_once)][-1])
        np.testing.assert_allclose(last, expected, rtol=0, atol=1e-6 if at_once > 1 else 0)


def test_a_finished_run_takes_no_step_more(folder, expected):
    np.testing.assert_array_equal(tiny.weights_of(optimizer=ADAM, folder=folder), expected)
    with tiny.training(optimizer=ADAM, folder=folder) as again:
        state = again.init(tiny.first_weights())
        assert again.finished
        assert list(again.steps(state)) == []
        np.testing.assert_array_equal(tiny.flat(state.weights), expected)


@pytest.mark.parametrize("at_once", [1, 2, 4, 12])
def test_steps_that_were_recorded_keep_their_length_after_a_restart(folder, expected, at_once, monkeypatch):
    """Chunks of four, the second of which was reserved and did not end: with fewer at once it is lost."""
    finish = Ledger.finish

    def dies(ledger, step, sums):
        if step == 4:
            raise MemoryError
        finish(ledger, step, sums)

    with monkeypatch.context() as planted:
        planted.setattr(Ledger, "finish", dies)
        with pytest.raises(MemoryError):
            stopped(folder, 12, at_once=4, save_every=12)
    again = tiny.training(optimizer=ADAM, folder=folder, save_every=12)
    found = [state.step for state in again.steps(again.init(tiny.first_weights()), at_once=at_once)]
    assert found[:2] == ([4, 8] if at_once >= 4 else [4, 8 + at_once])
    if at_once >= 4:
        np.testing.assert_allclose(tiny.flat(again.state.weights), expected, atol=1e-6)
    assert again.finished
    assert again.spent() == again.plan.spent()
    again.close()


def goes_on_after(training, released, caplog, weights=None, at_once=1):
    """The steps that were released before are lost, and the next ones are taken from the weights of the start."""
    state = training.init(tiny.first_weights() if weights is None else weights)
    start, secrets = tiny.flat(state.weights), training._secrets
    total = tiny.clipped_sum(training, training._sampler.batch(released), released)
    state = next(training.steps(state, at_once=at_once))
    assert f"steps 1 to {released} were released before the restart and cannot be repeated" in caplog.text
    if at_once == 1:  # its noise is that of its own step: those of the lost steps were drawn
        assert state.step == released + 1
        engine, noise = training._engine, training._engine.init(state.weights)
        nothing = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), total)
        for gradient in [*[nothing] * released, total]:
            noisy, noise = engine.add(noise, gradient, training._programs._scale, secrets.noise)
        moved = start - RATE / training.plan.batch_size * tiny.flat(noisy)
        np.testing.assert_allclose(tiny.flat(state.weights), moved, rtol=0, atol=1e-5)
    kinds = [json.loads(line)["kind"] for line in (training.folder / "ledger.jsonl").read_text().splitlines()]
    assert "replay" not in kinds
    assert training.spent() == training.plan.spent_after(state.step)
    training.close()


RATE = 0.5
SGD = optax.sgd(RATE)


def test_a_step_is_not_released_again_with_another_sum(folder, caplog):
    stopped(folder, 3, optimizer=SGD, save_every=12)
    again = tiny.training(optimizer=SGD, folder=folder, save_every=12, loss=other_loss)
    goes_on_after(again, 3, caplog)


@pytest.mark.parametrize("at_once", [1, 4])
def test_steps_at_once_are_not_taken_again_from_other_weights(folder, caplog, at_once):
    stopped(folder, 4, at_once=4, optimizer=SGD, save_every=12)
    shutil.rmtree(folder / "checkpoints")
    other = jax.tree.map(lambda leaf: leaf + 1, tiny.first_weights())
    goes_on_after(tiny.training(optimizer=SGD, folder=folder, save_every=12), 4, caplog, other, at_once)


def test_steps_at_once_are_another_program_with_other_constants(folder, caplog):
    stopped(folder, 4, at_once=4, optimizer=SGD, save_every=12, loss=scaled_by(1.0))
    again = tiny.training(optimizer=SGD, folder=folder, save_every=12, loss=scaled_by(2.0))
    goes_on_after(again, 4, caplog, at_once=4)


def test_steps_at_once_that_a_machine_does_not_repeat_are_lost_with_the_next_start(folder, caplog, monkeypatch):
    """What a kernel that is not deterministic does: the same inputs, and other sums."""
    stopped(folder, 4, at_once=4, optimizer=SGD, save_every=12)
    again = tiny.training(optimizer=SGD, folder=folder, save_every=12)
    agreed_on = again._agreed_on
    monkeypatch.setattr(again, "_agreed_on", lambda words: [each + b"!" for each in agreed_on(words)])
    with pytest.raises(RuntimeError, match=r"step=1: was released, but .* construct Training again with this folder"):
        tiny.trained(again, at_once=4)
    again.close()
    goes_on_after(tiny.training(optimizer=SGD, folder=folder, save_every=12, loss=other_loss), 4, caplog)


def test_a_second_thread_takes_no_part_in_a_step(folder):
    """Its sum would be of one step, and its noise of the next one."""
    loading, go_on = threading.Event(), threading.Event()
    x, y = tiny.data()

    def data(indices):
        if threading.current_thread().name == "first":
            loading.set()
            go_on.wait(30)
        return x[indices], y[indices]

    training = tiny.training(data=data, folder=folder)
    state = training.init(tiny.first_weights())
    first = threading.Thread(target=lambda: next(training.steps(state)), name="first")
    first.start()
    assert loading.wait(30)
    for other in (lambda: next(training.steps(state)), training.save):
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            other()
    go_on.set()
    first.join()
    assert training.steps_taken == 1
    training.close()


def test_a_constructor_that_fails_leaves_its_folder_to_others(folder, monkeypatch):
    def full(plan, path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as planted:
        planted.setattr(run_folder, "_keep_plan", full)
        with pytest.raises(OSError, match="No space") as kept:  # its traceback keeps what was constructed
            tiny.training(folder=folder)
    with tiny.training(folder=folder) as training:
        assert training.steps_taken == 0
    assert kept


def other_loss(weights, example):
    return tiny.loss(weights, (-example[0], example[1]))


def scaled_by(number):
    factors = jnp.full(1000, number)
    return lambda weights, example: factors[3] * tiny.loss(weights, example)


def test_a_checkpoint_holds_no_noise_and_no_key(folder):
    training = stopped(folder, 6, save_every=3)
    training = tiny.training(optimizer=ADAM, folder=folder, save_every=3)
    training.init(tiny.first_weights())
    history = np.asarray(training._held.noise.history["weight"])
    secrets = [training._opened.run_key.secret, history[0].tobytes(), np.asarray(training._secrets.noise).tobytes()]
    plain = np.asarray(training._held.trained["weight"]).tobytes()
    contents = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "key")
    assert np.abs(history).max() > 0
    assert not any(secret in contents for secret in secrets)
    training.close()
    kept = folder.parent / "plain"
    np.save(kept, history[0])
    assert secrets[1] in kept.with_suffix(".npy").read_bytes()  # the search finds what is there
    assert len(plain) == 20


def test_only_the_owner_can_read_a_run(folder):
    stopped(folder, 6, save_every=3)
    for path in [folder, folder / "checkpoints", folder / "key", folder / "ledger.jsonl"]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_changed_checkpoint_is_refused_before_it_is_read(folder):
    stopped(folder, 6, save_every=3)
    last = sorted((folder / "checkpoints").iterdir())[-1]
    for path in [path for path in last.rglob("*") if path.is_file() and path.stat().st_size > 3]:
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(ValueError, match="was changed after it was written"):
            stopped(folder, 6, save_every=3)
        path.write_bytes(before)


def test_a_checkpoint_is_whole_or_not_there(folder, expected, monkeypatch):
    def dies(*_):
        raise MemoryError

    with monkeypatch.context() as planted:
        planted.setattr(checkpoints, "publish", dies)
        with pytest.raises(MemoryError):
            stopped(folder, 6, save_every=3)
    np.testing.assert_array_equal(tiny.weights_of(optimizer=ADAM, folder=folder, save_every=3), expected)


def test_ctrl_c_waits_for_the_end_of_a_checkpoint(folder, expected, monkeypatch):
    """Threads of Orbax would go on writing where the next checkpoint is written."""
    training = tiny.training(optimizer=ADAM, folder=folder, save_every=8)
    tiny.trained(training, until=6)
    with monkeypatch.context() as planted:
        own = checkpoint._arrays
        planted.setattr(checkpoint, "_arrays", lambda held: (signal.raise_signal(signal.SIGINT), own(held))[1])
        with pytest.raises(KeyboardInterrupt):
            training.save()
    assert len(list((folder / "checkpoints").glob("[0-9]*"))) == 2  # of the start, and this one
    training.close()
    np.testing.assert_array_equal(tiny.weights_of(optimizer=ADAM, folder=folder, save_every=8), expected)


def test_the_last_two_are_kept_and_nothing_is_written_twice(folder):
    training = tiny.training(optimizer=ADAM, folder=folder, save_every=2)
    for _ in training.steps(training.init(tiny.first_weights())):
        assert training.save() == training.save()
    assert len(list((folder / "checkpoints").iterdir())) == 2
    training.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": optax.sgd(0.1)}, "is in the checkpoint but not in this run"),
        ({"weights": {**tiny.first_weights(), "more": jnp.zeros(2)}}, "is not in the checkpoint"),
        ({"weights": {**tiny.first_weights(), "bias": jnp.zeros(2)}}, "shape of"),
        ({"weights": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.first_weights())}, "dtype of"),
    ],
)
def test_another_model_or_optimizer_is_refused(folder, change, message):
    stopped(folder, 3, save_every=3)
    stopped(folder, 4, save_every=3)
    weights = change.pop("weights", None)
    again = tiny.training(**{"optimizer": ADAM, "folder": folder, "save_every": 3} | change)
    with pytest.raises(ValueError, match=message):
        again.init(tiny.first_weights() if weights is None else weights)
    again._let_go()


def test_a_folder_that_was_copied_is_another_run(folder, tmp_path):
    stopped(folder, 7, save_every=3)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with pytest.raises(ValueError, match="moved=None"):
        tiny.training(optimizer=ADAM, folder=copy)
    other = Training(tiny.loss, ADAM, tiny.data(), tiny.plan(), clip_norm=tiny.CLIP, folder=copy, moved="copied")
    state = other.init(tiny.first_weights())
    assert state.step == 0
    assert np.abs(tiny.flat(state.weights) - tiny.flat(tiny.first_weights())).max() > 0.01
    assert other.spent() == pytest.approx(tiny.plan().spent_after(7))
    other._let_go()


def test_two_objects_cannot_have_one_run(folder):
    one = tiny.training(folder=folder)
    with pytest.raises(RuntimeError):
        tiny.training(folder=folder)
    one.close()
    tiny.training(folder=folder).close()


def test_random_keys_in_the_state_of_an_optimizer_come_back(folder):
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    whole = tiny.weights_of(optimizer=noisy)
    tiny.trained(first := tiny.training(optimizer=noisy, folder=folder, save_every=4), until=6)
    first._let_go()
    np.testing.assert_array_equal(tiny.weights_of(optimizer=noisy, folder=folder, save_every=4), whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_a_run_that_a_signal_ended_goes_on_to_the_same_weights(tmp_path, number):
    done = children.run(HERE / "jax_killed_training.py", tmp_path, "signal", str(int(number)), timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"]
    if number == signal.SIGTERM:
        assert told["step"] > 0  # the step has ended, and a checkpoint was written
    np.testing.assert_array_equal(np.load(tmp_path / "killed.npy"), np.load(tmp_path / "clean.npy"))


@pytest.mark.long
def test_a_run_killed_many_times_is_the_run_that_was_not(tmp_path):
    done = children.run(HERE / "jax_killed_training.py", tmp_path, "places", "36", timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    kills = json.loads(done.stdout.splitlines()[-1])
    assert min(kills.values()) > 0
    assert sum(kills.values()) > 18
    for number in range(6):
        np.testing.assert_array_equal(np.load(tmp_path / f"killed{number}.npy"), np.load(tmp_path / "clean.npy"))
