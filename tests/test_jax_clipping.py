"""bandmf.jax.clipped_gradient against one example at a time in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bandmf.jax import Clipped, clipped_gradient, clipping
from sweeps import in_turn

CLIP = 0.7


def loss(weights, example):
    """Two layers, the second used twice."""
    x, y = example
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    hidden = jnp.tanh(hidden @ weights["twice"]) @ weights["twice"]
    return jnp.sum((hidden @ weights["out"] - y) ** 2)


GRADIENT = jax.jit(jax.grad(loss))


def problem(rows=9, seed=0, size=1.0):
    dice = np.random.default_rng(seed)
    shapes = {"in": (4, 6), "bias": (6,), "twice": (6, 6), "out": (6, 2)}
    weights = {name: jnp.asarray(dice.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, y = dice.normal(size=(rows, 4)) * size, dice.normal(size=(rows, 2)) * size
    return weights, (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))


def one_at_a_time(weights, batch, clip_norm, mask=None):
    """The oracle: the gradient of each row by itself, clipped and added up in double precision."""
    total = {name: np.zeros(leaf.shape) for name, leaf in weights.items()}
    for row in range(len(batch[0])):
        found = GRADIENT(weights, jax.tree.map(lambda leaf, row=row: leaf[row], batch))
        wide = {name: np.asarray(leaf, np.float64) for name, leaf in found.items()}
        norm = length(wide)
        if mask is None or mask[row]:
            factor = min(1.0, clip_norm / norm) if np.isfinite(norm) else 0.0
            for name, leaf in wide.items():
                total[name] += np.nan_to_num(leaf) * factor
    return total


def length(tree):
    return float(np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(tree))))


def assert_near(found, expected, tolerance=2e-5):
    difference = {name: np.asarray(found[name], np.float64) - expected[name] for name in expected}
    assert length(difference) <= tolerance * max(length(expected), 1e-30)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_sum_is_that_of_clipping_one_example_at_a_time(rows):
    gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP))
    for seed, size in enumerate([0.01, 0.3, 1.0, 30.0, 1e4]):
        weights, batch = problem(rows, seed, size)
        mask = np.random.default_rng(seed).random(rows) < 0.7
        found = gradient(weights, batch, mask=mask)
        assert_near(found.total, one_at_a_time(weights, batch, CLIP, mask))
        assert found.clip_norm == CLIP


@pytest.mark.parametrize("size", [0.01, 1.0, 1e4])
def test_a_norm_is_never_below_the_true_one(size):
    weights, batch = problem(size=size)
    for row in range(9):
        gradient = GRADIENT(weights, jax.tree.map(lambda leaf, row=row: leaf[row], batch))
        norm = float(clipping.norms.clip(gradient, CLIP)[1])
        assert length(gradient) * (1 - 1e-6) <= norm <= length(gradient) * (1 + 3e-5)


def test_no_rows_that_count_sum_to_zero():
    weights, batch = problem()
    total = clipped_gradient(loss, clip_norm=CLIP)(weights, batch, mask=jnp.zeros(9, bool)).total
    assert all(not leaf.any() for leaf in total.values())
    assert jax.tree.structure(total) == jax.tree.structure(weights)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_an_example_without_a_finite_gradient_counts_nothing_and_spoils_nothing(poison):
    weights, (x, y) = problem()
    keep = np.arange(9) != 4
    gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP))
    clean = gradient(weights, (x, y), mask=keep)
    for given_mask in (np.ones(9, bool), keep):
        found = gradient(weights, (x, y.at[4].set(poison)), mask=given_mask)
        for name, leaf in found.total.items():
            np.testing.assert_array_equal(leaf, clean.total[name])


def spread_loss(weights, example):
    """Its gradient is the example, whatever it is."""
    return jnp.sum(weights.astype(jnp.float32) * example.astype(jnp.float32))


def hard_examples(size):
    """Where one sum after the other would lose most: a large number first, then many that are too small for it."""
    dice = np.random.default_rng(1)
    yield "one large", np.r_[1.0, np.full(size - 1, 2.0**-13)]
    yield "rising", np.linspace(0, 1, size)
    yield "even", np.ones(size)
    yield "random", dice.normal(size=size)
    yield "tiny", np.full(size, 1e-21)
    yield "decades", 10.0 ** dice.uniform(-18, 0, size)


@pytest.mark.parametrize(("dtype", "clip_norm"), in_turn(["float32", "bfloat16"], [1.0, 1e-3, 1e-20]))
def test_one_example_contributes_at_most_the_clip_norm(dtype, clip_norm):
    size = 100_003
    gradient = jax.jit(clipped_gradient(spread_loss, clip_norm=clip_norm))
    for name, values in hard_examples(size):
        example = jnp.asarray(values, jnp.float32).astype(dtype)
        total = gradient(jnp.zeros(size, dtype), example[None]).total
        assert total.dtype == jnp.float32
        assert length(total) <= clip_norm, name
        exact = np.asarray(example, np.float64)
        if clip_norm < np.linalg.norm(exact) < 1e18 * clip_norm:  # what is longer still counts nothing
            assert length(total) >= clip_norm * (1 - 4e-5), name  # and little is given away


def test_a_sum_in_one_go_is_caught(monkeypatch):
    """The planted fault: squares that are added one after the other."""

    def plain(leaf):
        squares = jnp.square(leaf).reshape(-1)
        return lax.scan(lambda total, one: (total + one, None), jnp.float32(0), squares)[0], 0

    monkeypatch.setattr(clipping.norms, "_sum_of_squares", plain)
    example = jnp.asarray(next(hard_examples(100_003))[1], jnp.float32)
    total = clipped_gradient(spread_loss, clip_norm=1.0)(jnp.zeros(100_003), example[None]).total
    assert length(total) > 1.0005


def test_what_an_example_contributes_does_not_depend_on_the_others():
    weights, (x, y) = problem(8, size=10.0)
    gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP))
    others = problem(8, seed=3, size=100.0)[1]
    alone = gradient(weights, (x, y), mask=np.arange(8) == 2).total
    mixed = jax.tree.map(lambda own, other: other.at[2].set(own[2]), (x, y), others)
    among = gradient(weights, mixed, mask=np.arange(8) == 2).total
    for name in alone:
        np.testing.assert_array_equal(alone[name], among[name])


def test_nothing_compiles_again_for_another_mask():
    weights, batch = problem()
    gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP))
    for count in range(10):
        gradient(weights, batch, mask=np.arange(9) < count)
    assert gradient._cache_size() == 1


def test_the_sum_is_that_of_a_peer():
    jax_privacy = pytest.importorskip("jax_privacy")
    weights, batch = problem(size=5.0)
    peer = jax_privacy.clipping.clipped_grad(loss, l2_clip_norm=CLIP, keep_batch_dim=False)
    expected = {name: np.asarray(leaf, np.float64) for name, leaf in peer(weights, batch).items()}
    assert_near(clipped_gradient(loss, clip_norm=CLIP)(weights, batch).total, expected)


@pytest.mark.parametrize("clip_norm", [0, float("nan")])
def test_a_clip_norm_that_is_none_is_refused(clip_norm):
    with pytest.raises(ValueError, match=f"clip_norm={clip_norm}: must be"):
        clipped_gradient(loss, clip_norm=clip_norm)


def test_a_batch_that_is_none_is_refused():
    weights, (x, y) = problem()
    gradient = clipped_gradient(loss, clip_norm=CLIP)
    with pytest.raises(ValueError, match="same number of rows"):
        gradient(weights, (x, y[:3]))
    with pytest.raises(ValueError, match=r"mask\.shape"):
        gradient(weights, (x, y), mask=np.ones(3, bool))
    with pytest.raises(ValueError, match="first dimension"):
        gradient(weights, (jnp.float32(1), jnp.float32(2)))
    with pytest.raises(TypeError, match="positional argument"):
        gradient(weights, x, y)  # labels are no mask


def random_keys(rows):
    return jax.random.split(jax.random.key(0), rows)


def test_examples_of_any_type_are_clipped():
    """Complex numbers, four bits, and random keys: what the norm depends on is a float32 gradient all the same."""
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32) * 10
    whole = np.arange(28).reshape(7, 4) % 7
    examples = (x.astype(np.complex64), jnp.asarray(whole, jnp.int4), random_keys(7))

    def several(weights, example):
        wave, small, key = example
        kept = jax.random.bernoulli(key, 0.5, (4,))
        return jnp.abs(jnp.sum(wave * kept * small.astype(jnp.float32) * weights)) ** 2

    gradient = clipped_gradient(several, clip_norm=CLIP)
    found = jax.jit(gradient)(jnp.ones(4), examples, mask=np.arange(7) > 1).total
    expected = 0
    for row in range(2, 7):
        kept = np.asarray(jax.random.bernoulli(examples[2][row], 0.5, (4,)))
        factors = (x[row] * kept * whole[row]).astype(np.float64)
        one = 2 * factors.sum() * factors
        expected += one * min(1, CLIP / max(np.linalg.norm(one), 1e-30))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_real_or_not_there_are_refused():
    gradient = clipped_gradient(lambda weights, x: jnp.abs(jnp.sum(x)), clip_norm=CLIP)
    with pytest.raises(ValueError, match="dtype in weights='complex64': must be real"):
        gradient(jnp.ones(3, jnp.complex64), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"dtype in weights='int32': must be a floating-point.*bind what is not"):
        gradient({"w": jnp.ones(3), "count": jnp.int32(1)}, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="weights='function': must be a tree of arrays"):
        gradient({"w": jnp.ones(3), "act": lambda x: x}, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"weights=\{\}: must have an array: there is nothing to train"):
        gradient({}, jnp.ones((2, 3)))


def test_a_sum_without_noise_is_not_printed():
    assert repr(Clipped({"a": jnp.full(2, 7.25)}, 0.5)) == "Clipped(clip_norm=0.5)"


def test_a_clipped_sum_is_no_update_of_its_own():
    optax = pytest.importorskip("optax")
    weights, batch = problem()
    total = clipped_gradient(loss, clip_norm=CLIP)(weights, batch)
    assert isinstance(total, Clipped)
    with pytest.raises(ValueError, match=r"[Dd]ict|structure|Clipped|pytree"):
        optax.apply_updates(weights, total)
