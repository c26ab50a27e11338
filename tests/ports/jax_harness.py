"""What the ports in JAX share: plans with little noise, toy data that can be learned, and the oracle of the first sum.

A port is an ordinary program: its own model, optimizer, loop, evaluation and averages. What it has to say of privacy is
the constructor of Training.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bandmf import Key
from bandmf.jax import Training
from bandmf.jax.training.state import Parts
from ports.harness import ROUNDING
from training import same_run, simple_plan

EXAMPLES = 64


def quiet_plan(examples=EXAMPLES, steps=24, batch_size=16, **changes):
    """A plan whose noise is far below the gradients: what is tested is the program."""
    return simple_plan(steps, examples, batch_size, bands=2, noise_multiplier=1e-3, **changes)


def toy_images(examples=EXAMPLES, classes=4, size=8):
    """Images, channels last, and labels: a pattern for each class, with noise."""
    dice = np.random.default_rng(0)
    patterns = dice.normal(size=(classes, size, size, 1))
    labels = dice.integers(classes, size=examples)
    images = patterns[labels] + 0.3 * dice.normal(size=(examples, size, size, 1))
    return images.astype(np.float32), labels.astype(np.int32)


def toy_texts(examples=EXAMPLES, length=12, letters=10):
    """Texts that count up, each from its own letter and in steps of its own: the next letter can be told."""
    dice = np.random.default_rng(0)
    start, by = dice.integers(letters, size=examples), dice.integers(1, 3, size=examples)
    return ((start[:, None] + by[:, None] * np.arange(length)) % letters).astype(np.int32)


def example_of(data, index):
    """What the loss is given of this index: an entry of arrays, data sets and lists, the only row of a function's."""
    if callable(data):
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], data(np.array([index])))
    if isinstance(data, list):
        return jax.tree.map(np.asarray, data[index])
    return jax.tree.map(lambda leaf: jax.tree.map(np.asarray, leaf[index]), data)


def one_example(loss, keep_batch_dim, made={}):  # noqa: B006 (a port needs its program before and after)
    """The value and gradient of a single one as a function of (weights, example, key); compiled once."""
    takes_key = len(inspect.signature(loss).parameters) == 3

    def value(weights, example, key):
        if keep_batch_dim:
            example = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], example)
        return loss(weights, example, key) if takes_key else loss(weights, example)

    if (loss, keep_batch_dim) not in made:
        made.clear()
        made[loss, keep_batch_dim] = jax.jit(jax.value_and_grad(value, allow_int=True))
    return made[loss, keep_batch_dim]


def last(items):
    """The last state, for a port that does nothing between its steps."""
    for item in items:
        state = item
    return state


def mean_loss(loss, weights, data, keep_batch_dim=False, examples=EXAMPLES):
    """Over all data, with the same draws every time."""
    single, keys = one_example(loss, keep_batch_dim), jax.random.split(jax.random.key(0), examples)
    return np.mean([float(single(weights, example_of(data, i), keys[i])[0]) for i in range(examples)])


def learns(loss, first, after, data, below=0.9, **settings):
    """Whether the loss after training is below so much of what it was."""
    return mean_loss(loss, after, data, **settings) < below * mean_loss(loss, first, data, **settings)


def assert_first_sum_is_autograds(
    loss, weights, data, rounding=ROUNDING, keep_batch_dim=False, trainable=None, **settings
):
    """The first clipped sum is that of jax.grad, one example of the batch at a time, at two clip norms.

    One clips half of the examples, the other none. A loss that is multiplied by 1/R and clipped to 1 is one clipped to
    R, over R: so one program shows both. What the loss draws, it draws here from the same keys.
    """

    def scaled(held, example, key):
        own, scale = held
        if keep_batch_dim:
            example = jax.tree.map(lambda leaf: leaf[None], example)
        takes_key = len(inspect.signature(loss).parameters) == 3
        return scale * (loss(own, example, key) if takes_key else loss(own, example))

    parts = Parts(weights, trainable)
    chosen = jax.tree.unflatten(jax.tree.structure(weights), parts._is_trained)
    with same_run():
        training = Training(
            scaled, optax.sgd(1.0), data, quiet_plan(), clip_norm=1.0, key=Key(bytes(32)),
            trainable=(chosen, False), **settings,
        )  # fmt: skip
    training.init((weights, jnp.float32(1)))
    batch = training._sampler.batch(0)
    run_key = jax.random.fold_in(jax.random.wrap_key_data(training._secrets.draws, impl="threefry2x32"), 0)
    single = one_example(loss, keep_batch_dim)
    found = [single(weights, example_of(data, i), jax.random.fold_in(run_key, i))[1] for i in batch]
    truth = np.stack([flat(parts.split(gradient)[0]) for gradient in found])
    norms = np.linalg.norm(truth, axis=1)
    assert len(batch) > 4
    assert norms.min() > 0, "an example without a gradient shows nothing"
    rows = training._source.rows([batch], 0, training._examples_key)
    for clip_norm in (float(np.median(norms)), 10 * float(norms.max())):
        expected = (truth * np.minimum(1, clip_norm / norms)[:, None]).sum(0)
        (*frozen, scale), step = training._frozen, np.int32(0)
        given = [*frozen, jax.device_put(jnp.float32(1 / clip_norm), scale.sharding)]
        total, _ = training._programs.clip(training._held.trained, given, rows, step, training._secrets)
        error = np.linalg.norm(clip_norm * flat(total) - expected) / np.linalg.norm(expected)
        assert error <= rounding, f"clip_norm={clip_norm:g}: the sum is off by {error:.1e}"


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])
