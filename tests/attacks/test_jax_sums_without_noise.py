"""Sums that leave a program beside their noise: recorded, returned, carried along or saved."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jax_training as tiny
from bandmf.jax import Clipped, clipped_gradient, privatize
from bandmf.jax.training import dependence
from children import HERE, environment
from jax_training import CLIP, EXAMPLES, Training, data, open_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


RECORDERS = {
    "monitor": lambda: optax.monitor({"norm": norm}),
    "snapshot": lambda: optax.snapshot("sum", lambda updates: updates),
    "a chain": lambda: optax.chain(optax.identity(), optax.monitor({"norm": norm})),
    "a state of its own": lambda: optax.GradientTransformation(
        lambda params: {"norm": jnp.zeros(())},
        lambda updates, state, params=None: (updates, {"norm": norm(updates)}),
    ),
}


def recording(plan, name):
    """Training with something before privatize that changes nothing."""
    training = Training(plan)
    training.optimizer = optax.chain(
        RECORDERS[name](), optax.chain(privatize(plan, clip_norm=CLIP), optax.sgd(0.5))
    )
    return training


def one_step(training, run, update):
    weights, state = training.begin()
    batch = next(run.batches(data()))
    total = training.sum(batch, weights)
    return total, run.release(update, total, weights, state)


WAYS = {
    "jit": jax.jit,
    "partial": lambda function: partial(jax.jit(function)),
    "plain": lambda function: function,
    "wrapped": lambda function: lambda *given, secret: jax.jit(function)(*given, secret=secret),
}


@pytest.mark.filterwarnings("ignore:update. is no function of jax.jit")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "jit") for name in RECORDERS),
        ("monitor", "partial"),
        ("snapshot", "plain"),
        ("a chain", "wrapped"),
    ],
)
def test_what_records_the_sum_before_privatize_is_refused_and_costs_nothing(name, way):
    plan = tiny.plan()
    training, run = recording(plan, name), open_run(plan)
    with pytest.raises(ValueError, match=r"put nothing before it, not even what only records"):
        one_step(training, run, WAYS[way](training._update))
    assert run.spent() == 0
    right = Training(plan)
    one_step(right, run, WAYS[way](right._update))


@pytest.mark.parametrize("name", list(RECORDERS))
def test_what_records_in_a_chunk_is_refused(name):
    plan = tiny.plan()
    training, run = recording(plan, name), open_run(plan)
    weights, state = training.begin()
    total = Clipped(jax.tree.map(jnp.zeros_like, weights), CLIP)
    shapes = jax.eval_shape(training._update, total, weights, state, run._secrets.shapes(plan))[1]
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)  # as it is after a step
    with pytest.raises(ValueError, match=r"advance: .*beside the state of privatize, depends on the data"):
        run.release_chunk(training.advance, chunk_of(run), weights, state)
    assert run.spent() == 0


def test_a_recorder_would_put_the_sum_into_the_checkpoint(monkeypatch, tmp_path):
    """The planted fault: nobody looks."""
    monkeypatch.setattr(dependence.Updates, "check", lambda *_: None)
    plan = tiny.plan()
    training, run = recording(plan, "monitor"), open_run(plan, tmp_path)
    total, (weights, state) = one_step(training, run, jax.jit(training._update))
    run.save((weights, state))
    assert state[0].measurements["norm"] == pytest.approx(float(norm(total)))


def test_what_records_after_privatize_is_taken():
    plan = tiny.plan()
    training, run = (
        Training(plan, optimizer=optax.chain(optax.monitor({"norm": norm}), optax.sgd(0.5))),
        open_run(plan),
    )
    training.steps(run, *training.begin(), until=3)
    assert run.steps_taken == 3


def test_an_update_that_returns_something_of_the_sum_is_refused():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    @jax.jit
    def update(total, weights, state, secret):
        return *training._update(total, weights, state, secret), {"norm": norm(total.total)}

    with pytest.raises(ValueError, match=r"what it returns\[2\]\['norm'\] depends on the sum without noise"):
        one_step(training, run, update)

    @jax.jit
    def of_weights(total, weights, state, secret):
        return *training._update(total, weights, state, secret), norm(weights), jnp.size(total.total["bias"])

    one_step(training, run, of_weights)
    assert run.steps_taken == 1


def test_an_update_is_looked_at_again_when_a_switch_of_it_changes():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    @partial(jax.jit, static_argnums=3)
    def update(total, weights, state, logs, secret):
        return *training._update(total, weights, state, secret), norm(total.total) if logs else 0.0

    weights, state = training.begin()
    for batch in run.batches(data()):
        total = training.sum(batch, weights)
        if batch.step == 2:
            with pytest.raises(ValueError, match=r"what it returns\[2\] depends on the sum"):
                run.release(update, total, weights, state, True)
            break
        weights, state, _ = run.release(update, total, weights, state, False)
    assert run.ledger.steps_spent == 2


def test_the_sum_is_followed_under_any_name():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    total = training.sum(next(run.batches(data())), weights)

    @jax.jit
    def twice(total, weights, state, again, secret):
        return *training._update(total, weights, state, secret), norm(again.total)

    @jax.jit
    def raw(total, weights, state, again, secret):
        return *training._update(total, weights, state, secret), again["bias"]

    @jax.jit
    def closed(own, weights, state, secret):
        return *training._update(own, weights, state, secret), norm(total.total)

    @jax.jit
    def written(own, weights, state, secret):
        place = jax.new_ref(jnp.zeros(()))
        place[...] = norm(own.total)
        return *training._update(own, weights, state, secret), place[...]

    for update, more in ((twice, [total]), (raw, [total.total]), (closed, []), (written, [])):
        with pytest.raises(ValueError, match="depends on the sum without noise"):
            run.release(update, total, weights, state, *more)
    assert run.spent() == 0


@pytest.mark.parametrize("way", ["plain", "wrapped"])
def test_an_update_that_is_not_jitted_is_warned_of_and_called_once(way):
    plan = tiny.plan()
    training, run, calls = Training(plan), open_run(plan), []

    def update(total, weights, state, secret):
        calls.append(type(weights["bias"]))  # what it stores must not be a part of a trace
        return training.update(total, weights, state, secret=secret)

    function = update if way == "plain" else nnx.jit(training._update)
    with pytest.warns(UserWarning, match=r"update: is no function of jax\.jit"):
        one_step(training, run, function)
    assert run.steps_taken == 1
    assert calls == ([type(jnp.zeros(1))] if way == "plain" else [])


def test_a_jitted_update_is_right_without_jit_too():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    with jax.disable_jit():
        one_step(training, run, training.update)
    assert run.steps_taken == 1


def test_numbers_among_the_arguments_and_new_functions_take_no_new_look(monkeypatch):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    looks, look = [], dependence._check_results
    monkeypatch.setattr(dependence, "_check_results", lambda *given: (looks.append(1), look(*given)))
    update = jax.jit(
        lambda total, weights, state, rate, secret: training._update(total, weights, state, secret)
    )
    weights, state = training.begin()
    for batch in run.batches(data()):
        total = training.sum(batch, weights)
        weights, state = run.release(partial(update), total, weights, state, 0.1 * batch.step)
        if run.steps_taken == 4:
            break
    assert len(looks) == 1


class Trainer:
    """With a jitted method, which returns the norm of the sum."""

    def __init__(self, training):
        self.training = training

    @partial(jax.jit, static_argnums=(0, 2))
    def update(self, total, name, raw, weights, state, secret):
        return *self.training._update(total, weights, state, secret), norm(raw)


def test_jitted_methods_and_static_texts_before_a_sum_are_looked_at():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    total = training.sum(next(run.batches(data())), weights)
    with pytest.raises(ValueError, match=r"what it returns\[2\] depends on the sum"):
        run.release(Trainer(training).update, total, "norm", total.total["bias"], weights, state)
    assert run.spent() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.release(Trainer(training).update, total, "norm", jnp.zeros(1), weights, state)


def test_words_of_the_secret_are_not_returned():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    @jax.jit
    def update(total, weights, state, secret):
        return *training._update(total, weights, state, secret), secret.noise_key + 1

    with pytest.raises(ValueError, match=r"secret: is in what is returned\[2\]"):
        one_step(training, run, update)

    def advance(rows, weights, state, words, secret):
        return *training.advance(rows, weights, state, secret), secret.noise_key

    with pytest.raises(ValueError, match=r"secret: is in what is returned\[0\]\[2\]"):
        run.release_chunk(advance, chunk_of(run), *training.begin(), jnp.zeros(8, jnp.uint32))
    assert run.spent() == 0


def test_the_same_program_is_looked_at_again_where_a_sum_goes_in_elsewhere():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    @jax.jit
    def update(total, weights, state, other, secret):
        return *training._update(total, weights, state, secret), norm(other)

    weights, state = training.begin()
    for batch in run.batches(data()):
        total = training.sum(batch, weights)
        if batch.step:
            with pytest.raises(ValueError, match=r"what it returns\[2\] depends on the sum"):
                run.release(update, total, weights, state, total.total)
            break
        zeros = jax.tree.map(jnp.zeros_like, weights)
        weights, state, _ = run.release(update, total, weights, state, zeros)


@pytest.mark.parametrize(
    "case", ["a static keyword", "a shape", "a function", "nothing that was there before"]
)
def test_another_program_of_a_function_is_looked_at(case):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    @partial(jax.jit, static_argnames=("log", "function"))
    def update(total, weights, state, more=None, *, log=0, function=None, secret):
        weights, state = training._update(total, weights, state, secret)
        logs = log > 1 or function is not None or (more is not None and more.size > 1)
        return weights, state, norm(total.total) if logs else 0.0

    first, second = {
        "a static keyword": (partial(update, log=1), partial(update, log=2)),
        "a shape": (update, update),
        "a function": (update, partial(update, function=print)),
        "nothing that was there before": (update, update),
    }[case]
    more = {"a shape": [jnp.zeros(1)]}.get(case, [])
    weights, state = training.begin()
    for batch in run.batches(data()):
        total = training.sum(batch, weights)
        if batch.step:
            with pytest.raises(ValueError, match=r"what it returns\[2\] depends on the sum"):
                run.release(
                    second, total, weights, state, *([jnp.zeros(2)] if "there" in case or more else [])
                )
            break
        weights, state, _ = run.release(first, total, weights, state, *more)


def test_sums_and_what_single_examples_gave_are_not_saved(tmp_path):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan, tmp_path)
    total, (weights, state) = one_step(training, run, training.update)
    seen = clipped_gradient(tiny.loss, clip_norm=CLIP, return_examples=True)(weights, data())[1]
    for bare, name in ((total, "Clipped"), (seen, "Examples")):
        with pytest.raises(ValueError, match=f"tree='{name}': has no noise"):
            run.save((weights, state, {"deep": [bare]}))
    run.save((weights, state))


# --- chunks -----------------------------------------------------------------------------------------------------


def chunk_of(run, steps=2):
    return next(run.chunks(data(), steps=steps))


def test_a_chunk_that_does_not_use_its_masks_is_refused():
    """Rows of tokens that no example fills are zeros, which is a token: one example moved the sum by 1.9 clip norms."""
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)

    def advance(rows, weights, state, secret):
        return training._update(training.gradient(weights, rows.data), weights, state, secret)

    def looked_at_in_vain(rows, weights, state, secret):
        count = jax.jit(lambda rows: rows.mask.sum())(rows)
        return *advance(rows, weights, state, secret), count

    weights, state = training.begin()
    with pytest.raises(ValueError, match=r"advance: rows\.mask does not reach the sum"):
        run.release_chunk(advance, chunk_of(run), weights, state)
    with pytest.raises(ValueError, match=r"advance: rows\.mask does not reach the sum"):
        run.release_chunk(
            lambda rows, weights, state, count, secret: looked_at_in_vain(rows, weights, state, secret),
            chunk_of(run), weights, state, jnp.int32(0),
        )  # fmt: skip
    assert run.spent() == 0
    run.release_chunk(training.advance, chunk_of(run), weights, state)


def test_what_a_chunk_carries_along_without_noise_is_warned_of():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()

    def with_loss(rows, weights, state, steps, loss, secret):
        losses = jax.vmap(partial(tiny.loss, weights))(rows.data)
        own = jnp.sum(jnp.where(rows.mask, losses, 0.0))
        return *training.advance(rows, weights, state, secret), steps + 1, own

    with pytest.warns(UserWarning, match=r"what it returns\[3\] depends on the data without noise"):
        carry = run.release_chunk(with_loss, chunk_of(run), weights, state, jnp.int32(0), jnp.float32(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.release_chunk(training.advance, chunk_of(run), *carry[:2])


# --- reading pieces ---------------------------------------------------------------------------------------------


def test_a_batch_of_which_not_all_pieces_were_read_is_refused():
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    batch = next(run.batches(data(), capacity=2))
    first = next(iter(batch))
    total = training.gradient(weights, first.data, mask=first.mask)
    with pytest.raises(ValueError, match=r"pieces, not all of which were read.*release once"):
        run.release(training.update, total, weights, state)
    assert run.spent() == 0
    sums = [training.gradient(weights, rows.data, mask=rows.mask).total for rows in batch]
    total = Clipped(jax.tree.map(lambda *parts: sum(parts), *sums), CLIP)
    for rows in batch:  # once more, after the sum
        assert len(rows) == 2
        assert rows[0] is rows.data
    run.release(training.update, total, weights, state)


@pytest.mark.parametrize("how", ["by name", "as a pair", "in jit"])
def test_pieces_whose_masks_are_not_used_are_refused(how):
    plan = tiny.plan()
    training, run = Training(plan), open_run(plan)
    weights, state = training.begin()
    batch = next(run.batches(data(), capacity=EXAMPLES))
    (rows,) = batch
    total = training.gradient(weights, rows.data)
    with pytest.raises(ValueError, match="the mask of a piece was not used"):
        run.release(training.update, total, weights, state)
    (rows,) = batch
    if how == "by name":
        total = training.gradient(weights, rows.data, mask=rows.mask)
    elif how == "as a pair":
        examples, mask = rows
        total = training.gradient(weights, examples, mask=mask)
    else:
        total = jax.jit(lambda rows: training.gradient(weights, rows.data, mask=rows.mask))(rows)
    run.release(training.update, total, weights, state)


# --- what depends on what ---------------------------------------------------------------------------------------


def through_scan(x, y):
    """The second carry depends on the first one a turn later."""

    def turn(carry, row):
        return (carry[0] + row, carry[0], carry[2] + 1), carry[2]

    return lax.scan(turn, (jnp.float32(0), jnp.float32(0), y), x)


def through_while(x, y):
    return lax.while_loop(
        lambda now: now[0] < 3, lambda now: (now[0] + 1, now[1] + x[0], now[2] * 2), (0, y, y)
    )


def decided(x, y):
    return lax.while_loop(lambda now: now[0] < x[0], lambda now: (now[0] + 1.0, 2 * now[1]), (0.0, y))


def chosen(x, y):
    return lax.cond(x[0] > 0, lambda: y, lambda: -y), lax.cond(y > 0, lambda: (x, y), lambda: (2 * x, y))


def called(x, y):
    inner = jax.jit(lambda a, b: (a * 2, b + 1))
    return inner(x, y), jax.checkpoint(lambda a, b: (jnp.sin(a), b))(x, y), x.shape[0] * y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (through_scan, [True, True, False, False]),
        (through_while, [False, True, False]),
        (decided, [True, True]),
        (chosen, [True, True, False]),
        (called, [True, False, True, False, False]),
    ],
)
def test_what_depends_on_marked_inputs_is_found_in_loops_choices_and_calls(function, expected):
    program = jax.make_jaxpr(function)(jnp.ones(3), jnp.float32(1)).jaxpr
    assert dependence._Flow().results(program, [True, False]) == expected


# --- constants of chunks ----------------------------------------------------------------------------------------


CONSTANTS = """
import jax, jax.numpy as jnp, numpy as np
from bandmf.jax.tracing import constants
from bandmf.jax.training.chunks import _digest

def traced(matrix):
    inner = jax.jit(lambda x: x @ matrix)
    return jax.jit(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]).trace(jnp.ones((2, 4)))

programs = [traced(jnp.full((4, 4), value)) for value in (1.0, 1.0, 2.0)]
texts = [program.lower().as_text() for program in programs]
first, same, other = (_digest(text, constants(program.jaxpr)) for text, program in zip(texts, programs))
assert first == same != other
print("texts differ" if texts[0] != texts[2] else "texts are the same")
"""


@pytest.mark.parametrize(("simplified", "says"), [("0", "texts differ"), ("1", "texts are the same")])
def test_a_chunk_with_other_constants_is_another_one(simplified, says):
    """With this setting of JAX, arrays that are closed over are not in the text of a program."""
    env = environment(JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=simplified)
    done = subprocess.run(
        [sys.executable, "-c", CONSTANTS],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HERE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
