"""What one example adds to the sum of a batch in JAX, where the function given to batch.sum does more than clip."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bandmf.jax.training.batches import Batch
from bandmf.jax.training.trials import comparing, sizes
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bandmf.jax import Clipped, clipped_gradient
from bandmf.jax.training import trials
from jax_training import Source
from sweeps import in_turn, spread

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROWS, FEATURES = 128, 5
DATA = np.random.default_rng(3).normal(size=(ROWS, FEATURES)).astype(np.float32)
WEIGHTS = {"a": jnp.ones((FEATURES, 3)), "b": jnp.full((FEATURES, 2), 0.5)}


def loss(weights, row):
    return jnp.sum(jnp.tanh(row @ weights["a"])) + 3 * jnp.sum(jnp.sin(row @ weights["b"]))


def weighted_loss(weights, row):
    return row[1] * loss(weights, row[0])


def half(name):
    return lambda part, row: loss(WEIGHTS | {name: part[name]}, row)


GRADIENT = jax.jit(clipped_gradient(loss, clip_norm=1.0))
OTHER = jax.jit(clipped_gradient(lambda weights, row: loss(weights, -row), clip_norm=1.0))
WEIGHTED = None  # where it is needed
HALVES = {name: jax.jit(clipped_gradient(half(name), clip_norm=1.0)) for name in WEIGHTS}


def a_batch(capacity=ROWS):
    return Batch(0, np.arange(capacity - 7), Source(DATA, ROWS, ROWS, capacity, None))


def released(function, clip_norm=1.0):
    batch = a_batch()
    found = batch.sum(partial(function, WEIGHTS))
    batch.check_sum(found if isinstance(found, Clipped) else Clipped(found, clip_norm))


# --- examples that depend on each other ----------------------------------------------------------------------


def normalized(weights, rows, mask, root_mean_square=False):
    """A batch norm by hand, whose mask is right."""
    rows, kept = jnp.where(mask[:, None], rows, 0), mask[:, None]
    mean = 0 if root_mean_square else rows.sum(0) / jnp.maximum(mask.sum(), 1)
    spread = jnp.sqrt((jnp.square(rows - mean) * kept).sum(0) / jnp.maximum(mask.sum(), 1) + 1e-6)
    return GRADIENT(weights, (rows - mean) / spread, mask=mask)


def scaled_by_the_largest(weights, rows, mask):
    rows = jnp.where(mask[:, None], rows, 0)
    return GRADIENT(weights, rows / jnp.maximum(jnp.abs(rows).max(), 1e-6), mask=mask)


def weighted_by_classes(weights, rows, mask):
    """Where the classes are whole numbers, and the weights a matter of the batch."""
    kind = jnp.where(mask, rows[:, 0] > 0, False)
    weight = mask.sum() / jnp.maximum(jnp.where(kind, kind.sum(), (mask & ~kind).sum()), 1)
    return WEIGHTED(weights, (rows, weight), mask=mask)


@pytest.mark.parametrize(
    ("function", "clip_norm"),
    in_turn(
        [normalized, partial(normalized, root_mean_square=True), scaled_by_the_largest, weighted_by_classes],
        [1.0, 0.01],
    ),
)
def test_statistics_of_a_batch_are_refused(function, clip_norm, monkeypatch):
    """One example moved the sum of 512 by 110 clip norms; also where all gradients are far above the clip norm."""
    monkeypatch.setitem(globals(), "GRADIENT", jax.jit(clipped_gradient(loss, clip_norm=clip_norm)))
    monkeypatch.setitem(globals(), "WEIGHTED", jax.jit(clipped_gradient(weighted_loss, clip_norm=clip_norm)))
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        a_batch().sum(partial(function, WEIGHTS))


def weighted_by_the_size_of_the_batch(share, dtype, weights, rows, mask):
    """Halves count 1 + share / 2 times and the whole 1 + share times: all else about it is right."""
    weight = 1 + share * mask.mean()
    return jax.tree.map(lambda leaf: (weight * leaf).astype(dtype), GRADIENT(weights, rows, mask=mask))


@pytest.mark.parametrize(("share", "dtype"), [(2e-3, jnp.float32), (0.4, jnp.bfloat16)])
def test_statistics_that_are_just_above_rounding_are_refused(share, dtype, monkeypatch):
    """By a tenth of a percent where sums have 24 bits, and by a fifth where they have eight."""
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        a_batch().sum(partial(weighted_by_the_size_of_the_batch, share, dtype, WEIGHTS))
    # Nor is a right sum refused, and no other check would have seen this one: with more tolerance it passes.
    a_batch().sum(partial(weighted_by_the_size_of_the_batch, 0.0, dtype, WEIGHTS))
    coarse = {kind: 30 * tolerance for kind, tolerance in comparing.ADDED.items()}
    monkeypatch.setattr(comparing, "ADDED", coarse)
    a_batch().sum(partial(weighted_by_the_size_of_the_batch, share, dtype, WEIGHTS))


def test_statistics_of_a_batch_pass_where_sums_are_compared_coarsely(monkeypatch):
    """The planted fault: halves of a batch have much the same statistics."""
    monkeypatch.setattr(comparing, "ADDED", {True: 1e9, False: 1e9})
    one, other = a_batch(), DATA.copy()
    other[0] *= 1000
    total = one.sum(partial(normalized, WEIGHTS)).total
    changed = normalized(WEIGHTS, jnp.asarray(other[: ROWS - 7]), jnp.ones(ROWS - 7, bool)).total
    assert jnp.linalg.norm(total["a"] - changed["a"]) > 5


def test_statistics_pass_where_clipping_hides_them(monkeypatch):
    """The planted fault: rows are tried at their own size alone, where every gradient is far above the clip norm."""
    monkeypatch.setattr(sizes, "_SCALES", ())
    monkeypatch.setattr(sizes, "_first", list)
    monkeypatch.setitem(globals(), "GRADIENT", jax.jit(clipped_gradient(square, clip_norm=1e-4)))
    a_batch().sum(partial(scaled_by_the_largest, WEIGHTS))
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "GRADIENT", jax.jit(clipped_gradient(square, clip_norm=1e-4)))
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        a_batch().sum(partial(scaled_by_the_largest, WEIGHTS))


def dropped_if_not_finite(weights, rows, mask):
    """A guard that is often written: no step where a loss is not finite."""
    values = jax.vmap(partial(square, weights))(rows)
    is_good = jnp.all(jnp.isfinite(jnp.where(mask, values, 0)))
    return jax.tree.map(lambda leaf: jnp.where(is_good, leaf, 0), GRADIENT(weights, rows, mask=mask))


def test_a_guard_that_drops_a_batch_for_one_example_is_refused(monkeypatch):
    """An example that is not finite took all others with it: eight clip norms."""
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        a_batch().sum(partial(dropped_if_not_finite, WEIGHTS))
    a_batch().sum(partial(GRADIENT, WEIGHTS))
    monkeypatch.setattr(sizes, "_first", list)  # the planted fault: no row is not finite
    a_batch().sum(partial(dropped_if_not_finite, WEIGHTS))


def square(weights, row):
    return jnp.sum((row @ weights["a"]) ** 2)


@pytest.mark.parametrize("kind", [np.float32, np.complex64])
def test_statistics_of_rows_of_any_kind_are_refused(kind):
    """Once complex rows had one size alone in all trials, at which clipping hid this."""
    gradient = clipped_gradient(lambda weights, row, size: weights @ jnp.abs(row) / size, clip_norm=1.0)

    def by_size(rows, mask):
        size = jnp.sqrt(jnp.mean(jnp.where(mask[:, None], jnp.abs(rows), 0) ** 2)) * 1e-3 + 1e-9
        return gradient(jnp.zeros(FEATURES), rows, size, mask=mask)

    rows = (1e4 * (1 + np.abs(DATA))).astype(kind)
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        Batch(0, np.arange(50), Source(rows, ROWS, ROWS, 60, None)).sum(by_size)


@pytest.mark.parametrize("kind", [np.float32, np.complex64])
def test_rows_without_an_example_add_nothing_of_any_kind(kind):
    """Where a mask is forgotten: in complex rows, zeros counted as 31 examples."""

    def square_of(weights, row):
        return (jnp.abs(row).sum() * weights[0] + weights[1] - 1) ** 2

    gradient = partial(clipped_gradient(square_of, clip_norm=1.0), jnp.zeros(2))
    rows = Source(DATA.astype(kind), ROWS, ROWS, 40, None).rows(np.arange(9))
    np.testing.assert_array_equal(gradient(rows.data).total, gradient(rows.data, mask=rows.mask).total)


def root(number):
    """By a loop that waits for an absolute error."""
    ends = partial(lax.while_loop, lambda found: jnp.abs(found * found - number) > 1e-4)
    return ends(lambda found: 0.5 * (found + number / found), number)


@jax.custom_jvp
def roots(row):
    return jax.vmap(root)(row)


roots.defjvps(lambda moved, found, row: moved / (2 * found))


def test_a_loop_that_would_not_end_for_large_numbers_is_tried_with_small_ones():
    """With rows a million times as large, batch.sum never came back."""
    gradient = jax.jit(clipped_gradient(lambda weights, row: loss(weights, roots(row)), clip_norm=1.0))
    batch = Batch(0, np.arange(9), Source(1 + np.abs(DATA), ROWS, ROWS, 16, None))
    with pytest.warns(
        UserWarning, match=r"multiplied by 1e\+06 was left out, .*a loop that ends by a condition"
    ):
        batch.check_sum(batch.sum(partial(gradient, WEIGHTS)))


def test_a_function_that_looks_at_the_range_of_its_rows_is_not_refused():
    def in_range(weights, rows, mask):
        if np.abs(np.asarray(rows)[np.asarray(mask)]).max(initial=0) > 10:
            raise ValueError("rows must lie between -10 and 10")
        return GRADIENT(weights, rows, mask=mask)

    def with_a_statistic(weights, rows, mask):
        return in_range(
            weights, rows / jnp.maximum(jnp.abs(jnp.where(mask[:, None], rows, 0)).max(), 1e-6), mask
        )

    batch = a_batch()
    with pytest.warns(
        UserWarning, match=r"multiplied by 1e\+06 was left out, .*it failed: ValueError\('rows must lie"
    ):
        batch.check_sum(batch.sum(partial(in_range, WEIGHTS)))
    with pytest.raises(ValueError, match=r"^sum: .*examples depend on each other"):
        a_batch().sum(partial(with_a_statistic, WEIGHTS))


# --- how much one example adds ---------------------------------------------------------------------------------


def four_times(weights, rows, mask):
    """An augmentation: each copy is clipped by itself."""
    return GRADIENT(weights, jnp.repeat(rows, 4, axis=0), mask=jnp.repeat(mask, 4))


def two_losses(weights, rows, mask):
    return jax.tree.map(jnp.add, GRADIENT(weights, rows, mask=mask), OTHER(weights, -rows, mask=mask))


def scaled(factor, weights, rows, mask):
    return jax.tree.map(lambda leaf: factor * leaf, GRADIENT(weights, rows, mask=mask))


def clipped_apart(weights, rows, mask):
    parts = {name: HALVES[name]({name: weights[name]}, rows, mask=mask) for name in weights}
    return Clipped({name: part.total[name] for name, part in parts.items()}, 1.0)


def not_clipped(weights, rows, mask):
    def total(weights):
        losses = jax.vmap(partial(loss, weights))(jnp.where(mask[:, None], rows, 0))
        return jnp.sum(jnp.where(mask, 10 * losses, 0))

    return jax.grad(total)(weights)


SCALED = [partial(scaled, factor) for factor in (5, 1.5, 1.001)]


@pytest.mark.parametrize("function", [four_times, two_losses, *SCALED, clipped_apart, not_clipped])
def test_one_example_that_adds_more_than_the_clip_norm_is_refused(function):
    with pytest.raises(ValueError, match=r"^step=0: total gets from one example alone more than clip_norm=1"):
        released(function)


def scaled_by(scale, rows, mask):
    return jax.tree.map(lambda leaf: scale * leaf, not_clipped(WEIGHTS, rows, mask))


def test_what_was_never_clipped_is_noticed_when_gradients_grow():
    """At first they are far below the clip norm."""
    source, refused = Source(DATA, ROWS, ROWS, 16, None), []
    for step in range(12):
        batch, scale = Batch(step, np.arange(9), source), jnp.float32(1e-4 * 10.0 ** min(step, 6))
        total = batch.sum(lambda rows, mask, scale=scale: scaled_by(scale, rows, mask))
        try:
            batch.check_sum(Clipped(total, 1.0))
        except ValueError:
            refused.append(step)
    assert refused == [9, 10, 11]


def test_one_example_that_adds_more_passes_where_none_is_tried_alone(monkeypatch):
    """The planted fault."""
    monkeypatch.setattr(trials, "_spread", lambda rows: [])
    released(two_losses)


def test_a_sum_does_not_change_its_clip_norm():
    batch = a_batch()
    wide = jax.jit(clipped_gradient(loss, clip_norm=10.0))
    total = batch.sum(partial(wide, WEIGHTS)).total
    with pytest.raises(ValueError, match=r"total was clipped to 10\.0, not to clip_norm=1;"):
        batch.check_sum(Clipped(total, 1.0))


def test_a_sum_that_stands_for_two_parameters_counts_twice():
    batch = a_batch()
    total = batch.sum(partial(HALVES["b"], {"b": WEIGHTS["b"]})).total["b"]
    batch.check_sum(Clipped({"tied": total}, 1.0))
    with pytest.raises(ValueError, match="from one example alone"):
        batch.check_sum(Clipped({"tied": total, "again": total}, 1.0))


@pytest.mark.parametrize("scale", spread([1e-36, 1e-30, 1e-20, 1e15, 1e30], 3))
def test_very_small_and_very_large_gradients_are_released(scale):
    gradient = jax.jit(clipped_gradient(lambda weights, row: scale * loss(weights, row), clip_norm=1.0))
    batch = a_batch()
    batch.check_sum(batch.sum(partial(gradient, WEIGHTS)))


@pytest.mark.parametrize(
    ("capacity", "function"),
    in_turn([1, 2, 3, ROWS], [GRADIENT, lambda *given, mask: GRADIENT(*given, mask=mask).total]),
)
def test_right_sums_are_released(function, capacity):
    batch = Batch(0, np.arange(1), Source(DATA, ROWS, ROWS, capacity, None))
    found = batch.sum(partial(function, WEIGHTS))
    batch.check_sum(found if isinstance(found, Clipped) else Clipped(found, 1.0))


# --- loaders and results that are less regular -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:data='load'. gives other rows for the same indices")
def test_a_loader_that_augments_at_random_is_not_refused():
    """Once one in three was, where it changes few rows."""
    dice = np.random.default_rng(1)

    def load(indices):
        return np.where(dice.random((len(indices), 1)) < 0.05, -DATA[indices], DATA[indices])

    for _ in range(5):
        source = Source(load, ROWS, ROWS, 16, None)
        Batch(0, np.arange(9), source).sum(partial(GRADIENT, WEIGHTS))


def standardized(rows):
    return (rows - rows.mean(0)) / rows.std(0)


def over_the_largest(rows):
    return rows / np.abs(rows).max()


def mixed_up(rows):
    return 0.5 * rows + 0.5 * np.roll(rows, 1, axis=0)


@pytest.mark.parametrize("statistic", [standardized, over_the_largest, mixed_up])
def test_a_loader_by_which_examples_depend_on_each_other_is_refused(statistic):
    """One example moved the sum of twelve by fourteen clip norms; and padding was loaded as the first example."""
    source = Source(lambda indices: statistic(DATA[indices]), ROWS, ROWS, 16, None)
    with pytest.raises(
        ValueError, match=r"gives other rows for an example if other examples are loaded with it"
    ):
        Batch(0, np.arange(9), source).sum(partial(GRADIENT, WEIGHTS))
    with pytest.raises(ValueError, match=r"gives other rows"):
        next(iter(Batch(0, np.arange(9), source)))
    with pytest.raises(ValueError, match=r"gives other rows"):
        source.many([np.arange(9), np.arange(9, 16)])


def in_order(indices):
    """For files that want their indices sorted."""
    return DATA[np.sort(indices)]


def test_a_loader_that_sorts_is_refused_and_would_give_no_other_example():
    """Once rows without an example were loaded as the first one, which came first and counted 38 times."""
    with pytest.raises(ValueError, match=r"keep the order of the indices"):
        Source(in_order, ROWS, ROWS, 16, None).rows(np.arange(9))
    source = Source(in_order, ROWS, ROWS, 16, None)
    source._loader._is_asked = False  # the planted fault: it is not looked at
    rows = source.rows(np.arange(5, 14))
    np.testing.assert_array_equal(rows.data[rows.mask], DATA[5:14])


def test_texts_padded_to_the_longest_are_refused_in_a_sentence():
    def tokens(indices):
        return np.ones((len(indices), 3 + max(indices)), np.int32)

    with pytest.raises(ValueError, match=r"gives rows of another shape .*pad rows to one length"):
        Source(tokens, ROWS, ROWS, 16, None).rows(np.arange(9))


def test_loaders_that_encode_or_use_their_memory_again_are_right():
    """Products of matrices round by the number of rows."""
    matrix, memory = np.random.default_rng(2).normal(size=(FEATURES, 300)).astype(np.float32), DATA.copy()

    def encoded(indices):
        return jax.jit(lambda rows: jnp.tanh(rows @ matrix @ matrix.T))(DATA[indices])

    def again(indices):
        memory[: len(indices)] = DATA[indices]
        return memory[: len(indices)]

    for load in (encoded, again):
        rows = Source(load, ROWS, ROWS, 16, None).rows(np.arange(9))
        np.testing.assert_allclose(rows.data[rows.mask], load(np.arange(9)), rtol=1e-3, atol=1e-3)


def test_texts_that_are_longer_in_a_later_batch_are_refused():
    """Padded to a multiple of eight, all were alike at first; one long text moved the sum by 17 clip norms."""

    def tokens(indices):
        return np.ones((len(indices), 64 if max(indices) > 100 else 8), np.int32)

    source = Source(tokens, ROWS, ROWS, 16, None)
    source.rows(np.arange(9))
    with pytest.raises(ValueError, match=r"gives rows of another shape .*pad rows to one length"):
        source.rows(np.arange(99, 108))


@pytest.mark.parametrize("count", [7, 11])
def test_a_loader_with_another_number_of_rows_is_refused_in_a_sentence(count):
    with pytest.raises(ValueError, match=r"^data: must give one row for each index") as refused:
        Source(lambda indices: DATA[:count], ROWS, ROWS, 16, None).rows(np.arange(9))
    assert not any(digit in str(refused.value) for digit in "0123456789")  # the size of a batch is secret


def test_imaginary_parts_are_looked_at_too():
    def load(indices):
        return DATA[indices] + 1j * (DATA[indices] - DATA[indices].mean(0))

    with pytest.raises(ValueError, match="gives other rows"):
        Source(load, ROWS, ROWS, 16, None).rows(np.arange(9))


def test_tensors_of_other_libraries_are_refused_in_a_sentence():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"data='Tensor': must be a pytree of arrays"):
        Source(torch.ones(ROWS, 2), ROWS, ROWS, 16, None)
    with pytest.raises(ValueError, match=r"data='Tensor': must be a pytree of arrays"):
        Source(lambda indices: torch.ones(len(indices), 2), ROWS, ROWS, 16, None).rows(np.arange(9))


def test_rows_are_loaded_again_at_the_first_batch_alone():
    calls = []

    def load(indices):
        calls.append(len(indices))
        return DATA[indices]

    source = Source(load, ROWS, ROWS, 16, None)
    for step in range(3):
        Batch(step, np.arange(9), source).sum(partial(GRADIENT, WEIGHTS))
    assert calls == [9, 9, 5, 4, *[9] * 9, 8, 16, 16, 16, 16]


def test_results_whose_shapes_follow_the_mask_are_added_up_where_they_can_be():
    examples = jax.jit(clipped_gradient(loss, clip_norm=1.0, return_examples=True))

    def compact(rows, mask):
        return examples(WEIGHTS, rows[np.flatnonzero(mask)])

    batch = a_batch(16)
    total, seen = batch.sum(compact)
    batch.check_sum(total)
    assert seen.values.shape == (9,)


def test_a_sum_that_was_changed_is_refused_though_its_pieces_were_looked_at():
    batch = a_batch()
    assert sum(int(rows.mask.sum()) for rows in batch) == ROWS - 7
    total = batch.sum(partial(GRADIENT, WEIGHTS))
    batch.check_sum(total)
    wrong = batch.sum(partial(two_losses, WEIGHTS))
    assert len(list(batch)) == 1
    with pytest.raises(ValueError, match="from one example alone"):
        batch.check_sum(wrong)
    batch.sum(partial(GRADIENT, WEIGHTS))
    with pytest.raises(ValueError, match=r"total is not what batch\.sum gave"):
        batch.check_sum(jax.tree.map(lambda leaf: 5 * leaf, total))


def test_weights_that_are_cut_over_an_explicit_mesh_are_refused_in_a_sentence():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, PartitionSpec(None, "model")))
    with pytest.raises(ValueError, match=r"cut over the explicit mesh axes \['model'\]"):
        GRADIENT(weights, DATA)


def test_padding_is_no_nan_where_jax_is_told_to_stop_at_them():
    with jax.debug_nans(True):
        batch = a_batch(16)
        batch.check_sum(batch.sum(partial(GRADIENT, WEIGHTS)))
        assert not any(jnp.isnan(rows.data).any() for rows in batch)
