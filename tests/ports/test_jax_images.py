"""Programs of computer vision in JAX, ported: flax linen and nnx, ResNet, ViT, transfer learning, mixed precision."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from bandmf.jax import Training
from bandmf.jax.training.data import Source
from ports.jax_harness import assert_first_sum_is_autograds, last, learns, quiet_plan, toy_images

pytestmark = pytest.mark.usefixtures("compiled_quickly")
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def test_a_wrong_sum_is_seen(monkeypatch):
    """The oracle of all ports is shown a training whose rows are not those of the batch."""
    weights, data = jnp.zeros((64, 4)), toy_images()

    def loss(weights, example):
        image, label = example
        return cross_entropy(image.reshape(-1) @ weights, label)

    assert_first_sum_is_autograds(loss, weights, data)
    rows = Source.rows
    monkeypatch.setattr(Source, "rows", lambda self, batches, *rest: rows(self, [batches[0][1:]], *rest))
    with pytest.raises(AssertionError, match="the sum is off"):
        assert_first_sum_is_autograds(loss, weights, data)


# --- flax linen: the MNIST example ------------------------------------------------------------------------


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(16)(x.reshape((x.shape[0], -1))))
        return nn.Dense(4)(x)


def test_linen_cnn(caplog):
    """A TrainState, epochs, and a test after each of them."""
    train, test = toy_images(), toy_images()
    model = LinenCNN()
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones([1, 8, 8, 1]))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def accuracy(params, images, labels):
        return (state.apply_fn({"params": params}, images).argmax(-1) == labels).mean()

    def loss(params, batch):
        images, labels = batch
        return cross_entropy(state.apply_fn({"params": params}, images), labels).mean()

    training = Training(loss, state.tx, train, quiet_plan(steps=48), clip_norm=1.0, keep_batch_dim=True)
    with caplog.at_level(logging.INFO):
        for now in training.steps(training.init(state.params)):
            if now.step % 16 == 0:
                logging.info("epoch %d: accuracy %.2f", now.step // 16, accuracy(now.weights, *test))
    state = state.replace(params=now.weights, opt_state=now.optimizer, step=now.step)
    assert training.finished
    assert state.step == 48
    assert "epoch 3" in caplog.text
    assert learns(loss, params, state.params, train, keep_batch_dim=True)
    assert_first_sum_is_autograds(loss, params, train, keep_batch_dim=True)


# --- flax nnx: the same with dropout and an nnx.Optimizer ---------------------------------------------------


class NnxCNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, kernel_size=(3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))

    def __call__(self, x, rngs=None):
        x = self.pool(nnx.relu(self.conv1(x)))
        x = self.pool(nnx.relu(self.conv2(x)))
        x = nnx.relu(self.linear1(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs)))
        return self.linear2(x)


@pytest.mark.long
def test_nnx_cnn():
    """The model and its optimizer hold the state; metrics are of nnx, too."""
    train, test = toy_images(), toy_images()
    model = NnxCNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.02, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    first = jax.tree.map(jnp.copy, params)  # those of the split are the model's own

    def loss(params, batch, key):
        images, labels = batch
        logits = nnx.merge(graph, params, rest)(images, rngs=nnx.Rngs(dropout=key))
        return cross_entropy(logits, labels).mean()

    history = []
    training = Training(loss, optimizer.tx, train, quiet_plan(), clip_norm=1.0, keep_batch_dim=True)
    for state in training.steps(training.init(params)):
        if state.step % 8 == 0:
            nnx.update(model, state.weights)
            model.eval()
            logits = model(test[0])
            metrics.update(loss=cross_entropy(logits, test[1]), logits=logits, labels=test[1])
            history.append(metrics.compute())
            metrics.reset()
    assert training.finished
    assert len(history) == 3
    assert history[-1]["loss"] < history[0]["loss"]
    assert learns(loss, first, state.weights, train, keep_batch_dim=True)
    assert_first_sum_is_autograds(loss, first, train, keep_batch_dim=True)


# --- a ResNet with group norms ----------------------------------------------------------------------------


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(self.conv(self.filters, (1, 1), self.strides, name="proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    stages: tuple[int, ...] = (1, 1)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.GroupNorm, num_groups=2, dtype=self.dtype)
        x = nn.relu(norm()(conv(4, (3, 3))(x)))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = (2, 2) if stage > 0 and block == 0 else (1, 1)
                x = ResNetBlock(4 * 2**stage, conv, norm, strides)(x)
        x = x.mean(axis=(-3, -2))
        return jnp.asarray(nn.Dense(4, dtype=self.dtype)(x), jnp.float32)


def warm_up_and_cosine(steps):
    return optax.warmup_cosine_decay_schedule(0.0, 0.3, warmup_steps=2, decay_steps=steps)


def decayed(params):
    """Not norms and biases."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.long
def test_resnet_with_group_norm():
    """Warm-up, a cosine, Nesterov momentum, smoothed labels, decay of kernels alone, sixteen updates in a program."""
    train, plan = toy_images(), quiet_plan(steps=48)
    model = ResNet()
    params = jax.jit(model.init)(jax.random.key(0), train[0][:1])["params"]
    tx = optax.chain(
        optax.add_decayed_weights(1e-4, decayed), optax.sgd(warm_up_and_cosine(plan.steps), momentum=0.9, nesterov=True)
    )

    def loss(params, example):
        image, label = example
        smooth = optax.smooth_labels(jax.nn.one_hot(label, 4), 0.1)
        return optax.softmax_cross_entropy(model.apply({"params": params}, image), smooth)

    training = Training(loss, tx, train, plan, clip_norm=1.0)
    state = last(training.steps(training.init(params), at_once=16))
    assert training.finished
    assert learns(loss, params, state.weights, train)
    # A block begins as the identity, and its last kernels without a gradient; so later weights are looked at.
    assert_first_sum_is_autograds(loss, jax.device_get(state.weights), train)


@pytest.mark.long
def test_mixed_precision():
    """bfloat16 inside, float32 weights, and moments of Adam in bfloat16."""
    train = toy_images()
    model = ResNet(dtype=jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0), train[0][:1])["params"]

    def loss(params, example):
        image, label = example
        return cross_entropy(model.apply({"params": params}, image.astype(jnp.bfloat16)), label)

    training = Training(loss, optax.adam(0.02, mu_dtype=jnp.bfloat16), train, quiet_plan(), clip_norm=1.0)
    state = last(training.steps(training.init(params)))
    assert training.finished
    assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {jnp.dtype("float32")}
    assert learns(loss, params, state.weights, train)
    # bfloat16 rounds to 2^-9, and a batch elsewhere than one example; one that is lost is off by far more.
    assert_first_sum_is_autograds(loss, params, train, rounding=2**-6)


# --- a vision transformer in equinox ------------------------------------------------------------------------


class Attend(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 2 * width, key=keys[1])
        self.down = eqx.nn.Linear(2 * width, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + self.dropout(jax.vmap(self.down)(y), key=key)


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    cls_token: jax.Array
    pos_embed: jax.Array
    blocks: list[Attend]
    head: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(1, width, 4, 4, key=keys[0])
        self.cls_token = 0.02 * jax.random.normal(keys[1], (1, width))
        self.pos_embed = 0.02 * jax.random.normal(keys[2], (5, width))
        self.blocks = [Attend(width, k) for k in keys[3:5]]
        self.head = eqx.nn.Linear(width, 4, key=keys[5])

    def __call__(self, image, key):
        x = self.patches(jnp.moveaxis(image, -1, 0)).reshape(len(self.cls_token[0]), -1).T
        x = jnp.concatenate([self.cls_token, x]) + self.pos_embed
        for block, k in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, k)
        return self.head(x[0])


@pytest.mark.long
def test_equinox_vision_transformer():
    """Bare parameters, dropout, and a running average of the weights, with which it is evaluated."""
    train = toy_images()
    params, static = eqx.partition(ViT(8, jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, example, key):
        image, label = example
        return cross_entropy(eqx.combine(params, static)(image, key), label)

    average = params
    blend = jax.jit(lambda old, new: optax.incremental_update(new, old, 0.3))
    training = Training(loss, optax.adamw(0.02), train, quiet_plan(), clip_norm=1.0)
    for state in training.steps(training.init(params)):
        average = blend(average, state.weights)
    assert training.finished
    model = eqx.nn.inference_mode(eqx.combine(average, static))
    logits = jax.vmap(model, (0, None))(train[0], jax.random.key(1))
    assert (logits.argmax(-1) == train[1]).mean() > 0.5
    assert learns(loss, params, average, train)
    assert_first_sum_is_autograds(loss, params, train)


# --- transfer learning: batch norms with fixed statistics -----------------------------------------------------


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for filters in (4, 8):
            x = nn.Conv(filters, (3, 3), (2, 2))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return x.reshape(-1)


@pytest.mark.long
def test_a_head_on_a_frozen_backbone():
    """The statistics of the batch norms are frozen as the backbone is; the examples are augmented when loaded."""
    images, labels = toy_images()
    backbone, head = Backbone(), nn.Dense(4)
    variables = backbone.init(jax.random.key(0), images[0], train=False)
    params = {"backbone": variables, "head": head.init(jax.random.key(1), jnp.ones(32))}

    class Flipped:
        def __len__(self):
            return len(labels)

        def __getitem__(self, index):
            shift = 0.1 * np.random.normal()
            return images[index] + np.float32(shift), labels[index]

    def loss(params, example):
        image, label = example
        return cross_entropy(head.apply(params["head"], backbone.apply(params["backbone"], image, False)), label)

    training = Training(
        loss, optax.adam(0.05), Flipped(), quiet_plan(), clip_norm=1.0,
        trainable={"backbone": False, "head": True},
    )  # fmt: skip
    state = last(training.steps(training.init(params)))
    assert training.finished
    for old, new in zip(*map(jax.tree.leaves, (params["backbone"], state.weights["backbone"])), strict=True):
        np.testing.assert_array_equal(old, new)
    assert learns(loss, params, state.weights, (images, labels))
    plain = {"trainable": {"backbone": False, "head": True}}
    assert_first_sum_is_autograds(loss, params, (images, labels), **plain)
