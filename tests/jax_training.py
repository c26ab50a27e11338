"""A small private training in JAX, for tests."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bandmf
from bandmf import Key
from bandmf.jax import Training
from bandmf.jax.training.data import Source
from training import same_run, simple_plan

EXAMPLES, STEPS, CLIP = 60, 12, 0.5
KEY = Key(bytes(32))


@lru_cache
def plan(**more):
    settings = {"steps": STEPS, "bands": 4, "sampling": "cyclic-poisson", "batch_size": 12} | more
    return bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, **settings)


def data(examples=EXAMPLES):
    dice = np.random.default_rng(0)
    return dice.normal(size=(examples, 5)).astype(np.float32), dice.normal(size=(examples, 1)).astype(np.float32)


def first_weights():
    dice = np.random.default_rng(1)
    return {
        "weight": jnp.asarray(dice.normal(size=(1, 5)), jnp.float32),
        "bias": jnp.asarray(dice.normal(size=1), jnp.float32),
    }


def loss(weights, example):
    x, y = example
    return jnp.mean((weights["weight"] @ x + weights["bias"] - y) ** 2)


def training(plan=None, optimizer=None, loss=loss, data=None, key=None, clip_norm=CLIP, **more):
    """One of this problem; two of them with the same key are the same run."""
    with same_run():
        return Training(
            loss,
            optax.sgd(0.5) if optimizer is None else optimizer,
            globals()["data"]() if data is None else data,
            globals()["plan"]() if plan is None else plan,
            clip_norm=clip_norm,
            key=KEY if key is None else key,
            **more,
        )


def trained(training, weights=None, at_once=1, until=None):
    """The last state: of all steps, or of so many."""
    state = training.init(first_weights() if weights is None else weights)
    for state in training.steps(state, at_once=at_once):  # noqa: B020
        if until is not None and state.step >= until:
            break
    return state


def weights_of(plan=None, optimizer=None, at_once=1, until=None, **more):
    """The weights after all steps, in one vector."""
    with training(plan, optimizer, **more) as private:
        return flat(trained(private, at_once=at_once, until=until).weights)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(tree)])


# --- under Training -----------------------------------------------------------------------------------------


def clipped_sum(training, indices, step=0):
    """What a step makes of these examples before its noise, of the weights that `init` was given."""
    rows = training._source.rows([np.asarray(indices)], step, training._examples_key)
    held = training._held
    return training._programs.clip(held.trained, training._frozen, rows, np.int32(step), training._secrets)[0]


def loaded(data, indices, examples, step=0, key=KEY, size=48):
    """The rows of a batch as Training loads them: those of its examples, in their order."""
    source = data if isinstance(data, Source) else source_of(data, examples, size)
    rows = source.rows([np.asarray(indices)], step, key)
    valid = np.asarray(rows.places).reshape(-1) >= 0
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:])[valid], rows.data)


def source_of(data, examples, size=48):
    """One that takes turns of so many rows."""
    return Source(data, simple_plan(examples=examples, batch_size=size / 2, bands=1), size, None)
