"""Functions for the data in JAX: the row of an example is its own, whatever else is asked for, and in every step."""

from __future__ import annotations

import warnings
from collections import UserDict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch.utils.data import DataLoader

import jax_training as tiny
from bandmf import Key
from bandmf.jax.training import loaders
from bandmf.jax.training.loaders import Loader, checks

ROWS, FEATURES = 128, 4
DICE = np.random.default_rng(3)
DATA = DICE.normal(size=(ROWS, FEATURES)).astype(np.float32)
LABELS = (DICE.random(ROWS) < 0.4).astype(np.int32)
SOME = np.sort(DICE.choice(ROWS, 40, replace=False))
VARIES = r"gives other rows for the same indices each time, in "


def loaded(load, indices=SOME):
    return tiny.loaded(load, indices, ROWS)


def silently(load):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loaded(load)


# --- indices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_function_that_changes_its_indices_in_place_gives_the_same_rows_in_every_step(tmp_path, at_once):
    """Once the first step was trained on rows that were moved twice, and a restart was refused."""
    x, y = (np.concatenate([leaf, leaf, 0 * leaf]) for leaf in tiny.data())

    def load(indices):
        indices += tiny.EXAMPLES  # where the training split begins
        return x[indices], y[indices]

    training = tiny.training(data=load, folder=tmp_path / "run", save_every=3)
    tiny.trained(training, until=6, at_once=at_once)
    training._let_go()
    found = tiny.weights_of(data=load, folder=tmp_path / "run", save_every=3, at_once=at_once)
    np.testing.assert_allclose(found, tiny.weights_of(), rtol=0, atol=1e-6)


def test_what_a_function_draws_is_secret_and_repeated_by_a_restart(tmp_path):
    """With a public seed, one example less would change what all others are given."""
    x, y = tiny.data()
    drawn = []

    def load(indices):
        moved = np.random.normal(size=(len(indices), 5)).astype(np.float32)
        drawn.append(moved)
        return x[indices] + moved, y[indices]

    def draws(seed, until, **more):
        np.random.seed(seed)
        drawn.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = tiny.training(data=load, **more)
            weights = tiny.trained(run, until=until)
            run._let_go()
        after = np.random.random()
        np.random.seed(seed)
        assert after == np.random.random()  # the user's own numbers are not touched
        return [moved.tobytes() for moved in drawn], tiny.flat(weights.weights)

    one, whole = draws(0, tiny.STEPS)
    other, _ = draws(1, tiny.STEPS)
    assert one[-1] == other[-1]  # of run and step, not of the user's seed
    assert one[-1] != draws(0, tiny.STEPS, key=Key())[0][-1]
    draws(0, 5, folder=tmp_path, save_every=3)
    _, again = draws(7, tiny.STEPS, folder=tmp_path, save_every=3)
    np.testing.assert_array_equal(whole, again)


def test_a_function_never_sees_how_many_examples_a_batch_has():
    """It may be compiled for that number, which a log of compilations shows."""
    x, y = tiny.data()
    lengths = []

    def load(indices):
        lengths.append(len(indices))
        return x[indices], y[indices]

    run = tiny.training(data=load)
    tiny.trained(run)
    sizes = {len(run._sampler.batch(step)) for step in range(tiny.STEPS)}
    assert len(sizes) > 3
    assert all(length % (run._source.size // 2) == 0 for length in lengths)


# --- rows that vary ---------------------------------------------------------------------------------------------


def augmented(indices):
    return DATA[indices] + 0.1 * np.random.default_rng().normal(size=(len(indices), FEATURES)).astype(np.float32)


def balanced(indices):
    labels = LABELS[indices]
    return (len(labels) / (2 * np.bincount(labels, minlength=2)[labels])).astype(np.float32)


def test_random_changes_in_one_array_excuse_no_other():
    """Weights by the classes of a batch, or standardized targets, once passed beside random crops."""
    with pytest.raises(ValueError, match=r"gives other rows for an example if other examples are loaded with it"):
        loaded(lambda indices: (augmented(indices), balanced(indices)))


def test_random_changes_are_warned_of_once_and_the_arrays_are_named():
    source = tiny.source_of(lambda indices: {"x": augmented(indices), "y": LABELS[indices]}, ROWS)
    with pytest.warns(UserWarning, match=VARIES + r"data\['x'\], and .*no statistics.*[Aa]fter a restart") as caught:
        [loaded(source) for _ in range(12)]
    assert len(caught) == 1
    assert "stream" not in str(caught[0].message)


def test_running_means_are_warned_of():
    """An example of one batch moved the sum of the next, in which it was not, by eight clip norms."""
    mean = np.zeros(FEATURES)

    def centered(indices):
        mean[:] += 0.1 * (DATA[indices].mean(0) - mean)
        return (DATA[indices] - mean).astype(np.float32), LABELS[indices]

    with pytest.warns(UserWarning, match=VARIES + r"data\[0\], and"):
        loaded(centered)


def test_a_stream_that_ignores_the_indices_is_warned_of():
    """An example took part in two steps that followed each other, where the plan had six between them."""
    dice = np.random.default_rng(1)

    def following(indices):
        chosen = dice.permutation(ROWS)[: len(indices)]
        return DATA[chosen], LABELS[chosen]

    with pytest.warns(UserWarning, match=VARIES + r"all arrays.*ignores the indices, as a stream does"):
        loaded(following)


# --- rows that depend on others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_column_that_depends_on_the_batch_is_seen_beside_a_large_one_in_any_precision(kind):
    """In bfloat16 all columns below a thirtieth of the largest number went unseen: 23 clip norms."""
    table = np.exp(1.5 * np.random.default_rng(0).normal(size=(ROWS, 3)))
    table[:, 2] = 60_000 - np.arange(ROWS)

    def centred(indices):
        rows = table[indices].copy()
        rows[:, :2] -= rows[:, :2].mean(0)
        return jnp.asarray(rows, kind)

    with pytest.raises(ValueError, match="gives other rows for an example"):
        loaded(centred)
    silently(lambda indices: jnp.asarray(table[indices], kind))


def filled_from_before(indices):
    """Missing values, as the last row that has one: pandas' ffill."""
    rows = GAPS[indices].copy()
    for k in range(1, len(rows)):
        if np.isnan(rows[k, 0]):
            rows[k] = rows[k - 1]
    return rows


def with_neighbours(indices):
    """Sums over a window of time, of what the batch has of it."""
    near = np.abs(indices[:, None] - indices[None, :]) <= 8
    return near.astype(np.float32) @ DATA[indices]


def cut_off(indices):
    rows = DATA[indices]
    return np.minimum(rows, rows.mean(0) + 1.5 * rows.std(0))


GAPS = np.where(np.arange(ROWS)[:, None] % 32 < 8, np.nan, DATA[:, :1])


@pytest.mark.parametrize("load", [filled_from_before, with_neighbours, cut_off])
def test_rows_that_depend_on_a_few_others_are_seen(load):
    """Halves of a batch have their neighbours with them, and the three rows alone were mostly not concerned."""
    for seed in range(10):
        some = np.random.default_rng(seed).permutation(ROWS)[:48]
        with pytest.raises(ValueError, match="gives other rows for an example"):
            loaded(load, np.sort(some))


def test_a_column_that_ends_in_equal_numbers_is_right_beside_one_that_does_not():
    costs = jnp.asarray(np.maximum(np.arange(ROWS, 0, -1.0) - 20, 0))
    whole = jnp.asarray(DATA)
    silently(lambda indices: (whole[indices], costs[indices]))


def test_numbers_in_another_order_of_bytes_are_right():
    labels = np.arange(ROWS).astype(">i4")
    for given in (labels, lambda indices: labels[indices]):
        np.testing.assert_array_equal(silently(given), SOME)


def test_a_column_in_small_units_is_not_hidden_by_one_in_large_units():
    """Missing values, filled with the batch's mean beside incomes, moved the sum by 8.5 clip norms."""
    table = np.concatenate([DATA, DICE.normal(60_000, 20_000, size=(ROWS, 1)).astype(np.float32)], axis=1)
    table[::3, 1] = np.nan

    def filled(indices):
        rows = table[indices]
        rows[:, 1] = np.where(np.isnan(rows[:, 1]), np.nanmean(rows[:, 1]), rows[:, 1])
        return rows

    with pytest.raises(ValueError, match=r"gives other rows for an example"):
        loaded(filled)


@pytest.mark.parametrize(("share", "size"), [(0.5, 12), (0.5, 50), (0.5, 200), (0.02, 200)])
def test_weights_by_the_classes_of_a_batch_do_not_pass_by_luck(share, size):
    """Two halves that happened to be balanced alike let 5 to 46 percent pass."""
    for seed in range(40):
        dice = np.random.default_rng(seed)
        labels = (dice.random(400) < share).astype(np.int32)
        indices = np.sort(dice.choice(400, size, replace=False))
        weights = partial(_weights, labels)
        if len(set(labels[indices])) > 1:  # otherwise nothing shows in this batch
            with pytest.raises(ValueError, match=r"gives other rows for an example"):
                checks.varying_arrays(Loader(weights, 400), indices)


def _weights(labels, indices):
    found = labels[indices]
    return (len(found) / (2 * np.bincount(found, minlength=2)[found])).astype(np.float32), found


def test_rows_are_asked_for_apart_again_after_ten_batches():
    """Batches of one class show nothing of weights by class."""
    source = tiny.source_of(partial(_weights, np.r_[np.zeros(64, np.int32), LABELS[64:]]), ROWS)
    for _ in range(9):
        loaded(source, np.arange(40))
    with pytest.raises(ValueError, match=r"gives other rows for an example"):
        loaded(source, np.arange(40, 80))


def test_features_of_a_network_in_few_digits_are_right():
    """They round otherwise for another number of rows."""
    inputs, matrix = (DICE.normal(size=shape).astype(np.float32) for shape in ((ROWS, 256), (256, 256)))
    for kind in (jnp.float32, jnp.float16, jnp.bfloat16):
        silently(lambda indices, kind=kind: np.maximum(inputs[indices] @ matrix / 16, 0).astype(kind))


# --- statistics, orders and lengths -----------------------------------------------------------------------------


def standardized(rows):
    return (rows - rows.mean(0)) / (rows.std(0) + 1e-6)


def over_the_largest(rows):
    return rows / np.abs(rows).max()


def mixed_up(rows):
    return 0.5 * rows + 0.5 * np.roll(rows, 1, axis=0)


def with_imaginary_parts(rows):
    return rows + 1j * (rows - rows.mean(0))


@pytest.mark.parametrize("statistic", [standardized, over_the_largest, mixed_up, with_imaginary_parts])
@pytest.mark.parametrize("count", [9, 40])
def test_a_function_by_which_examples_depend_on_each_other_is_refused(statistic, count):
    """One example moved the sum of twelve by fourteen clip norms."""
    with pytest.raises(ValueError, match=r"gives other rows for an example if other examples are loaded with it"):
        loaded(lambda indices: statistic(DATA[indices]), np.arange(count))


@pytest.mark.parametrize("at_once", [1, 3])
def test_it_is_refused_before_anything_is_released(at_once):
    x, y = tiny.data()
    training = tiny.training(data=lambda indices: (standardized(x[indices]), y[indices]))
    with pytest.raises(ValueError, match="gives other rows for an example"):
        next(training.steps(training.init(tiny.first_weights()), at_once=at_once))
    assert training.spent() == 0


def in_order(indices):
    """For files that want their indices sorted."""
    return DATA[np.sort(indices)]


def test_a_function_that_sorts_is_refused_and_would_give_no_other_example(monkeypatch):
    """Once rows without an example were loaded as the first one, which came first and counted 38 times."""
    with pytest.raises(ValueError, match=r"keep the order of the indices"):
        loaded(in_order, np.arange(9))
    monkeypatch.setattr(loaders, "_ASKED_AT", ())  # the planted fault: it is not looked at
    np.testing.assert_array_equal(loaded(in_order, np.arange(5, 14)), DATA[5:14])


def test_functions_that_encode_or_use_their_memory_again_are_right():
    """Products of matrices round by the number of rows."""
    matrix, memory = np.random.default_rng(2).normal(size=(FEATURES, 300)).astype(np.float32), DATA.copy()

    def encoded(indices):
        return jax.jit(lambda rows: jnp.tanh(rows @ matrix @ matrix.T))(DATA[indices])

    def again(indices):
        memory[: len(indices)] = DATA[indices]
        return memory[: len(indices)]

    for load in (encoded, again):
        np.testing.assert_allclose(silently(load), load(SOME), rtol=1e-3, atol=1e-3)


def tokens_to_the_longest(indices):
    return np.ones((len(indices), 3 + max(indices)), np.int32)


def tokens_to_a_multiple(indices):
    return np.ones((len(indices), 64 if max(indices) > 100 else 8), np.int32)


def test_texts_padded_to_the_longest_are_refused_in_a_sentence():
    """Padded to a multiple of eight, all are alike at first; one long text moved the sum by 17 clip norms."""
    with pytest.raises(ValueError, match=r"gives rows of another shape .*pad rows to one length"):
        loaded(tokens_to_the_longest)
    source = tiny.source_of(tokens_to_a_multiple, ROWS)
    loaded(source, np.arange(9))
    with pytest.raises(ValueError, match=r"gives rows of another shape .*pad rows to one length"):
        loaded(source, np.arange(99, 108))


@pytest.mark.parametrize("count", [7, 11])
def test_a_function_with_another_number_of_rows_is_refused_in_a_sentence(count):
    with pytest.raises(ValueError, match=r"^data: must give one row for each index") as refused:
        loaded(lambda indices: DATA[:count], np.arange(9))
    assert not any(digit in str(refused.value) for digit in "0123456789")  # the size of a batch is secret


def test_functions_are_asked_again_at_the_first_call_alone():
    calls = []

    def load(indices):
        calls.append(len(indices))
        return DATA[indices]

    source = tiny.source_of(load, ROWS)
    per_batch = []
    for _ in range(3):
        loaded(source, np.arange(9))
        per_batch.append(len(calls))
        calls.clear()
    assert per_batch[0] > 10
    assert per_batch[1:] == [1, 1]


def test_a_function_that_uses_its_memory_again_gives_arrays_of_jax_that_are_read():
    """A copy to a device may be read later than the function is asked for the next batch: one example 15 times."""
    memory, wide = np.zeros((96, 20_000), np.float32), np.arange(ROWS, dtype=np.float32)

    def load(indices):
        memory[: len(indices)] = wide[indices, None]
        return jnp.asarray(memory[: len(indices)])

    source = tiny.source_of(load, ROWS, size=8)
    for _ in range(5):
        batches = [loaded(source, np.arange(k, k + 8)) for k in range(0, 64, 8)]
        assert [int(row[-1]) for batch in batches for row in np.asarray(batch)] == list(range(64))


# --- what is no data --------------------------------------------------------------------------------------------


def numbers():
    yield np.ones((ROWS, 2))


class Stream:
    def __getitem__(self, index):
        return DATA[index]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (numbers(), r"data='generator': .*this gives its own: give arrays, a data set"),
        (numbers, r"data='numbers': is a generator, .*give arrays, a data set"),
        (DataLoader(DATA), r"data='DataLoader': .*this gives its own: .*loader\.dataset"),
        (UserDict(x=DATA), r"data='UserDict': .*dict\(data\)"),
        ((DATA, np.float32(3)), r"data='float32': .*use np\.asarray"),
        (Stream(), r"data='Stream': .*give it __len__ and __getitem__; a stream cannot be used"),
        ((DATA, np.sum), r"a function stands by itself"),
    ],
)
def test_what_is_no_data_is_told_what_to_give(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny.source_of(given, ROWS)
    loaded(Stream().__getitem__)


def test_tables_and_tensors_are_told_how_to_become_arrays():
    frame, tensor = pytest.importorskip("pandas").DataFrame(DATA), pytest.importorskip("torch").tensor(DATA)
    for given, sentence in [(frame, r"data='DataFrame': .*\.to_numpy"), (tensor, r"data='Tensor': .*\.numpy")]:
        with pytest.raises(ValueError, match=sentence):
            tiny.source_of(given, ROWS)
