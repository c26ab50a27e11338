"""A mask that is forgotten, where the first batches do not show it, and what else a function may do with its rows."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_training as tiny
from bandmf.jax import Clipped, clipped_gradient
from bandmf.jax.training import trials
from bandmf.jax.training.batches import Batch
from jax_training import EXAMPLES, Source
from sweeps import in_turn

pytestmark = pytest.mark.usefixtures("compiled_quickly")

FORGOTTEN = "mask: rows that are masked count in the sum"
ONES = np.ones((EXAMPLES, 1), np.int32)  # whole numbers: masked rows are zeros, whose gradients are finite


def batches(sizes, capacity=16):
    """Of one pass over the same examples."""
    source = Source(ONES, EXAMPLES, tiny.plan().batch_size, capacity, None)
    return [Batch(step, np.arange(size), source) for step, size in enumerate(sizes)]


def sign(example):
    return jnp.where(example[0] == 1, -1.0, 1.0)


def warming_up(weights, example, step):
    return step * sign(example) * weights["u"].sum()


def norm_at_zero(weights, example, step):
    """Not finite at zero weights, and so zero after clipping."""
    return sign(example) * weights["u"].sum() + jnp.linalg.norm(weights["u"])


def factors_of_zero(weights, example, step):
    return sign(example) * (weights["u"] @ weights["v"])


def summed(batch, gradient, passes_it_on, plain=False):
    """The weights are zero at the first two steps."""
    weights = {"u": jnp.full(2, max(0.0, batch.step - 1.0)), "v": jnp.full(2, max(0.0, batch.step - 1.0))}

    def function(rows, mask):
        found = gradient(weights, rows, jnp.float32(batch.step), **({"mask": mask} if passes_it_on else {}))
        return found.total if plain else found

    return batch.sum(function)


@pytest.mark.parametrize(("loss", "shows"), [(warming_up, 1), (norm_at_zero, 2), (factors_of_zero, 2)])
@pytest.mark.parametrize("plain", [False, True])
def test_a_forgotten_mask_is_noticed_at_the_first_sum_that_is_not_zero(loss, shows, plain):
    gradient = jax.jit(clipped_gradient(loss, clip_norm=1.0))
    for batch in batches([0, 9, 9, 9]):
        if batch.step < shows:
            assert not any(leaf.any() for leaf in jax.tree.leaves(summed(batch, gradient, False, plain)))
            continue
        with pytest.raises(ValueError, match=FORGOTTEN):
            batch.check_sum(summed(batch, gradient, False, plain))
    for batch in batches([0, 9, 9, 9]):
        batch.check_sum(summed(batch, gradient, True, plain))


def test_a_forgotten_mask_is_missed_if_zeros_are_taken_for_an_answer(monkeypatch):
    """The planted fault: the first batch decides, whatever it gave."""
    kept = trials.Verdict
    monkeypatch.setattr(trials, "Verdict", lambda *parts: kept(*parts[:-1], frozenset()))
    gradient = jax.jit(clipped_gradient(factors_of_zero, clip_norm=1.0))
    totals = [summed(batch, gradient, passes_it_on=False).total["u"] for batch in batches([9, 9, 9])]
    assert totals[-1].any()


def compiled(function):
    """Ahead of time: an object that does not show its function."""
    program = jax.jit(function).lower(jnp.ones((16, 1), jnp.int32), jnp.ones(16, bool)).compile()
    return lambda rows, mask: program(rows, mask)


class Held:
    def __init__(self, function):
        self.functions = {"gradient": function}

    def __call__(self, rows, mask):
        return self.functions["gradient"](rows, mask)


def first_of(functions):
    return lambda rows, mask: functions[0](rows, mask)


def test_every_function_is_tried():
    gradient = jax.jit(clipped_gradient(lambda weights, example: sign(example) * weights[0], clip_norm=1.0))
    weights = jnp.ones(1)

    def wrapped(function):
        return lambda rows, mask: function(rows, mask)

    def switched(on):
        return lambda rows, mask: gradient(weights, rows, mask=mask if on else None)

    right = lambda rows, mask: gradient(weights, rows, mask=mask)  # noqa: E731
    wrong = lambda rows, mask: gradient(weights, rows)  # noqa: E731
    pairs = [(right, wrong), (wrapped(right), wrapped(wrong)), (switched(True), switched(False))]
    pairs += [(jax.jit(right), jax.jit(wrong)), (partial(gradient, weights), wrong)]
    pairs += [
        (compiled(right), compiled(wrong)),
        (Held(right), Held(wrong)),
        (first_of([right]), first_of([wrong])),
    ]
    for one, other in pairs:
        first, second = batches([9, 9])
        first.sum(one)
        with pytest.raises(ValueError, match=FORGOTTEN):
            second.sum(other)


def test_what_is_zero_at_first_is_tried_once_it_is_not():
    """A sum of one's own is NaN where a row is, and so counted as seen: with a warm-up from zero, 27 clip norms."""
    gradient = jax.vmap(jax.grad(lambda weights, row: row @ weights), (None, 0))

    def centered(factor, rows, mask):
        mean = jnp.where(mask[:, None], rows, 0).sum(0) / jnp.maximum(mask.sum(), 1)
        found = gradient(jnp.ones(2), rows - mean)
        norms = jnp.linalg.norm(found, axis=1, keepdims=True)
        return factor * jnp.where(mask[:, None], found / jnp.maximum(norms, 1), 0).sum(0)

    source = Source(np.random.default_rng(0).normal(size=(EXAMPLES, 2)), EXAMPLES, 12, 16, None)
    first, second = (Batch(step, np.arange(9), source) for step in range(2))
    for batch, factor in ((first, 0.0), (second, 1.0)):
        total = batch.sum(partial(centered, jnp.float32(factor)))
        if factor:
            with pytest.raises(ValueError, match="sum: what the function gives for two halves"):
                batch.check_sum(Clipped(total, 1.0))
        else:
            batch.check_sum(Clipped(total, 1.0))


def test_nothing_is_tried_again_once_it_is_known():
    """Nor for a parameter that is never used, nor for a function that is made anew for every batch."""
    gradient = jax.jit(clipped_gradient(lambda weights, row: sign(row) * weights["used"], clip_norm=1.0))
    weights, calls = {"used": jnp.ones(()), "unused": jnp.ones(3), "empty": jnp.ones(0)}, []
    for batch in batches([0, 9, 9, 12, 9]):

        def function(rows, mask, batch=batch):
            calls.append(batch.step)
            return gradient(weights, rows, mask=mask)

        batch.sum(function)
    assert [calls.count(step) for step in range(5)] == [26, 1, 1, 1, 1]


# --- what is zero without any row, for another reason --------------------------------------------------------


def no_rows_first(gradient, weights, rows, mask):
    """A shortcut for batches without examples."""
    if not mask.any():
        return jax.tree.map(jnp.zeros_like, gradient(weights, rows, mask=mask))
    return gradient(weights, rows)


def no_rows_compiled(gradient, weights, rows, mask):
    nothing = jax.tree.map(jnp.zeros_like, gradient(weights, rows, mask=mask))
    return jax.lax.cond(mask.any(), lambda: gradient(weights, rows), lambda: nothing)


def mean_of_all(gradient, weights, rows, mask):
    return jax.tree.map(lambda leaf: leaf / len(rows) * mask.sum(), gradient(weights, rows).total)


def first_part_of_the_mask(gradient, weights, rows, mask):
    """In microbatches of one's own."""
    parts = [
        gradient(weights, rows[begin : begin + 4], mask=mask[:4]).total for begin in range(0, len(rows), 4)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def mask_the_other_way(gradient, weights, rows, mask):
    return gradient(weights, rows, mask=mask[::-1])


def as_many_rows_as_count(gradient, weights, rows, mask):
    """Right for the masks of batches, whose examples come first, and for no others."""
    return gradient(weights, rows, mask=jnp.arange(len(mask)) < mask.sum())


SHORTCUTS = [
    no_rows_first, no_rows_compiled, mean_of_all, first_part_of_the_mask, mask_the_other_way, as_many_rows_as_count,
]  # fmt: skip
VARIED = np.arange(1, EXAMPLES + 1, dtype=np.int32)[:, None] % 5


def one_batch(size, data=VARIED, capacity=16):
    return Batch(0, np.arange(size), Source(data, EXAMPLES, 12, capacity, None))


def of_rows(weights, row):
    return jnp.sin(row[0] + 1.0) * weights.sum()


def released(batch, function):
    batch.check_sum(batch.sum(function))


@pytest.mark.parametrize(
    ("shortcut", "size"),
    in_turn(SHORTCUTS, [0, 1, 9, 16]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mask_that_is_forgotten_but_for_batches_without_examples_is_refused(shortcut, size):
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0))
    with pytest.raises(
        ValueError, match=f"{FORGOTTEN}|^(step=0: )?sum: what the function gives for two halves"
    ):
        released(one_batch(size), partial(shortcut, gradient, jnp.ones(2)))


def test_only_rows_masked_here_and_there_show_it(monkeypatch):
    """The planted fault: none are, or all."""
    monkeypatch.setattr(trials, "_halves", lambda rows: (np.ones(rows, bool), np.zeros(rows, bool)))
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0))
    batch = one_batch(9)
    wrong = batch.sum(partial(no_rows_first, gradient, jnp.ones(2))).total
    assert jnp.linalg.norm(wrong - gradient(jnp.ones(2), VARIED[:9]).total) > 2


@pytest.mark.parametrize("kind", [np.int32, np.float32])
@pytest.mark.parametrize("size", [0, 1, 9, 16, 23])
def test_a_mask_that_is_passed_on_is_never_refused(size, kind):
    """Nor where a function is random, or adds up in another order each time."""
    data, generator = VARIED.astype(kind), np.random.default_rng(1)
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0))
    weights = jnp.ones(2)

    def weighted(rows, mask):
        scale = jnp.where(mask, jnp.sin(jnp.nan_to_num(rows[:, 0]) + 1), 0)
        return scale @ jnp.ones((len(rows), 3))

    def random(rows, mask):
        return gradient(weights * generator.normal(), rows, mask=mask)

    for function in (partial(gradient, weights), weighted, random):
        released(one_batch(size, data), function)


def test_a_function_that_cannot_be_called_again_is_told_why_it_was():
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0), donate_argnums=0)
    with pytest.raises(RuntimeError, match=r"called its function once more, .*do not donate weights"):
        one_batch(9).sum(partial(gradient, jnp.ones(2)))

    def first(rows, mask):
        return gradient(jnp.ones(2), rows, mask=mask), rows[np.flatnonzero(mask)[0]]

    with pytest.raises(RuntimeError, match=r"\(IndexError: .*a batch without examples"):
        one_batch(9).sum(first)


def test_a_text_that_is_another_every_time_is_no_switch():
    """Such as the name of a step, for a profiler."""
    source, calls = Source(VARIED, EXAMPLES, 12, 16, None), []
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0))
    for step in range(9):

        def function(rows, mask, name=f"step {step}"):
            calls.append(name)
            return gradient(jnp.ones(2), rows, mask=mask)

        Batch(step, np.arange(9), source).sum(function)
    assert [calls.count(f"step {step}") for step in range(9)] == [26] * 6 + [1] * 3


def test_a_function_that_gives_other_shapes_every_time_is_remarked_on(monkeypatch):
    source = Source(VARIED, EXAMPLES, 12, 16, None)
    gradient = jax.jit(clipped_gradient(of_rows, clip_norm=1.0))

    def step(number):
        def function(rows, mask):
            return gradient(jnp.ones(2), rows, mask=mask), jnp.zeros((2, number + 1))

        Batch(number, np.arange(9), source).sum(function)

    monkeypatch.setattr(trials, "_OFTEN", 3)
    for number in range(2):
        step(number)
    with pytest.warns(UserWarning, match="tried this function with other masks 3 times"):
        step(2)


# --- arrays that are the caller's ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 8, 11])
def test_arrays_of_the_caller_are_not_donated(size):
    """In one, two and three pieces."""
    (batch,) = batches([size], capacity=4)
    gradient, rate = jax.jit(clipped_gradient(lambda w, row: jnp.sum(w * row), clip_norm=3.0)), jnp.float32(2)

    def function(rows, mask):
        found = gradient(jnp.ones(1), rows, mask=mask)
        return found, found.total, rate

    clipped, total, rates = batch.sum(function)
    np.testing.assert_allclose(total, [size], rtol=1e-5)
    np.testing.assert_array_equal(clipped.total, total)
    assert float(rates) == 2 * -(-size // 4)
    assert float(rate) == 2


def test_rows_may_be_donated():
    source = Source(np.ones(EXAMPLES, np.float32), EXAMPLES, 12, 16, None)
    batch, weights = Batch(0, np.arange(9), source), jnp.ones(16)
    gradient = clipped_gradient(lambda weights, row: weights.sum() * row, clip_norm=100.0)
    donating = jax.jit(lambda rows, mask: gradient(weights, rows, mask=mask).total, donate_argnums=0)
    np.testing.assert_allclose(batch.sum(donating), np.full(16, 9), rtol=1e-5)


def test_a_number_of_more_than_32_bits_is_no_sum():
    (batch,) = batches([9])
    with pytest.raises(ValueError, match=r"dtype in the result='int': batch\.sum adds up numbers only"):
        batch.sum(lambda rows, mask: (jnp.sum(mask), 10**18))


def test_a_text_is_no_sum():
    (batch,) = batches([9])
    with pytest.raises(ValueError, match=r"dtype in the result='str': batch\.sum adds up numbers only"):
        batch.sum(lambda rows, mask: (jnp.sum(mask), "loss"))


def test_a_function_that_advances_a_key_of_its_own_is_told_so():
    key, gradient = [jax.random.key(0)], clipped_gradient(lambda w, row: w @ row, clip_norm=1.0)

    def advancing(rows, mask):
        key[0], own = jax.random.split(key[0])
        return gradient(jnp.ones(2) + jax.random.normal(own), rows, mask=mask)

    source = Source(np.ones((EXAMPLES, 2), np.float32), EXAMPLES, 12, 16, None)
    with pytest.raises(ValueError, match=r"keeps something between calls.*batch\.step"):
        Batch(0, np.arange(9), source).sum(advancing)


def test_a_function_without_a_mask_is_told_how_it_is_called():
    source = Source(np.ones((EXAMPLES, 2), np.float32), EXAMPLES, 12, 16, None)
    gradient = clipped_gradient(lambda w, row: w @ row, clip_norm=1.0)
    with pytest.raises(TypeError, match=r"calls its function as function\(data, mask=mask\)"):
        Batch(0, np.arange(9), source).sum(lambda rows, m: gradient(jnp.ones(2), rows, mask=m))
    with pytest.raises(ValueError, match=r"looks like a mask; give it by its name: .*mask=mask"):
        Batch(0, np.arange(9), source).sum(lambda rows, mask: gradient(jnp.ones(2), rows, mask))


def test_a_parameter_that_only_noise_trains_is_warned_of():
    """As all before a batch norm, whose statistics are those of the one example."""

    def loss(weights, row):
        hidden = weights["before"] * row
        normed = (hidden - hidden.mean(axis=0)) / jnp.sqrt(hidden.var(axis=0) + 1e-5)
        return (normed + 1) @ weights["after"]

    gradient = jax.jit(clipped_gradient(lambda w, row: loss(w, row[None])[0], clip_norm=1.0))
    weights = {"before": jnp.ones(2), "after": jnp.ones(2)}
    source = Source(
        np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32), EXAMPLES, 12, 16, None
    )
    for step in range(9):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Batch(step, np.arange(9), source).sum(partial(gradient, weights))
    with pytest.warns(
        UserWarning, match=r"the sum\.total\['before'\] had only zeros in the first 10 batches"
    ):
        Batch(9, np.arange(9), source).sum(partial(gradient, weights))
