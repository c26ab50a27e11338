"""Data sets that give one example for an index: rows that depend on nothing else, random changes included."""

from __future__ import annotations

import random
import threading
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_training as tiny
from bandmf import Key
from bandmf.randomness import generators
from jax_training import EXAMPLES, data

ROWS = 32
X, Y = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32), np.arange(ROWS)
pytestmark = pytest.mark.usefixtures("compiled_quickly")


class Dataset:
    """Examples by a function of one index; remembers what it was asked for."""

    def __init__(self, example=lambda i: (X[i], int(Y[i])), length=ROWS):
        self._example, self._length, self.asked = example, length, []

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        self.asked.append(index)
        return self._example(index)


def loaded(given, indices=range(10), step=0, key=tiny.KEY):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tiny.loaded(given, indices, ROWS, step, key, size=16)


def noisy(index):
    drawn = np.random.normal(size=3).astype(np.float32)
    return X[index] + drawn, random.random(), torch.rand(2)


# --- rows -------------------------------------------------------------------------------------------------------


def test_rows_are_the_examples_one_by_one():
    dataset = Dataset()
    x, y = loaded(dataset, [7, 3, 29])
    np.testing.assert_array_equal(x, X[[7, 3, 29]])
    np.testing.assert_array_equal(y, [7, 3, 29])
    assert all(type(index) is int for index in dataset.asked)


def test_every_example_is_loaded_once_for_a_batch():
    """Rows that no example fills are none to load."""
    dataset = Dataset()
    loaded(dataset, range(5, 11))
    assert sorted(dataset.asked) == list(range(5, 11))


@pytest.mark.parametrize("at_once", [1, 4])
def test_training_with_a_data_set_is_that_with_arrays(at_once):
    x, y = data()
    expected = tiny.weights_of(at_once=at_once)
    for given in (Dataset(lambda i: (x[i], y[i]), EXAMPLES), (Dataset(lambda i: x[i], EXAMPLES), y)):
        np.testing.assert_array_equal(tiny.weights_of(data=given, at_once=at_once), expected)


def test_data_sets_of_other_libraries_are_read():
    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    table = pytest.importorskip("datasets").Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    found, of_table, of_arrays = (loaded(given) for given in (tensors, table, table.with_format("numpy")))
    for x, y in (found, (of_table["x"], of_table["y"]), (of_arrays["x"], of_arrays["y"])):
        np.testing.assert_array_equal(x[:10], X[:10])
        np.testing.assert_array_equal(y[:10], Y[:10])
    np.testing.assert_array_equal(loaded(range(ROWS))[:10], Y[:10])
    np.testing.assert_array_equal(loaded(Dataset(lambda i: list(X[i])))[:10], X[:10])
    picture = pytest.importorskip("PIL.Image").fromarray
    found = loaded(Dataset(lambda i: picture(np.full((2, 3), i, np.uint8))))
    np.testing.assert_array_equal(found[:10, 0, 0], Y[:10])


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", [np.zeros, torch.zeros])
def test_a_data_set_that_uses_its_memory_again_gives_each_example_its_own_row(count, kind):
    """Decoders do. Once all rows of a batch were the last example, which moved the sum by 18 clip norms."""
    memory, turns = [kind((3,)) for _ in range(count)], iter(range(10**6))

    def example(index):
        buffer = memory[next(turns) % count]
        buffer[:] = kind((3,)) + torch.tensor(X[index]) if kind is torch.zeros else X[index]
        return buffer

    np.testing.assert_array_equal(loaded(Dataset(example))[:10], X[:10])


def noted(at_once=1, **more):
    """By step and index, what a run gives of examples with random changes."""
    x, _ = data()
    dataset = Dataset(lambda i: (x[i] + np.random.normal(size=5).astype(np.float32), np.int32(i)), EXAMPLES)

    def loss(weights, example):
        return tiny.loss(weights, (example[0], example[0][:1]))

    found, training = {}, tiny.training(loss=loss, data=dataset, **more)
    load = training._source.rows

    def watched(batches, step, key):
        rows = load(batches, step, key)
        for place in zip(*np.nonzero(rows.places >= 0), strict=True):
            changed, number = (np.asarray(leaf[place]) for leaf in rows.data)
            assert number == rows.places[place]
            found[step + int(place[0]), int(number)] = changed.tobytes()
        return rows

    training._source.rows = watched
    tiny.trained(training, at_once=at_once, until=4)
    return found


def test_random_changes_of_a_run_are_secret_and_of_one_step_however_rows_are_loaded():
    """The key of the run, the step and the index decide."""
    found = noted()
    assert len(found) > 20
    assert noted(at_once=4) == noted(micro_batch=3) == found
    assert not set(found.values()) & set(noted(key=Key(bytes([1] * 32))).values())
    assert len(set(found.values())) == len(found)


# --- random changes ---------------------------------------------------------------------------------------------


def moved_by_one_more():
    """How much the rows of other examples move when one more is loaded before them."""
    few, more = (loaded(Dataset(noisy), some) for some in ([8, 9], [2, 8, 9]))
    return max(float(jnp.abs(a - b[1:]).max()) for a, b in zip(few, more, strict=True))


def test_random_changes_are_the_examples_own(monkeypatch):
    """With public numbers, one example more would change what all others contribute."""
    assert moved_by_one_more() == 0
    np.random.seed(0)
    # The planted error: one stream for all examples.
    monkeypatch.setattr(generators, "seed", lambda secret: None)
    assert moved_by_one_more() > 0.1


def test_random_changes_differ_by_step_and_run_and_are_repeated():
    first = loaded(Dataset(noisy))
    for part, same in zip(first, loaded(Dataset(noisy), range(9, -1, -1)), strict=True):
        np.testing.assert_array_equal(part[:10], same[9::-1])
    for other in (loaded(Dataset(noisy), step=1), loaded(Dataset(noisy), key=Key(bytes([1] * 32)))):
        for one, part in zip(first, other, strict=True):
            assert not np.any(np.asarray(one[:10]) == np.asarray(part[:10]))


def test_a_restart_repeats_random_changes(tmp_path):
    """Steps after the last checkpoint are released again, and may be only with the same sums."""
    x, y = data()
    dataset = Dataset(lambda i: (x[i] + np.random.normal(size=5).astype(np.float32), y[i]), EXAMPLES)
    training = tiny.training(data=dataset, folder=tmp_path / "run", save_every=3)
    tiny.trained(training, until=5)
    training._let_go()
    np.random.seed(5)
    found = tiny.weights_of(data=dataset, folder=tmp_path / "run", save_every=3)
    np.testing.assert_array_equal(found, tiny.weights_of(data=dataset))


def test_the_numbers_of_the_user_are_not_disturbed():
    def seeded():
        np.random.seed(3), random.seed(3), torch.manual_seed(3)

    def drawn():
        return np.random.random(), random.random(), torch.rand(1).item()

    seeded()
    expected = drawn()
    seeded()
    loaded(Dataset(noisy))
    assert drawn() == expected

    def failing(index):
        np.random.random()
        raise OSError("gone")

    np.random.seed(3)
    with pytest.raises(OSError, match="gone"):
        loaded(Dataset(failing))
    assert np.random.random() == expected[0]


def test_two_threads_that_load_leave_the_numbers_of_the_user_as_they_were():
    """Each would keep what the other has seeded for the user's own."""
    begun = threading.Barrier(2, timeout=10)

    def slow(index):
        time.sleep(0.002)
        return noisy(index)

    def load():
        begun.wait()
        loaded(Dataset(slow))

    np.random.seed(3)
    expected = np.random.get_state()[1].tolist()
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.random.get_state()[1].tolist() == expected


def test_a_generator_of_torch_of_another_kind_is_warned_of(monkeypatch):
    """Of its seed torch uses 32 bits, which can be guessed."""
    monkeypatch.setattr(generators, "_CPU_STATE", 1)
    with pytest.warns(UserWarning, match="seeded with 32 bits only"):
        generators.seed_torch(torch.Generator(), bytes(32))


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (lambda i: X[i, : 1 + i % 2], r"data='Dataset': examples must have the same arrays, .*pad them"),
        (lambda i: i if i % 2 else float(i), r"one shape and type; .*give numbers one type"),
        (lambda i: {"x": i} if i % 2 else {"z": i}, r"examples must have the same arrays"),
        (lambda i: (X[i], "Mr. Secret"), r"type in an example='str': must be a number or an array"),
        (lambda i: [[1.0], [2.0, 3.0]], r"type in an example='list'"),
        (lambda i: np.array(["Mr. Secret"]), r"type in an example='ndarray'"),
    ],
)  # fmt: skip
def test_examples_that_cannot_be_rows_are_refused_without_their_values(example, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        loaded(Dataset(example))
    assert "Secret" not in str(error.value)


def test_a_batch_that_is_alike_in_itself_but_not_like_others_is_refused():
    source = tiny.source_of(Dataset(lambda i: i if i < 16 else float(i)), ROWS)
    loaded(source, range(10))
    with pytest.raises(ValueError, match="rows of another shape"):
        loaded(source, range(20, 30))


@pytest.mark.parametrize(
    "given",
    [
        lambda square: square,
        tuple,
        lambda square: {"x": square, "y": Y},
        lambda square: (square, Y),
        lambda square: [tuple(square), Y],
    ],
    ids=["list", "tuple", "in a dictionary", "in a pair", "in a list"],
)
def test_a_list_that_may_be_of_examples_or_of_columns_is_refused(given):
    """Read as columns, an example is a row of everybody: up to 30 clip norms in steps that it is not in."""
    square = [np.full((ROWS, 2), i) for i in range(ROWS)]
    for each in (square, [[float(i)] * ROWS for i in range(ROWS)]):
        with pytest.raises(ValueError, match=r"len\(data\)=32: .*examples or columns; stack examples"):
            loaded(given(each))


def test_lists_of_examples_are_data_sets_wherever_they_are():
    square, narrow = [np.full((ROWS, 2), i) for i in range(ROWS)], [np.full(2, i) for i in range(ROWS)]
    np.testing.assert_array_equal(loaded(np.stack(square))[:10, 0, 0], range(10))
    np.testing.assert_array_equal(loaded(narrow)[:10, 0], range(10))
    found = loaded({"x": narrow, "y": Y.tolist(), "z": (tuple(narrow), Y)})
    for part in (found["x"][:, 0], found["y"], found["z"][0][:, 0], found["z"][1]):
        np.testing.assert_array_equal(part[:10], range(10))


def test_a_data_set_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"len\(data\)=31: must be the plan's examples=32"):
        loaded(Dataset(length=ROWS - 1))
