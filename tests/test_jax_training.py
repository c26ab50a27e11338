"""bandmf.jax.Run, privatize and batches: the training that PyTorch does, and what its promises rest on."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import bandmf
import bandmf.torch
import jax_training as tiny
from bandmf import Key
from bandmf.jax import Clipped, Run, Secret, clipped_gradient, privatize
from bandmf.jax.privatize import private_states
from bandmf.noise import NumpyEngine
from jax_training import CLIP, EXAMPLES, STEPS, Training, data, first_weights, flat, open_run
from sweeps import some_long
from training import same_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PLANS = {
    "cyclic Poisson": {},
    "look-ahead": {"bands": 9, "batch_size": 6},
    "independent": {"bands": 1},
    "b-min-sep": {"sampling": "b-min-sep", "bands": 3},
    "bins, BLT": {"sampling": "balls-in-bins", "mechanism": "blt", "bands": None},
    "bins, inverse": {"sampling": "balls-in-bins", "mechanism": "banded-inverse", "bands": None},
}


def with_torch(plan):
    """The same training in PyTorch."""
    model = torch.nn.Linear(5, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(first_weights()[name])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    examples = torch.utils.data.TensorDataset(*map(torch.from_numpy, data()))
    private = bandmf.torch.make_private(
        model, optimizer, examples, plan, clip_norm=CLIP, key=Key(bytes(32)), epoch_steps=STEPS
    )
    for x, y in private.loader:
        torch.nn.functional.mse_loss(private.model(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", PLANS)
def test_the_trajectory_is_that_of_pytorch(kind):
    plan = tiny.plan(**PLANS[kind])
    with same_run():
        expected, run = with_torch(plan), open_run(plan)
    training = Training(plan)
    found = training.whole(run)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=2e-5, atol=2e-6)
    assert run.finished
    assert run.spent() == pytest.approx(plan.spent_after(STEPS))
    assert training.update._cache_size() == 1  # one program, and none after the first step
    assert training.gradient._cache_size() == 1


def check_steps(run):
    """Train, and compare every step with the oracle's noise."""
    plan, training = run.plan, Training(run.plan)
    engine = NumpyEngine(plan.strategy, run._key)
    noise = engine.init({name: leaf.shape for name, leaf in first_weights().items()})
    weights, state = training.begin()
    for batch in run.batches(data()):
        total = training.sum(batch, weights)
        before = {name: np.array(leaf) for name, leaf in weights.items()}
        sums = {name: np.array(leaf) for name, leaf in total.total.items()}
        noise = engine.add(noise, sums, CLIP * plan.noise_scale)
        weights, state = run.release(training.update, total, weights, state)
        for name, leaf in sums.items():
            np.testing.assert_allclose(weights[name], before[name] - 0.5 * leaf / plan.batch_size, atol=1e-6)


def test_a_step_releases_the_sum_and_the_noise_over_the_planned_size():
    check_steps(open_run(tiny.plan()))


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 5, 12, 60])
def test_pieces_hold_every_example_of_a_batch_once(capacity):
    plan = tiny.plan()
    run, x = open_run(plan), np.arange(1, EXAMPLES + 1, dtype=np.int32)
    training = Training(plan)
    weights, state = training.begin()
    shapes = set()
    for batch in run.batches((x, *data()), capacity=capacity):
        kept = []
        for rows in batch:
            shapes.add(rows.data[0].shape)
            mask = np.asarray(rows.mask)
            kept += np.asarray(rows.data[0])[mask].tolist()
            assert not np.asarray(rows.data[0])[~mask].any()
        assert [index - 1 for index in kept] == run._sampler.batch(batch.step).tolist()
        total = batch.sum(lambda rows, mask, w=weights: training.gradient(w, rows[1:], mask=mask))
        weights, state = run.release(training.update, total, weights, state)
    assert shapes == {(capacity,)}  # one shape, whatever the batch
    assert training.gradient._cache_size() == 1


def test_capacity_changes_nothing_but_rounding():
    plan = tiny.plan()
    with same_run():
        runs = [open_run(plan) for _ in range(3)]
    usual, small, by_function = (Training(plan) for _ in runs)
    expected = flat(usual.whole(runs[0]))
    np.testing.assert_allclose(flat(small.whole(runs[1], capacity=4)), expected, atol=1e-6)
    x, y = data()
    found = by_function.whole(runs[2], data=lambda indices: (x[indices], y[indices]))
    np.testing.assert_array_equal(flat(found), expected)


def with_aux(weights, example):
    return jnp.sum(weights * example), {"large": example[0] > 0}


def test_what_single_examples_gave_has_the_rows_of_all_pieces():
    x = data()[0]
    gradient = jax.jit(clipped_gradient(with_aux, clip_norm=CLIP, has_aux=True))
    with same_run():
        batch = next(open_run(tiny.plan()).batches(x, capacity=4))
    members = x[batch._indices]
    assert len(members) > 4  # or there is one piece
    total, seen = batch.sum(partial(gradient, jnp.ones(5)))
    np.testing.assert_allclose(seen.norms[: len(members)], np.linalg.norm(members, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(seen.aux["large"][: len(members)], members[:, 0] > 0)
    assert len(seen.values) % 4 == 0
    whole = gradient(jnp.ones(5), members)[0]
    np.testing.assert_allclose(total.total, whole.total, atol=1e-5)


@pytest.mark.parametrize("capacity", [4, 60])
def test_what_cannot_be_added_up_is_refused_whatever_the_size_of_the_batch(capacity):
    gradient = jax.jit(clipped_gradient(with_aux, clip_norm=CLIP, has_aux=True))
    batch = next(open_run(tiny.plan()).batches(data()[0], capacity=capacity))

    def beside(what):
        return lambda rows, mask: (gradient(jnp.ones(5), rows, mask=mask)[0], what(rows))

    with pytest.raises(ValueError, match=r"dtype in the result='bool': batch\.sum adds up numbers only"):
        batch.sum(beside(lambda rows: jnp.any(rows > 0)))
    with pytest.raises(ValueError, match=f"shape in the result=\\({capacity},\\): has an entry for each"):
        batch.sum(beside(lambda rows: rows[:, 0]))
    assert batch.sum(beside(lambda rows: len(rows)))[1] % capacity == 0


def test_random_keys_may_be_part_of_the_examples():
    """One for each, and no number: rows that no example fills have a key of zeros."""
    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    batch = next(open_run(tiny.plan()).batches((*data(), keys)))
    (rows,) = batch
    members = jax.random.key_data(keys)[batch._indices]
    np.testing.assert_array_equal(jax.random.key_data(rows.data[2])[: len(members)], members)
    assert not np.asarray(jax.random.key_data(rows.data[2]))[len(members) :].any()


def test_parameters_may_be_trees_of_other_libraries():
    """With a layer that has none, and a Python number."""
    plan, weights = tiny.plan(), [(jnp.ones((5, 1)), jnp.zeros(1)), (), 1.0]

    def squared(weights, x):
        return jnp.sum((x @ weights[0][0] + weights[0][1]) ** 2) * weights[2]

    gradient = jax.jit(clipped_gradient(squared, clip_norm=CLIP))
    optimizer, run = optax.chain(privatize(plan, clip_norm=CLIP), optax.sgd(0.1)), open_run(plan)
    state = optimizer.init(weights)

    @jax.jit
    def update(total, weights, state, secret):
        updates, state = optimizer.update(total, state, weights, secret=secret)
        return optax.apply_updates(weights, updates), state

    for batch in run.batches(data()[0]):
        weights, state = run.release(update, batch.sum(partial(gradient, weights)), weights, state)
        if run.steps_taken == 2:
            break
    assert np.isfinite(flat(weights)).all()


def test_parameters_of_one_name_are_refused():
    twice = {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"name of a parameter='a\.b': there are two.*rename one"):
        privatize(tiny.plan(), clip_norm=CLIP).init(twice)


def test_an_empty_batch_is_a_step_like_any_other():
    plan = bandmf.plan(
        epsilon=8, delta=1e-5, examples=EXAMPLES, batch_size=0.5, steps=8, bands=1, sampling="cyclic-poisson"
    )
    with same_run():
        run = open_run(plan)
    assert {len(run._sampler.batch(i)) for i in range(8)} > {0}  # and others
    check_steps(run)
    assert run.spent() == pytest.approx(plan.spent_after(8))


def test_data_of_another_size_are_refused():
    run = open_run(tiny.plan())
    x, y = data()
    with pytest.raises(ValueError, match=r"len\(data\)=59: must be the plan's examples=60"):
        next(run.batches((x[:-1], y[:-1])))
    with pytest.raises(ValueError, match="one row for each"):
        next(iter(next(run.batches(lambda indices: x[:2]))))


# --- what is refused --------------------------------------------------------------------------------------


def test_a_batch_that_is_skipped_is_an_error():
    run = open_run(tiny.plan())
    batches = run.batches(data())
    next(batches)
    with pytest.raises(RuntimeError, match="batch of step 0 was skipped"):
        next(batches)


def test_a_second_pass_ends_the_first():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    first, second = run.batches(data()), run.batches(data())
    next(first)
    batch, (weights, state) = next(second), training.begin()
    run.release(training.update, training.sum(batch, weights), weights, state)
    with pytest.raises(RuntimeError, match="another pass"):
        next(first)


def test_a_release_without_a_batch_is_refused():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    batch = next(run.batches(data()))
    total = training.sum(batch, weights)
    run.release(training.update, total, weights, state)
    with pytest.raises(RuntimeError, match="there is no batch"):
        run.release(training.update, total, weights, state)


def drops_updates(inner):
    """What optax.apply_if_finite does with an update that overflows: the state before it is kept."""
    calls = [0]

    def update(updates, state, params=None, **more):
        new, after = inner.update(updates, state, params, **more)
        calls[0] += 1
        return new, (state if calls[0] == 2 else after)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def test_a_state_that_was_kept_back_gets_no_second_noise_of_its_step():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan, wrap=drops_updates)
    training.update = training._update  # not compiled, as the wrapper counts calls
    with pytest.raises(
        ValueError, match=r"state\.step=(\d): the run is at step (?!\1)\d: .*an update was dropped"
    ):
        training.whole(run)


def test_apply_if_finite_around_it_reuses_no_noise():
    """It wants back what it is given, and privatize takes a Clipped apart: it cannot be around it at all."""
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan, wrap=lambda inner: optax.apply_if_finite(inner, 99))
    with pytest.raises(ValueError, match=r"Clipped.*nothing around it.*apply_if_finite"):
        training.whole(run)


def secret_of(run, step, total):
    return run._secrets.of_step(run.plan, step, run._secrets.examined(total)[0])


def test_without_the_host_the_noise_of_another_step_is_nan():
    """The same guard in compiled code: whoever calls the update with an old state and a new secret gets no noise."""
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    total = training.sum(next(run.batches(data())), weights)
    for step, finite in ((0, True), (1, False)):
        new, _ = training.update(total, weights, state, secret=secret_of(run, step, total))
        assert np.isfinite(flat(new)).all() == finite
    other = open_run(plan)
    new, state = training.update(total, weights, state, secret=secret_of(run, 0, total))
    new, _ = training.update(total, new, state, secret=secret_of(other, 1, total))
    assert np.isnan(flat(new)).all()


def test_a_step_past_the_plan_has_no_noise():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.steps(run, *training.begin())
    total = Clipped(jax.tree.map(jnp.zeros_like, weights), CLIP)
    new, _ = training.update(total, weights, state, secret=secret_of(run, STEPS, total))
    assert np.isnan(flat(new)).all()
    assert list(run.batches(data())) == []


def test_a_state_of_another_run_is_refused():
    plan = tiny.plan()
    one, two, training = open_run(plan), open_run(plan), Training(plan)
    weights, state = training.steps(one, *training.begin(), until=2)
    training.steps(two, *training.begin(), until=2)
    with pytest.raises(ValueError, match="belongs to another run"):
        training.steps(two, weights, state)


def test_two_noises_that_would_be_equal_are_refused():
    """Two privatize in one optimizer would draw the same z for different parameters."""
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    total = training.sum(next(run.batches(data())), weights)
    with pytest.raises(ValueError, match="privatize=2: must be used once"):
        run.release(training.update, total, weights, (state, state))
    with pytest.raises(ValueError, match="privatize=0: must be used once"):
        run.release(training.update, total, weights, ())


def test_a_sum_clipped_to_another_norm_is_refused():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    gradient = clipped_gradient(tiny.loss, clip_norm=10 * CLIP)
    total = next(run.batches(data())).sum(lambda rows, mask: gradient(weights, rows, mask=mask))
    with pytest.raises(ValueError, match=r"clip_norm=0\.5: the gradients were clipped to 5\.0"):
        run.release(training.update, total, weights, state)


def test_a_privatize_of_another_plan_is_refused():
    run, training = open_run(tiny.plan()), Training(tiny.plan(bands=2))
    with pytest.raises(ValueError, match="the run has the plan"):
        training.whole(run)


def test_an_update_without_its_secret_is_refused():
    plan = tiny.plan()
    training = Training(plan)
    weights, state = training.begin()
    with pytest.raises(ValueError, match=r"let run\.release call the function"):
        training.optimizer.update(Clipped(weights, CLIP), state, weights)


def test_a_sum_that_is_not_finite_is_refused_before_anything_is_released():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    next(run.batches(data()))
    bad = Clipped(jax.tree.map(lambda leaf: leaf * jnp.nan, weights), CLIP)
    with pytest.raises(ValueError, match="step=0: a sum of gradients is not finite; nothing was released"):
        run.release(training.update, bad, weights, state)
    assert run.ledger.steps_released == 0


def test_a_plan_for_another_number_of_parameters_is_refused():
    plan = bandmf.plan(
        epsilon=8, delta=1e-5, examples=EXAMPLES, batch_size=12, steps=STEPS, bands=4, parameters=7,
        sampling="cyclic-poisson",
    )  # fmt: skip
    run, training = open_run(plan), Training(plan)
    with pytest.raises(ValueError, match=r"plan\.parameters=7: the gradients have 6 entries"):
        training.whole(run)


@pytest.mark.parametrize("given", [None, "plan", 3])
def test_what_is_no_plan_is_refused(given):
    for make in (Run, lambda plan: privatize(plan, clip_norm=1.0)):
        with pytest.raises(ValueError, match="must be a Plan"):
            make(given)


# --- secrets ----------------------------------------------------------------------------------------------


def words_in(text, words):
    """Those that are in the text of a program: by themselves, or among many, as the bytes of an array."""

    def forms(word):
        return str(word), str(word.view(np.int32)), word.tobytes().hex().upper()

    return {int(word) for word in words if any(form in text for form in forms(word))}


def test_the_key_is_in_no_program_and_no_state():
    plan = tiny.plan()
    with same_run():  # or a word may be so short that it is in any text
        run, training = open_run(plan), Training(plan)
    weights, state = training.begin()
    total = training.sum(next(run.batches(data())), weights)
    secret = secret_of(run, 0, total)
    words = np.asarray(secret.noise_key)
    assert not words_in(training.update.lower(total, weights, state, secret=secret).as_text(), words)
    for closed_over in (words, words.view(np.int32), np.tile(words, 100)):  # they would be found
        text = jax.jit(lambda x, constant=closed_over: x + constant).lower(closed_over).as_text()
        assert words_in(text, words) == set(words.tolist())
    _, after = training.update(total, weights, state, secret=secret)
    held = {
        int(word) for leaf in jax.tree.leaves(after) for word in np.asarray(leaf).reshape(-1).view(np.uint32)
    }
    assert not held & {int(word) for word in words}
    assert repr(secret) == "Secret(...)"
    assert isinstance(secret, Secret)


def test_runs_with_one_key_share_no_noise_and_no_batches():
    plan = tiny.plan()
    one, two = open_run(plan), open_run(plan)
    assert one.run_id != two.run_id
    assert any(one._sampler.batch(i).tolist() != two._sampler.batch(i).tolist() for i in range(STEPS))
    assert not np.array_equal(*(run._secrets.of_step(plan, 0).noise_key for run in (one, two)))


# --- several steps at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", some_long([1, 5, 12, 40], lambda steps: steps == 5))
def test_steps_taken_at_once_are_the_same_steps(steps):
    plan = tiny.plan()
    with same_run():
        one, many = open_run(plan), open_run(plan)
    training = Training(plan)
    expected = flat(training.whole(one))
    weights, state = training.begin()
    for chunk in many.chunks(data(), steps=steps):
        weights, state = many.release_chunk(training.advance, chunk, weights, state)
    np.testing.assert_allclose(flat(weights), expected, rtol=1e-5, atol=1e-6)
    assert many.finished
    assert many.ledger.steps_released == STEPS
    assert many.spent() == one.spent()
    assert len(many._programs._known) <= 2  # and one more where the last chunk is shorter


def test_a_chunk_that_was_interrupted_can_only_be_taken_again_as_it_was(tmp_path, monkeypatch):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    weights, state = training.begin()
    run.save((weights, state))
    monkeypatch.setattr("bandmf.ledger.Ledger.finish", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        run.release_chunk(training.advance, next(run.chunks(data(), steps=4)), *training.begin())
    run.close()
    monkeypatch.undo()
    again = open_run(plan, tmp_path)
    weights, state = again.restore(training.begin())
    assert again.spent() == pytest.approx(plan.spent_after(4))
    with pytest.raises(ValueError, match="steps 0 to 3 were begun as one chunk"):
        training.steps(again, weights, state)
    with pytest.raises(ValueError, match="steps 0 to 3 were begun as one chunk"):
        again.release_chunk(training.advance, next(again.chunks(data(), steps=5)), weights, state)
    slower = Training(plan, optax.sgd(0.1))
    with pytest.raises(ValueError, match="steps 0 to 3 were begun as one chunk"):  # another program
        again.release_chunk(slower.advance, next(again.chunks(data(), steps=4)), *slower.begin())
    moved = jax.tree.map(lambda leaf: leaf + 1, first_weights())
    with pytest.raises(ValueError, match="steps 0 to 3 were begun as one chunk"):  # other weights
        again.release_chunk(training.advance, next(again.chunks(data(), steps=4)), moved, training.begin()[1])
    for chunk in again.chunks(data(), steps=4):
        weights, state = again.release_chunk(training.advance, chunk, weights, state)
    assert again.finished


def test_a_chunk_whose_sums_changed_is_refused_and_not_returned(tmp_path):
    plan = tiny.plan()
    run, training = open_run(plan, tmp_path), Training(plan)
    weights, state = training.begin()
    run.release_chunk(training.advance, next(run.chunks(data(), steps=4)), weights, state)
    run.close()
    again = open_run(plan, tmp_path)
    moved = jax.tree.map(lambda leaf: leaf + 1, first_weights())
    with pytest.raises(ValueError, match="was released before, and not by this chunk"):
        again.release_chunk(training.advance, next(again.chunks(data(), steps=4)), moved, training.begin()[1])


def test_a_function_that_forgets_the_state_is_refused():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan)
    with pytest.raises(ValueError, match="advance: must return a tuple of 2"):
        run.release_chunk(
            lambda rows, weights, state, secret: weights, next(run.chunks(data(), steps=4)), *training.begin()
        )


def test_the_state_is_one_and_moves_on():
    plan = tiny.plan()
    run, training = open_run(plan), Training(plan, optax.adam(0.1))
    _, state = training.steps(run, *training.begin(), until=5)
    (private,) = private_states(state)
    assert int(private.step) == 5


def test_a_chunk_may_carry_one_value():
    plan = tiny.plan()
    training = Training(plan)
    with same_run():
        runs = [open_run(plan) for _ in range(2)]
    weights, state = training.begin()
    expected = runs[0].release_chunk(training.advance, next(runs[0].chunks(data(), steps=3)), weights, state)
    both = dict(zip(("weights", "state"), training.begin(), strict=True))

    def advance(rows, both, secret):
        weights, state = training.advance(rows, both["weights"], both["state"], secret)
        return {"weights": weights, "state": state}

    class Advance:
        __hash__ = None

        def __call__(self, rows, both, secret):
            return advance(rows, both, secret)

    found = runs[1].release_chunk(Advance(), next(runs[1].chunks(data(), steps=3)), both)
    np.testing.assert_array_equal(flat(found["weights"]), flat(expected[0]))


def test_a_sum_that_was_divided_already_is_warned_of():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    x, y = data()

    def mean(rows, mask):
        total = training.gradient(weights, rows, mask=mask)
        return jax.tree.map(lambda leaf: leaf / plan.batch_size, total)

    total = next(run.batches((100 * x, y))).sum(mean)
    with pytest.warns(UserWarning, match="seems to be divided by the batch size"):
        run.release(training.update, total, weights, state)
    with pytest.raises(TypeError, match="do not divide the sum"):
        total / 12
