"""Functions for the data in JAX: the row of an example is its own, whatever else is asked for, and in every step."""

from __future__ import annotations

import warnings
from collections import UserDict
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from torch.utils.data import DataLoader

from bandmf import Key
from bandmf.jax.training.loaders import Loader, checks
from jax_training import EXAMPLES, Source, Training, data, flat, open_run, plan

ROWS, FEATURES = 128, 4
DICE = np.random.default_rng(3)
DATA = DICE.normal(size=(ROWS, FEATURES)).astype(np.float32)
LABELS = (DICE.random(ROWS) < 0.4).astype(np.int32)
SOME = np.sort(DICE.choice(ROWS, 40, replace=False))
VARIES = r"gives other rows for the same indices each time, in "


def loaded(load, indices=SOME, examples=ROWS):
    return Source(load, examples, examples, 48, None).rows(indices)


def silently(load, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loaded(load, **more)


# --- indices ----------------------------------------------------------------------------------------------------


def test_a_function_that_changes_its_indices_in_place_gives_the_same_rows_in_every_step(tmp_path):
    """Once the first step was trained on rows that were moved twice, and a restart was refused."""
    x, y = (np.concatenate([leaf, leaf, 0 * leaf]) for leaf in data())

    def load(indices):
        indices += EXAMPLES  # where the training split begins
        return x[indices], y[indices]

    chosen = plan()
    training, run = Training(chosen), open_run(chosen, tmp_path)
    tree = training.steps(run, *training.begin(), until=3, data=load)
    run.save(tree)
    whole = training.steps(run, *tree)[0]  # on the rows that are meant
    run.close()
    again = open_run(chosen, tmp_path)
    found = training.steps(again, *again.restore(training.begin()), data=load)[0]
    np.testing.assert_array_equal(flat(found), flat(whole))


# --- rows that vary ---------------------------------------------------------------------------------------------


def augmented(indices):
    return DATA[indices] + 0.1 * np.random.default_rng().normal(size=(len(indices), FEATURES)).astype(
        np.float32
    )


def balanced(indices):
    labels = LABELS[indices]
    return (len(labels) / (2 * np.bincount(labels, minlength=2)[labels])).astype(np.float32)


def test_random_changes_in_one_array_excuse_no_other():
    """Weights by the classes of a batch, or standardized targets, once passed beside random crops."""
    with pytest.raises(
        ValueError, match=r"gives other rows for an example if other examples are loaded with it"
    ):
        loaded(lambda indices: (augmented(indices), balanced(indices)))


def test_random_changes_are_warned_of_once_and_the_arrays_are_named():
    source = Source(lambda indices: {"x": augmented(indices), "y": LABELS[indices]}, ROWS, ROWS, 48, None)
    with pytest.warns(
        UserWarning, match=VARIES + r"data\['x'\], and .*no statistics.*[Aa]fter a restart"
    ) as caught:
        [source.rows(SOME) for _ in range(12)]
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
            loaded(load, indices=np.sort(some), examples=ROWS)


def test_a_column_that_ends_in_equal_numbers_is_right_beside_one_that_does_not():
    costs = jnp.asarray(np.maximum(np.arange(ROWS, 0, -1.0) - 20, 0))
    whole = jnp.asarray(DATA)
    silently(lambda indices: (whole[indices], costs[indices]))


def test_numbers_in_another_order_of_bytes_are_right():
    labels = np.arange(ROWS).astype(">i4")
    silently(lambda indices: labels[indices])


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
                checks.varying_arrays(Loader(weights, 400, Key()), indices, 0 * indices)


def _weights(labels, indices):
    found = labels[indices]
    return (len(found) / (2 * np.bincount(found, minlength=2)[found])).astype(np.float32), found


def test_rows_are_asked_for_apart_again_after_ten_batches():
    """Batches of one class show nothing of weights by class."""
    source = Source(partial(_weights, np.r_[np.zeros(64, np.int32), LABELS[64:]]), ROWS, ROWS, 48, None)
    for _ in range(9):
        source.rows(np.arange(40))
    with pytest.raises(ValueError, match=r"gives other rows for an example"):
        source.rows(np.arange(40, 80))


def test_features_of_a_network_in_few_digits_are_right():
    """They round otherwise for another number of rows."""
    inputs, matrix = (DICE.normal(size=shape).astype(np.float32) for shape in ((ROWS, 256), (256, 256)))
    for kind in (jnp.float32, jnp.float16, jnp.bfloat16):
        silently(lambda indices, kind=kind: np.maximum(inputs[indices] @ matrix / 16, 0).astype(kind))


# --- fewer examples than planned --------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [ROWS // 2, ROWS - 7])
def test_an_array_of_jax_with_too_few_examples_is_refused(there):
    """It gives its last row for all indices beyond it, whose example counted up to 52 times."""
    few = jnp.asarray(DATA[:there])
    with pytest.raises(
        ValueError, match=r"the last 8 examples, .*one row; .*plan for the examples that there are"
    ):
        loaded(lambda indices: few[indices])


def test_an_array_with_too_few_examples_is_refused_beside_one_that_has_enough():
    """Beside a number of each example, one of 1000 added 32 clip norms."""
    few, labels = jnp.asarray(DATA[: ROWS - 20]), np.arange(ROWS) % 2
    with pytest.raises(ValueError, match=r"in one of its arrays the last 8 examples"):
        loaded(lambda indices: (few[indices], jnp.asarray(indices)))
    with pytest.raises(ValueError, match=r"in one of its arrays the last 8 examples"):
        loaded(lambda indices: (few[indices], jnp.asarray(LABELS)[indices]))
    with pytest.raises(ValueError, match=r"in one of its arrays the last 8 examples"):
        loaded(lambda indices: (few[indices], labels[indices]))  # of which NumPy says that there are no more
    with pytest.warns(UserWarning, match=r"in one of its arrays the last 8 examples"):
        loaded(lambda indices: (np.asarray(few[indices]), labels[indices]))


@pytest.mark.parametrize("missing", [1, 6])
def test_a_few_examples_that_an_array_of_jax_lacks_are_warned_of(missing):
    """Beside labels of NumPy, which end with an error, nothing was said: up to three clip norms."""
    few = jnp.asarray(DATA[: ROWS - missing])
    for others in (LABELS, jnp.asarray(LABELS)):
        with pytest.warns(UserWarning, match=r"in one of its arrays the last 2 examples"):
            loaded(lambda indices, others=others: (few[indices], others[indices]))


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_labels_that_end_alike_are_not_warned_of(share):
    whole = jnp.asarray(DATA)
    for seed in range(20):
        labels = jnp.asarray(np.random.default_rng(seed).random(ROWS) < share)
        silently(lambda indices, labels=labels: (whole[indices], labels[indices]))


def test_masks_of_full_texts_at_the_end_are_not_refused():
    lengths = np.random.default_rng(0).integers(8, 28, ROWS).clip(max=20)
    lengths[-8:] = 20
    masks, tokens = (np.arange(20) < lengths[:, None]), np.arange(ROWS * 20).reshape(ROWS, 20)
    on_device = jnp.asarray(masks), jnp.asarray(tokens)
    silently(lambda indices: tuple(leaf[indices] for leaf in on_device))


def test_rows_of_zeros_excuse_no_array_that_is_too_short():
    """Where one row in six is empty, as the last one, a change of that example moved the sum by 17 clip norms."""
    sparse = DATA[: ROWS // 2].copy()
    sparse[::6] = 0
    sparse[-1] = 0
    few = jnp.asarray(sparse)
    with pytest.raises(ValueError, match=r"in one of its arrays the last 8 examples"):
        loaded(lambda indices: few[indices])


def test_a_function_that_uses_its_memory_again_gives_arrays_of_jax_that_are_read():
    """A copy to a device may be read later than the function is asked for the next piece: one example 15 times."""
    memory, wide = np.zeros((8, 100_000), np.float32), np.arange(ROWS, dtype=np.float32)

    def load(indices):
        memory[: len(indices)] = wide[indices, None]
        return jnp.asarray(memory[: len(indices)])

    source = Source(load, ROWS, ROWS, 8, None)
    for _ in range(5):
        pieces = [source.rows(np.arange(k, k + 8)) for k in range(0, 64, 8)]
        assert [int(row[-1]) for piece in pieces for row in np.asarray(piece.data)] == list(range(64))


def test_two_equal_examples_at_the_end_are_not_refused():
    """Nothing tells them from one that is missing in an array of JAX; in one of NumPy, none can be missing."""
    twice = DATA.copy()
    twice[-1] = twice[-2]
    on_device = jnp.asarray(twice)
    with pytest.warns(UserWarning, match=r"the last 2 examples, .*arrays of NumPy, which raise IndexError"):
        loaded(lambda indices: on_device[indices])
    silently(lambda indices: twice[indices])
    silently(lambda indices: jnp.asarray(DATA)[indices])
    silently(lambda indices: jnp.ones((ROWS, 2))[indices])


# --- chunks -----------------------------------------------------------------------------------------------------


def test_what_is_known_of_a_function_holds_for_all_chunks():
    """Once it was asked seven times for each chunk, and texts could be longer in another one."""
    calls = []

    def load(indices):
        calls.append(len(indices))
        return tuple(leaf[indices] for leaf in data())

    chosen = plan()
    training, run = Training(chosen), open_run(chosen)
    weights, state = training.begin()
    per_chunk = []
    for chunk in run.chunks(load, steps=3):
        per_chunk.append(len(calls))
        calls.clear()
        weights, state = run.release_chunk(training.advance, chunk, weights, state)
    assert per_chunk == [15, 1, 1, 1]


def test_texts_that_are_longer_in_a_later_chunk_are_refused():
    source = Source(lambda indices: np.ones((len(indices), 8 if max(indices) < 64 else 16)), ROWS, 4, 8, None)
    source.holding(9).many([np.arange(9), np.arange(9, 18)])
    with pytest.raises(ValueError, match=r"gives rows of another shape"):
        source.holding(9).many([np.arange(64, 73), np.arange(73, 82)])


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
        Source(given, ROWS, ROWS, 48, None)
    loaded(Stream().__getitem__)


def test_tables_and_tensors_are_told_how_to_become_arrays():
    frame, tensor = pytest.importorskip("pandas").DataFrame(DATA), pytest.importorskip("torch").tensor(DATA)
    for given, sentence in [
        (frame, r"data='DataFrame': .*\.to_numpy"),
        (tensor, r"data='Tensor': .*\.numpy"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            Source(given, ROWS, ROWS, 48, None)
