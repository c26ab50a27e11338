"""A small private training in JAX, for tests."""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bandmf
from bandmf import Key
from bandmf.jax import Run, clipped_gradient, privatize
from bandmf.jax.training import source

EXAMPLES, STEPS, CLIP = 60, 12, 0.5


@lru_cache
def plan(**more):
    settings = {"steps": STEPS, "bands": 4, "sampling": "cyclic-poisson", "batch_size": 12} | more
    return bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, **settings)


def data():
    dice = np.random.default_rng(0)
    return dice.normal(size=(EXAMPLES, 5)).astype(np.float32), dice.normal(size=(EXAMPLES, 1)).astype(
        np.float32
    )


def first_weights():
    dice = np.random.default_rng(1)
    return {
        "weight": jnp.asarray(dice.normal(size=(1, 5)), jnp.float32),
        "bias": jnp.asarray(dice.normal(size=1), jnp.float32),
    }


def loss(weights, example):
    x, y = example
    return jnp.mean((weights["weight"] @ x + weights["bias"] - y) ** 2)


class Source(source.Source):
    """With a key, and rows of the first step, unless told otherwise."""

    def __init__(self, data, examples, batch_size, capacity, sharding=None, key=None):
        super().__init__(
            data, examples, batch_size, capacity, sharding, Key(bytes(32)) if key is None else key
        )

    def rows(self, indices, step=0):
        return super().rows(indices, step)

    def mixed(self, indices, step=0):
        return super().mixed(indices, step)

    def many(self, batches, step=0):
        return super().many(batches, step)


class Training:
    """Gradient, optimizer and compiled update for a plan; `whole(run)` trains to the end."""

    def __init__(self, chosen, optimizer=None, wrap=lambda transformation: transformation, microbatch=None):
        self.gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP, microbatch=microbatch))
        self.optimizer = wrap(
            optax.chain(privatize(chosen, clip_norm=CLIP), optax.sgd(0.5) if optimizer is None else optimizer)
        )
        self.update = jax.jit(self._update)

    def _update(self, total, weights, state, secret):
        updates, state = self.optimizer.update(total, state, weights, secret=secret)
        return optax.apply_updates(weights, updates), state

    def advance(self, rows, weights, state, secret):
        total = self.gradient(weights, rows.data, mask=rows.mask)
        return self._update(total, weights, state, secret)

    def begin(self):
        weights = first_weights()
        return weights, self.optimizer.init(weights)

    def sum(self, batch, weights):
        return batch.sum(partial(self.gradient, weights))

    def steps(self, run, weights, state, until=None, **loading):
        """Train on; `until` this many steps were taken."""
        for batch in run.batches(loading.pop("data", None) or data(), **loading):
            weights, state = run.release(self.update, self.sum(batch, weights), weights, state)
            if run.steps_taken == until:
                break
        return weights, state

    def whole(self, run, **loading):
        return self.steps(run, *self.begin(), **loading)[0]


def open_run(chosen, folder=None, key=None, **more):
    return Run(chosen, folder, key=Key(bytes(32)) if key is None else key, **more)


def flat(tree):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])
