"""Noise that is drawn twice in a chunk, or taken off by what is done to the state between two steps, in JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_training as tiny
from bandmf.jax.noise import native_executor
from bandmf.jax.privatize import PrivateState, private_states
from bandmf.ledger.file import LockedLines
from children import environment
from jax_training import STEPS, Training, data, flat, open_run
from training import same_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

# --- one noise for each step of a chunk -----------------------------------------------------------------------


class Jitted(Training):
    """As in the docs: advance calls a jitted update, whose trace JAX keeps."""

    def advance(self, rows, weights, state, secret):
        total = self.gradient(weights, rows.data, mask=rows.mask)
        return self.update(total, weights, state, secret=secret)

    def chunks(self, run, weights, state, steps, until=STEPS, **loading):
        for chunk in run.chunks(data(), steps=steps, **loading):
            weights, state = run.release_chunk(self.advance, chunk, weights, state)
            if run.steps_taken >= until:
                break
        return weights, state


def twice(training):
    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)
        nothing = jax.tree.map(jnp.zeros_like, total)
        other, _ = training.update(nothing, weights, state, secret=secret)
        weights, state = training.update(total, weights, state, secret=secret)
        return jax.tree.map(jnp.subtract, weights, other), state  # the sum without noise

    return advance


def sharpness_aware(training):
    def advance(rows, weights, state, secret):
        ahead, _ = training.advance(rows, weights, state, secret)
        total = training.gradient(ahead, rows.data, mask=rows.mask)
        return training.update(total, weights, state, secret=secret)

    return advance


def mapped(training):
    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, 0 * leaf]), total)
        found = jax.lax.map(lambda one: training.update(one, weights, state, secret=secret), both)
        return jax.tree.map(lambda leaf: leaf[0], found)

    return advance


def mapped_by_vmap(training):
    """A jitted update does not see it: inside, everything has the shapes of one."""

    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, 0 * leaf]), total)
        found = jax.vmap(lambda one: training.update(one, weights, state, secret=secret))(both)
        return jax.tree.map(lambda leaf: leaf[0], found)

    return advance


def over_devices(training):
    """Each of which could have a sum of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec()

    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)
        return jax.shard_map(training.update, mesh=mesh, in_specs=spec, out_specs=spec)(
            total, weights, state, secret
        )

    return advance


def repeated(training):
    def advance(rows, weights, state, secret):
        def body(_, now):
            return training.advance(rows, weights, state, secret)[0], now[1]

        return jax.lax.while_loop(lambda now: False, lambda now: body(0, now), (weights, state))

    return advance


def sometimes(training):
    def advance(rows, weights, state, secret):
        def step():
            return training.advance(rows, weights, state, secret)

        return jax.lax.cond(rows.mask.sum() > 3, step, lambda: (weights, state))

    return advance


def mapped_over_steps(training):
    """One sum, with the noise of this step and of the next one."""

    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)
        steps = jnp.arange(2, dtype=jnp.int32)

        def at(step):
            noise = replace(state[0].noise, step=state[0].noise.step + step)
            moved = replace(state[0], noise=noise), *state[1:]
            return training.update(total, weights, moved, secret=secret.at(secret.step + step))

        return jax.tree.map(lambda leaf: leaf[0], jax.vmap(at)(steps))

    return advance


def never(training):
    return lambda rows, weights, state, secret: (weights, state)


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (twice, "used privatize 2 times"),
        (sharpness_aware, "used privatize 2 times"),
        (mapped, "used privatize inside scan"),
        (over_devices, "used privatize inside shard_map"),
        (repeated, "used privatize inside while"),
        (sometimes, r"used privatize \[0, 1\] times in the branches"),
        (never, "privatize was not found in it"),
    ],
)
def test_a_step_of_a_chunk_has_one_noise_though_its_update_is_jitted(attack, sentence):
    training, before = Jitted(tiny.plan()), open_run(tiny.plan())
    training.chunks(before, *training.begin(), steps=1, until=1)  # so that it was traced already
    check_refused(training, attack, sentence)


@pytest.mark.parametrize("native", [True, False])
def test_a_step_of_a_chunk_is_not_mapped(native, monkeypatch):
    """Over its sums, nor over its steps: there one sum would get the noise of another step too."""
    if not native:
        monkeypatch.setattr(native_executor, "registered", lambda: False)
    for attack in (mapped_by_vmap, mapped_over_steps):
        check_refused(Jitted(tiny.plan()), attack, "inside jax.vmap several sums would get the same noise")


def check_refused(training, attack, sentence):
    run = open_run(tiny.plan())
    with pytest.raises(ValueError, match=sentence):
        run.release_chunk(attack(training), next(run.chunks(data(), steps=1)), *training.begin())
    assert run.ledger.steps_spent == 0


def test_a_choice_between_two_updates_is_one_noise():
    plan = tiny.plan()
    training, run = Jitted(plan), open_run(plan)

    def advance(rows, weights, state, secret):
        total = training.gradient(weights, rows.data, mask=rows.mask)

        def step():
            return training.update(total, weights, state, secret=secret)

        return jax.lax.cond(weights["bias"][0] > 0, step, step)

    run.release_chunk(advance, next(run.chunks(data(), steps=3)), *training.begin())
    assert run.steps_taken == 3


def test_right_programs_are_not_refused(tmp_path):
    """A shorter last chunk, another run with the same functions, a larger batch, and a restart."""
    plan = tiny.plan()
    with same_run():
        one, two, three, four = (open_run(plan, folder) for folder in (None, None, None, tmp_path))
    training = Jitted(plan)
    expected = flat(training.chunks(one, *training.begin(), steps=8)[0])
    training.chunks(two, *training.begin(), steps=8, until=8)
    training.chunks(three, *training.begin(), steps=4, until=8, capacity=12)
    assert {two.steps_taken, three.steps_taken} == {8}
    four.save(training.chunks(four, *training.begin(), steps=8, until=8))
    four.close()
    again = open_run(plan, tmp_path)
    end = training.chunks(again, *again.restore(training.begin()), steps=8)[0]
    np.testing.assert_array_equal(flat(end), expected)


# --- the state between two steps ------------------------------------------------------------------------------


def floats(change):
    return lambda state: jax.tree.map(lambda leaf: change(leaf) if leaf.dtype == jnp.float32 else leaf, state)


def of_noise(change):
    """What changes the noise of a state alone."""

    def changed(state):
        return jax.tree.map(
            lambda node: replace(node, noise=change(node.noise)) if isinstance(node, PrivateState) else node,
            state, is_leaf=lambda node: isinstance(node, PrivateState),
        )  # fmt: skip

    return changed


CHANGES = {
    "momentum reset": floats(jnp.zeros_like),
    "momentum damped": floats(lambda leaf: 0.5 * leaf),
    "history": of_noise(lambda noise: replace(noise, history=jax.tree.map(jnp.zeros_like, noise.history))),
    "prepared": of_noise(
        lambda noise: replace(noise, prepared=jax.tree.map(lambda leaf: leaf + 1, noise.prepared))
    ),
    "coefficients": of_noise(
        lambda noise: replace(noise, coefficients=jax.tree.map(jnp.zeros_like, noise.coefficients))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_noise_that_was_changed_between_two_steps_is_refused(change):
    plan = tiny.plan(bands=9, batch_size=6)  # with look-ahead, and so with sums that are prepared
    training, run = Training(plan, optax.sgd(0.5, momentum=0.9)), open_run(plan)
    weights, state = training.steps(run, *training.begin(), until=3)
    with pytest.raises(ValueError, match="its noise is not as the last step left it"):
        training.steps(run, weights, CHANGES[change](state))
    assert run.ledger.steps_spent == 3
    reset = state[0], *CHANGES["momentum reset"](state[1:])
    training.steps(run, weights, reset)  # of other transformations it is nobody's business
    assert run.finished


def test_noise_that_was_changed_is_not_made_right_by_restore(tmp_path):
    """Where nothing was saved, restore returns the tree that it is given."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    weights, state = training.steps(run, *run.restore(training.begin()), until=2)
    with pytest.raises(ValueError, match="its noise is not as the last step left it"):
        run.restore((weights, CHANGES["history"](state)))
    weights, state = training.steps(run, *run.restore((weights, state)), until=3)
    assert run.steps_taken == run.ledger.steps_spent == 3


def test_coefficients_that_were_changed_are_not_kept_by_restore(tmp_path):
    """No checkpoint has them: restore leaves those of the tree that it is given."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    with pytest.raises(ValueError, match="its coefficients are not those of the plan"):
        run.restore((tiny.first_weights(), CHANGES["coefficients"](training.begin()[1])))
    weights, state = training.steps(run, *training.begin(), until=2)
    run.save((weights, state))
    for change in ("momentum reset", "coefficients"):
        with pytest.raises(ValueError, match="its coefficients are not those of the plan"):
            run.restore((weights, CHANGES[change](state)))
    weights, _ = training.steps(run, *run.restore((weights, CHANGES["history"](state))), until=3)
    assert np.isfinite(flat(weights)).all()


@pytest.mark.parametrize("change", ["momentum reset", "momentum damped", "coefficients"])
def test_without_the_host_other_coefficients_give_nan(change):
    """The planted fault: nobody compares arrays, and the program itself notices."""
    plan = tiny.plan()
    training, run = Training(plan, optax.sgd(0.5, momentum=0.9)), open_run(plan)
    weights, state = training.steps(run, *training.begin(), until=2)
    run._noise.remember(None)
    weights, _ = training.steps(run, weights, CHANGES[change](state), until=3)
    assert np.isnan(flat(weights)).all()


def test_a_state_that_was_moved_is_accepted_though_nobody_kept_the_old_one():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    tree = training.steps(run, *training.begin(), until=2)
    tree = jax.tree.map(jnp.copy, tree)
    training.steps(run, *tree)
    assert run.finished


def test_a_state_that_is_returned_twice_is_compared_all_the_same():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.steps(run, *training.begin(), until=2)
    run._noise.remember((weights, state, state))  # what release does with the result of such an update
    with pytest.raises(ValueError, match="its noise is not as the last step left it"):
        training.steps(run, weights, CHANGES["history"](state), until=3)


def test_a_state_that_was_copied_is_compared():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.steps(run, *training.begin(), until=2)
    copied = jax.tree.map(jnp.copy, state)
    weights, after = training.steps(run, weights, copied, until=3)
    assert run.steps_taken == 3
    elsewhere = jax.tree.map(jnp.copy, after)
    for leaf in jax.tree.leaves(private_states(after)[0].noise.history):
        leaf.delete()  # as if it had been donated: there is nothing to compare with
    with pytest.raises(ValueError, match="its noise is not as the last step left it"):
        training.steps(run, weights, elsewhere)


# --- what comes between -----------------------------------------------------------------------------------------


def test_steps_count_as_spent_after_an_interrupted_ledger(monkeypatch, tmp_path):
    plan = tiny.plan(bands=1)
    training, run = Training(plan), open_run(plan, tmp_path)
    weights, state = training.steps(run, *training.begin(), until=2)
    monkeypatch.setattr("bandmf.ledger.Ledger._apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training.steps(run, weights, state)
    monkeypatch.undo()
    run.close()
    assert run.spent() == open_run(plan, tmp_path).spent() == pytest.approx(plan.spent_after(3))


def test_a_refused_step_is_not_spent(monkeypatch):
    plan = tiny.plan(bands=1)
    training, run = Training(plan), open_run(plan)
    weights, state = training.steps(run, *training.begin(), until=2)
    monkeypatch.setattr("bandmf.ledger.Ledger._append", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        training.steps(run, weights, state)
    assert run.spent() == pytest.approx(plan.spent_after(2))


def test_half_a_line_that_cannot_be_taken_off_goes_with_the_next(tmp_path, monkeypatch):
    lines = LockedLines(tmp_path / "ledger")
    lines.create(lambda place: b"first")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:3]))
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError("no")))
    for _ in range(2):  # as long as it cannot be taken off, nothing is written
        with pytest.raises(OSError, match="no"):
            lines.append(b"second")
    monkeypatch.undo()
    lines.append(b"third")
    lines.close()
    assert (tmp_path / "ledger").read_bytes() == b"first\nthird\n"


def test_going_back_says_what_to_do(tmp_path):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    tree = training.steps(run, *training.begin(), until=2)
    with pytest.raises(
        ValueError, match=r"state\.step=0: nothing was saved yet, and this run has taken 2 steps"
    ):
        run.restore(training.begin())
    assert run.restore(tree) is tree
    tree = training.steps(run, *tree, until=3)
    run.save(tree)
    batches = run.batches(data())
    run.release(training.update, training.sum(next(batches), tree[0]), *tree)
    run.restore(tree)
    with pytest.raises(RuntimeError, match=r"run\.restore went back in the middle of a pass"):
        next(batches)


def test_a_release_inside_of_jit_is_refused():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    batch = next(run.batches(data()))
    with pytest.raises(RuntimeError, match=r"run\.release stays outside of jit"):
        jax.jit(
            lambda weights, state: run.release(training.update, training.sum(batch, weights), weights, state)
        )(*training.begin())


def test_a_secret_that_is_donated_is_not_missed(monkeypatch):
    monkeypatch.setattr("bandmf.ledger._fresh_run_id", lambda: "00" * 16)
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    expected = flat(training.whole(open_run(plan)))
    training.update = jax.jit(training._update, donate_argnames="secret")
    np.testing.assert_array_equal(flat(training.whole(run)), expected)


def test_a_secret_that_would_be_a_constant_of_a_program_is_refused():
    """Where the sum, or everything, is closed over, the key was in the text of the program, and so on the disk."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    batch = next(run.batches(data()))

    def over_weights(total, weights, state, secret):
        return jax.jit(lambda *given: training._update(total, *given, secret))(weights, state)

    def over_nothing(total, weights, state, secret):
        return jax.jit(lambda: training._update(total, weights, state, secret))()

    def over_all_but_the_secret(total, weights, state, secret):
        return jax.jit(lambda *given: training._update(*given, secret))(total, weights, state)

    def passed_on(total, weights, state, secret):
        return jax.jit(lambda *given: training.update(*given, secret))(total, weights, state)

    def copied(total, weights, state, secret):
        return jax.jit(lambda *given: training._update(*given, jax.tree.map(jnp.copy, secret)))(
            total, weights, state
        )

    def checkpointed(total, weights, state, secret):
        return jax.jit(lambda *given: jax.checkpoint(training._update)(*given, secret))(total, weights, state)

    total = training.sum(batch, weights)
    for update in (over_weights, over_nothing, over_all_but_the_secret, passed_on, copied, checkpointed):
        with pytest.raises(ValueError, match="secret: would become a constant of the compiled program"):
            run.release(update, total, weights, state)
    assert np.isfinite(flat(run.release(training._update, total, weights, state)[0])).all()  # without jit


def test_a_secret_may_be_passed_on_by_what_is_traced():
    """Specs and shapes in its place are no key, and nnx.jit takes its arguments apart."""
    nnx, plan = pytest.importorskip("flax.nnx"), tiny.plan()
    training, run = Training(plan), open_run(plan)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def cut(total, weights, state, secret):
        given = total, weights, state, secret
        specs = jax.tree.map(lambda leaf: jax.sharding.PartitionSpec(), given)
        jax.eval_shape(
            training._update, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
        )
        assert len(jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype, given))) > 5
        place = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
        return training._update(*jax.lax.with_sharding_constraint(given, place))

    weights, state = training.begin()
    for batch, update in zip(run.batches(data()), (nnx.jit(training._update), jax.jit(cut)), strict=False):
        weights, state = run.release(update, training.sum(batch, weights), weights, state)
        assert np.isfinite(flat(weights)).all()


def test_a_first_import_inside_of_jit_changes_nothing():
    code = (
        "import jax\n"
        "jax.jit(lambda x: __import__('bandmf.jax').jax and x)(1.0)\n"
        "from jax_training import Training, open_run, plan\n"
        "Training(plan()).whole(open_run(plan()))\n"
        "print('trained')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "trained", done.stderr[-2000:]


@pytest.mark.parametrize("jitted", [False, True])
def test_a_secret_that_is_returned_or_saved_is_refused(jitted, tmp_path):
    """Once all bytes of the noise key were in the files of a checkpoint."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    weights, state = training.begin()

    def update(total, weights, state, secret):
        return *training._update(total, weights, state, secret), secret

    batch = next(run.batches(data()))
    with pytest.raises(ValueError, match=r"secret: is (among what the update returns|in what is returned)"):
        run.release(jax.jit(update) if jitted else update, training.sum(batch, weights), weights, state)
    again = open_run(plan)
    weights, state = training.steps(again, *training.begin(), until=1)
    with pytest.raises(ValueError, match="secret: is among what the update returns, or in the tree to save"):
        again.save((weights, state, again._secrets.of_step(plan, 0)))
    with pytest.raises(ValueError, match="tree: holds the noise key of the run"):
        again.save((weights, state, again._secrets.of_step(plan, 0).noise_key))
