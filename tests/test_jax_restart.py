"""run.save and run.restore: a run that was killed is the run that was not, and a checkpoint shows no noise."""

from __future__ import annotations

import json
import math
import stat
import subprocess
import sys
import warnings
from enum import IntEnum
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import children
import jax_training as tiny
from bandmf import Key
from bandmf.jax import Run
from bandmf.jax.privatize import private_states
from bandmf.ledger import checkpoints, seal
from children import HERE, devices, environment
from jax_training import STEPS, Training, data, flat, open_run
from sweeps import in_turn
from training import same_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def history(state):
    (private,) = private_states(state)
    return {name: np.asarray(vectors) for name, vectors in private.noise.history.items()}


def saved(folder, until=6, key=None, **more):
    """A run in this folder with a checkpoint after so many steps; its training and what was saved."""
    plan = tiny.plan(**more)
    run, training = open_run(plan, folder, key), Training(plan, optax.adam(0.1))
    weights, state = training.steps(run, *training.begin(), until=until)
    run.save((weights, state))
    run.close()
    return plan, training, weights, state


@pytest.mark.parametrize(("until", "bands"), in_turn([1, 5, 6, 11], [4, 9]))
def test_a_run_goes_on_where_its_checkpoint_was(tmp_path, until, bands):
    more = {"bands": bands, "batch_size": 6}
    with same_run():
        plan, training, weights, state = saved(tmp_path / "run", until, **more)
        expected = training.whole(open_run(plan))
    again = open_run(plan, tmp_path / "run")
    found, restored = again.restore(training.begin())
    np.testing.assert_array_equal(flat(found), flat(weights))
    for name, vectors in history(state).items():
        np.testing.assert_array_equal(history(restored)[name], vectors)
    assert again.steps_taken == until
    assert again.spent() == pytest.approx(plan.spent_after(until))
    found, _ = training.steps(again, found, restored)
    np.testing.assert_array_equal(flat(found), flat(expected))
    assert again.ledger.replays == 0


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_killed_many_times_is_the_run_that_was_not(kills, tmp_path):
    done = children.run(HERE / "jax_killed_training.py", tmp_path, str(kills), env=devices(1))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert sum(json.loads(done.stdout).values()) >= min(kills, 8)
    clean, killed = (np.load(tmp_path / kind / "final.npy") for kind in ("clean", "killed"))
    np.testing.assert_array_equal(clean, killed)


def test_without_a_checkpoint_the_beginning_is_returned(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    tree = training.begin()
    assert run.restore(tree) is tree
    assert run.steps_taken == 0


def test_a_restart_from_the_beginning_may_only_repeat(tmp_path):
    plan, training, *_ = saved(tmp_path)
    again = open_run(plan, tmp_path)
    training.steps(again, *training.begin(), until=3)
    assert again.ledger.replays == 3
    again.close()
    other, (weights, state) = open_run(plan, tmp_path), training.begin()
    moved = jax.tree.map(lambda leaf: leaf + 1, weights)
    with pytest.raises(ValueError, match="step=0: was released before with another sum"):
        training.steps(other, moved, state)


# --- what is on the disk ----------------------------------------------------------------------------------


def every_array(folder):
    """All arrays of a checkpoint, read without the key."""
    with ocp.StandardCheckpointer() as reader:
        return jax.tree.leaves(reader.restore((folder / "arrays").absolute()))


def shows(content, key):
    """Whether a key is there, as it is or as text."""
    return key.secret in content or key.secret.hex().encode() in content.lower()


def test_a_checkpoint_holds_the_noise_only_encrypted(tmp_path):
    given = Key(bytes(range(1, 33)))
    plan, _, weights, state = saved(tmp_path, key=given)
    (folder,) = seal.checkpoints(tmp_path / "checkpoints")
    arrays = [np.asarray(leaf) for leaf in every_array(folder)]
    assert any(np.array_equal(leaf, weights["weight"]) for leaf in arrays)  # the attack can read
    words = {
        int(word) for vectors in history(state).values() for word in vectors.reshape(-1).view(np.uint32)
    } - {0}
    found = {
        int(word) for leaf in arrays if leaf.dtype == np.float32 for word in leaf.reshape(-1).view(np.uint32)
    }
    assert len(words & found) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert shows(files.pop(tmp_path / "key"), given)  # where it is meant to be
    run = open_run(plan, tmp_path, given)
    contents = [*files.values(), *(leaf.tobytes() for leaf in arrays)]  # which are compressed in their files
    for secret in (given, run._key, run._key.derive("noise")):
        assert not any(shows(content, secret) for content in contents)


def test_every_checkpoint_is_encrypted_with_another_stream(tmp_path):
    """The same history twice, XORed, would show nothing but what changed; here it shows noise."""
    plan, training, _, state = saved(tmp_path)
    (folder,) = seal.checkpoints(tmp_path / "checkpoints")
    before = [np.asarray(leaf) for leaf in every_array(folder)]
    run = open_run(plan, tmp_path)
    tree = run.restore(training.begin())
    training.steps(run, *tree, until=7)
    run.close()
    again = open_run(plan, tmp_path)
    tree = again.restore(training.begin())
    again.save(tree)  # of the same step, as the ledger is longer
    after = [np.asarray(leaf) for leaf in every_array(seal.checkpoints(tmp_path / "checkpoints")[-1])]
    shapes = {vectors.shape for vectors in history(state).values()}
    pairs = [
        (a, b) for a, b in zip(before, after, strict=True) if a.shape in shapes and a.dtype == np.float32
    ]
    assert len(pairs) == 2
    assert all(np.mean(a.view(np.uint32) != b.view(np.uint32)) > 0.9 for a, b in pairs)


def test_only_the_owner_can_read_a_run(tmp_path):
    saved(tmp_path / "run")
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        if path.is_dir():
            continue
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or any(
            stat.S_IMODE(parent.stat().st_mode) & 0o077 == 0
            for parent in path.parents
            if tmp_path in parent.parents
        ), path


def test_a_changed_checkpoint_is_refused_before_it_is_read(tmp_path, monkeypatch):
    plan, training, *_ = saved(tmp_path)
    (folder,) = seal.checkpoints(tmp_path / "checkpoints")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    for name in ("_read", "_from_host"):
        monkeypatch.setattr(f"bandmf.jax.training.checkpoint.{name}", lambda *_: pytest.fail("was read"))
    # Of this module alone: the seal is read first.
    parser = SimpleNamespace(loads=lambda *_: pytest.fail("was read"))
    monkeypatch.setattr("bandmf.jax.training.checkpoint.json", parser)
    for path in files:
        contents = path.read_bytes()
        path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]) if contents else b"x")
        with pytest.raises(ValueError, match="was changed after it was written"):
            open_run(plan, tmp_path).restore(training.begin())
        path.write_bytes(contents)


def test_the_attack_works_on_a_checkpoint_without_a_seal(tmp_path, monkeypatch):
    """The planted fault: with verification off, a changed weight arrives."""
    plan, training, weights, _ = saved(tmp_path)
    (folder,) = seal.checkpoints(tmp_path / "checkpoints")
    with ocp.StandardCheckpointer() as orbax:
        place = (folder / "arrays").absolute()
        arrays = orbax.restore(place)
        (name,) = [name for name, leaf in arrays.items() if np.array_equal(leaf, weights["weight"])]
        orbax.save(place, {**arrays, name: arrays[name] + 1}, force=True)
    run = open_run(plan, tmp_path)
    with pytest.raises(ValueError, match="was changed after it was written"):
        run.restore(training.begin())
    monkeypatch.setattr(seal, "changed", lambda *_: [])
    found, _ = run.restore(training.begin())
    np.testing.assert_array_equal(found["weight"], weights["weight"] + 1)
    np.testing.assert_array_equal(found["bias"], weights["bias"])


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    tree = training.steps(run, *training.begin(), until=3)
    monkeypatch.setattr(checkpoints, "publish", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        run.save(tree)
    monkeypatch.undo()
    assert seal.checkpoints(tmp_path / "checkpoints") == []
    assert run.save(tree).exists()


def test_the_last_two_are_kept_and_nothing_is_written_twice(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    weights, state = training.begin()
    for until in range(1, 5):
        weights, state = training.steps(run, weights, state, until=until)
        assert run.save((weights, state)) == run.save((weights, state))
    assert len(seal.checkpoints(tmp_path / "checkpoints")) == 2


# --- what is refused --------------------------------------------------------------------------------------


def test_a_model_of_another_shape_is_refused(tmp_path):
    plan, training, *_ = saved(tmp_path)
    run = open_run(plan, tmp_path)
    weights = {"weight": jnp.zeros((1, 6)), "bias": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"shape of .*weight.*: the checkpoint has \(1, 5\)"):
        run.restore((weights, training.optimizer.init(weights)))
    with pytest.raises(ValueError, match="is not in the checkpoint"):
        run.restore({"weights": tiny.first_weights(), "state": training.begin()[1]})


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    tree = training.begin()
    next(run.batches(data()))
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        run.save(tree)


def test_a_run_without_a_folder_cannot_be_saved():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    with pytest.raises(ValueError, match="folder=None: give Run a folder"):
        run.save(training.begin())


def test_a_folder_that_was_copied_is_another_run(tmp_path):
    import shutil

    plan, training, weights, _ = saved(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(ValueError, match="was moved, copied or restored"):
        Run(plan, tmp_path / "copy")
    run = Run(plan, tmp_path / "copy", moved="copied")
    found, fresh = run.restore(training.begin())
    np.testing.assert_array_equal(flat(found), flat(weights))
    assert run.steps_taken == 0
    assert not any(vectors.any() for vectors in history(fresh).values())
    training.steps(run, found, fresh)
    assert run.spent() == pytest.approx(plan.spent_after(6) + plan.spent_after(STEPS))


def test_steps_are_withdrawn_as_soon_as_a_run_is_open(tmp_path):
    """Once the ledger said that it was closed, until something was restored."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    training.steps(run, *training.begin(), until=3)
    run.close()
    again = open_run(plan, tmp_path)
    again.ledger.withdraw(0, "a test, which nobody sees")
    x, y = data()
    training.steps(again, *training.begin(), until=2, data=(2 * x, y))
    assert again.steps_taken == 2


def test_a_restore_that_is_forgotten_is_warned_of(tmp_path):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    run.save(training.steps(run, *training.begin(), until=2))
    run.close()
    again = open_run(plan, tmp_path)
    with pytest.warns(UserWarning, match=r"has a checkpoint .*run\.restore was not called"):
        training.steps(again, *training.begin(), until=1)
    again.close()
    once_more = open_run(plan, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.steps(once_more, *once_more.restore(training.begin()), until=3)


def test_two_objects_cannot_have_one_run(tmp_path):
    plan = tiny.plan()
    first, training = open_run(plan, tmp_path), Training(plan)
    training.steps(first, *training.begin(), until=2)
    with pytest.raises(RuntimeError, match=r"this process has it open already.*close that one first"):
        open_run(plan, tmp_path)
    with first:
        pass
    open_run(plan, tmp_path).close()


def test_random_keys_and_numbers_in_the_tree_come_back(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    more = {"key": jax.random.key(3), "epoch": 7, "half": jnp.ones(3, jnp.bfloat16), "none": None}
    weights, state = training.begin()
    run.save((weights, state, more))
    run.close()
    again = open_run(plan, tmp_path)
    *_, found = again.restore((weights, state, {**more, "key": jax.random.key(0), "epoch": 0}))
    assert int(found["epoch"]) == 7
    assert found["none"] is None
    assert found["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(jax.random.uniform(key, 3) for key in (found["key"], more["key"])))


@pytest.mark.parametrize(
    "leaf", ["epoch 3", print, np.array(["a"]), np.array([None]), np.ma.masked_array([1.0])]
)
def test_what_is_no_number_is_refused(leaf, tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    with pytest.raises(ValueError, match=r"tree\[2\]='\w+': must be a number or an array of numbers"):
        run.save((*training.begin(), leaf))


class Phase(IntEnum):
    FIRST = 1
    SECOND = 2


HOST = {
    "tenth": 0.1, "large": 1e300, "nan": math.nan, "whole": 2**70, "truth": False, "complex": 0.1 - 1e-200j,
    "scalar": np.float64(1 / 3), "count": np.int64(5_000_000_000), "half": np.float16(0.1), "yes": np.bool_(True),
    "array": np.arange(6).reshape(2, 3) / 7, "unsigned": np.arange(3, dtype=np.uint64) + 2**63,
    "none": np.zeros((0, 2)),
    "brain": np.ones(3, jnp.bfloat16) / 3, "swapped": np.arange(3, dtype=">f8") / 7, "single": np.array(0.1),
    "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "phase": Phase.SECOND,
    "days": np.arange(3).astype("M8[D]"),
}  # fmt: skip


def test_numbers_of_the_host_come_back_to_the_last_bit(tmp_path):
    """Once they were rounded to 32 bits: half of the runs with a decaying learning rate could not be restarted."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save((*training.begin(), HOST))
    run.close()
    *_, found = open_run(chosen, tmp_path / "run").restore(
        (*training.begin(), {name: 0 * leaf if name not in ("phase", "days") else leaf for name, leaf in HOST.items()}
         | {"truth": True, "yes": np.bool_(False), "phase": Phase.FIRST})
    )  # fmt: skip
    for name, leaf in HOST.items():
        assert type(found[name]) is type(leaf), name
        np.testing.assert_array_equal(found[name], leaf, strict=name != "swapped")


def rates(decay, rate, steps):
    """As the float32 that programs get."""
    return np.array([np.float32(rate := rate * decay) for _ in range(steps)])


def test_a_learning_rate_that_decays_by_hand_is_restarted(tmp_path):
    """With a decay for which it matters that a saved rate is rounded to float32."""
    chosen = tiny.plan()
    training = Training(chosen)

    def shows(decay):
        exact = 10.0 * decay * decay * decay  # large, so that weights have the digits of their updates
        return (rates(decay, exact, STEPS - 3) != rates(decay, float(np.float32(exact)), STEPS - 3)).any()

    decay = next(filter(shows, np.linspace(0.9, 0.999, 100).tolist()))

    @jax.jit
    def update(total, weights, state, rate, secret):
        updates, state = training.optimizer.update(total, state, weights, secret=secret)
        return jax.tree.map(lambda leaf, move: leaf + rate * move, weights, updates), state

    def steps(run, weights, state, rate, save_at=None):
        for batch in run.batches(tiny.data()):
            weights, state = run.release(update, training.sum(batch, weights), weights, state, rate)
            rate *= decay
            if run.steps_taken == save_at:
                run.save((weights, state, rate))
        return weights

    run = open_run(chosen, tmp_path)
    end = steps(run, *training.begin(), 10.0, save_at=3)
    run.close()
    again = open_run(chosen, tmp_path)
    np.testing.assert_array_equal(flat(steps(again, *again.restore((*training.begin(), 1.0)))), flat(end))


@pytest.mark.parametrize("like", [(np.zeros(3), 0), (jnp.ones(3), jnp.float32(1))])
def test_what_was_an_array_of_jax_when_it_was_saved_is_one_again(like, tmp_path):
    """Weights may begin as numbers of NumPy or Python, and are arrays after the first step."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    count = jnp.int32(7) if like[1] == 0 else jnp.float32(7)
    run.save((*training.begin(), jnp.full(3, 2.0, jnp.float32), count))
    *_, weights, found = run.restore((*training.begin(), *like))
    assert [type(leaf) for leaf in (weights, found)] == [type(count)] * 2
    np.testing.assert_array_equal(weights, 2)
    assert found == 7


@pytest.mark.parametrize(
    ("saved", "given"), [(0.1, 1), (0.1, jnp.float32(1)), (np.ones(3), np.ones(3, np.float32))]
)
def test_a_number_of_another_type_than_was_saved_is_refused(saved, given, tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save((*training.begin(), saved))
    with pytest.raises(ValueError, match=r"^type of \[2\]=.*: the checkpoint has (Python's float|float64)"):
        run.restore((*training.begin(), given))


@pytest.mark.parametrize(
    ("saved", "given"), [(0.1, np.float64(1)), (np.float64(0.1), 1.0), (np.array(0.1), 1.0)]
)
def test_a_number_is_of_the_type_that_was_saved(saved, given, tmp_path):
    """One of NumPy has a type of its own in JAX, and one of Python takes that of what it meets."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save((*training.begin(), saved))
    *_, found = run.restore((*training.begin(), given))
    assert type(found) is type(saved)
    assert found == 0.1


def test_weak_types_that_jax_cannot_make_again_are_refused(tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    with jax.enable_x64(True):
        leaf = jnp.full(2, 0.1)
    assert leaf.weak_type
    with pytest.raises(ValueError, match=r"weak_type.*is not kept as it is.*leaf\.astype"):
        run.save((*training.begin(), leaf))


def test_weak_types_come_back_in_arrays_of_any_shape(tmp_path):
    """Once a vector that was weak came back as float32, and so were the updates of weights in bfloat16 after it."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    more = [jnp.full((2, 3), 0.37), jnp.asarray(0.37), jnp.full(4, 3), jnp.full(2, 1j), jnp.ones(3)]
    run.save((*training.begin(), more))
    *_, found = run.restore(
        (*training.begin(), jax.tree.map(lambda leaf: jnp.zeros_like(leaf, leaf.dtype), more))
    )
    assert [leaf.weak_type for leaf in found] == [True, True, True, True, False]
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), found, more)
    assert (jnp.ones((2, 3), jnp.bfloat16) * found[0]).dtype == jnp.bfloat16


def test_shapes_in_place_of_arrays_are_told_what_to_give(tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save(training.begin())
    weights, state = training.begin()
    for tree in (jax.eval_shape(training.begin), (jax.eval_shape(lambda: weights), state)):
        with pytest.raises(
            ValueError, match=r"'ShapeDtypeStruct': must be an array.*optimizer\.init\(weights\)"
        ):
            run.restore(tree)


def test_a_second_tree_at_the_step_that_was_restored_is_refused(tmp_path):
    """Once nothing was written, and nothing said."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save(training.steps(run, *training.begin(), until=3))
    run.close()
    again = open_run(chosen, tmp_path / "run")
    weights, state = again.restore(training.begin())
    again.save((weights, state))
    weights = jax.tree.map(lambda leaf: leaf * 0 + 7, weights)  # the old ones are gone
    for other in [(weights, state), (weights, state, 1)]:
        with pytest.raises(RuntimeError, match="step=3: was saved already, with another tree"):
            again.save(other)


def test_a_second_tree_at_the_same_step_is_refused(tmp_path):
    """Once it was dropped: a restored run had the weights where the average was saved last."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    weights, state = training.begin()
    run.save((weights, state))
    run.save((jax.tree.map(lambda leaf: leaf.copy(), weights), state))
    for other in [(jax.tree.map(lambda leaf: leaf + 1, weights), state), (weights, state, 1)]:
        with pytest.raises(RuntimeError, match="step=0: was saved already, with another tree"):
            run.save(other)


def test_a_second_number_at_the_same_step_is_refused(tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    weights, state = training.begin()
    run.save((weights, state, 1, np.zeros(3)))
    run.save((weights, state, 1, np.zeros(3)))
    for other in [(2, np.zeros(3)), (1, np.ones(3))]:
        with pytest.raises(RuntimeError, match="step=0: was saved already, with another tree"):
            run.save((weights, state, *other))


def test_numbers_come_back_as_what_they_were(tmp_path):
    """Once a rate of 0.1 came back as an array of float32, and weights in bfloat16 were float32 after the next step."""
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    more = {"rate": 0.1, "epoch": 7, "flag": True, "weak": jax.jit(lambda rate: rate * 1)(0.1)}
    run.save((*training.begin(), more))
    run.close()
    *_, found = open_run(chosen, tmp_path / "run").restore(
        (*training.begin(), {**more, "rate": 1.0, "epoch": 1})
    )
    assert (found["rate"], found["epoch"], found["flag"]) == (0.1, 7, True)
    assert [type(found[name]) for name in ("rate", "epoch", "flag")] == [float, int, bool]
    assert (jnp.ones(2, jnp.bfloat16) * found["weak"]).dtype == jnp.bfloat16


def test_a_tree_with_fewer_leaves_is_refused(tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    run.save((*training.begin(), {"average": jnp.ones(3), "seen": np.full(2, np.nan)}))
    with pytest.raises(ValueError, match=r"\[2\]\['average'\].*is in the checkpoint but not in the tree"):
        run.restore(training.begin())
    run.save((*training.begin(), {"average": np.ones(3, np.float32), "seen": np.full(2, np.nan)}))


def test_a_tree_of_other_types_is_refused(tmp_path):
    chosen = tiny.plan()
    run, training = open_run(chosen, tmp_path / "run"), Training(chosen)
    weights, state = training.begin()
    run.save((weights, state))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    with pytest.raises(ValueError, match=r"^dtype of .*='bfloat16': the checkpoint has float32"):
        run.restore((half, state))


def test_a_run_can_go_back_to_its_checkpoint_in_the_same_process(tmp_path):
    plan = tiny.plan(bands=9, batch_size=6)
    run, training = open_run(plan, tmp_path), Training(plan)
    tree = training.steps(run, *training.begin(), until=5)
    run.save(tree)
    end = training.steps(run, *tree)
    for template in (end, training.begin()):
        again = run.restore(template)
        assert run.steps_taken == 5
        np.testing.assert_array_equal(flat(training.steps(run, *again)[0]), flat(end[0]))


ODD = {
    "another order of bytes": np.arange(3).astype(">i4"),
    "a truth that was computed": jnp.asarray(1.0) > 0,
}


@pytest.mark.parametrize("kind", ODD)
def test_leaves_that_have_no_twin_in_jax_are_saved_and_restored(tmp_path, kind):
    chosen = tiny.plan()
    training = Training(chosen)
    leaf, run = ODD[kind], open_run(chosen, tmp_path / "run")
    run.save((*training.begin(), leaf))
    run.close()
    *_, found = open_run(chosen, tmp_path / "run").restore((*training.begin(), leaf))
    np.testing.assert_array_equal(found, leaf)
    assert np.asarray(found).dtype == np.asarray(leaf).dtype.newbyteorder("=")


def test_a_state_that_was_taken_from_its_devices_is_refused_before_anything_is_written(tmp_path):
    chosen = tiny.plan()
    training = Training(chosen)
    run = open_run(chosen, tmp_path / "run")
    with pytest.raises(ValueError, match=r"tree='noise as ndarray': .*without jax\.device_get"):
        run.save(jax.device_get(training.begin()))
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_arrays_on_several_devices_are_saved_and_compared(tmp_path):
    """Two virtual devices: one program cannot take arrays that are bound to different ones."""
    code = """if True:
        import jax, numpy as np, pytest, sys
        import jax_training as tiny
        first, second = jax.devices()
        chosen = tiny.plan()
        run, training = tiny.open_run(chosen, sys.argv[1]), tiny.Training(chosen)
        more = [jax.device_put(np.ones(3, np.float32), device) for device in (first, second)]
        for order in ((first, second), (second, first)):
            mesh = jax.sharding.Mesh(np.array(order), ("d",))
            spec = jax.sharding.PartitionSpec("d")
            more.append(jax.device_put(np.ones(4, np.float32), jax.sharding.NamedSharding(mesh, spec)))
        host = jax.sharding.SingleDeviceSharding(first, memory_kind="pinned_host")
        more.append(jax.device_put(np.ones(3, np.float32), host))
        for leaves in (more, [more[1], more[0], *more[2:]], jax.device_get(more)):
            run.save((*training.begin(), leaves))
        with pytest.raises(RuntimeError, match="was saved already, with another tree"):
            run.save((*training.begin(), [more[0], 2 * more[1], *more[2:]]))
        *_, found = run.restore((*training.begin(), more))
        assert [leaf.devices() for leaf in found[:2]] == [{first}, {second}]
        """
    flags = environment(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    subprocess.run([sys.executable, "-c", code, tmp_path / "run"], env=flags, check=True)
