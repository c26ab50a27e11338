"""Programs of language in JAX, ported: an nnx GPT, a haiku LSTM, LoRA, MultiSteps, a masked language model, DPO."""

from __future__ import annotations

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bandmf.jax import Training
from ports.jax_harness import EXAMPLES, assert_first_sum_is_autograds, last, learns, quiet_plan, toy_texts

pytestmark = pytest.mark.usefixtures("compiled_quickly")
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


# --- nnx: a GPT with dropout ----------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, dropout_rate=0.1, decode=False, deterministic=False, rngs=rngs
        )
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    def __init__(self, letters, length, width, layers, rngs):
        self.wte, self.wpe = nnx.Embed(letters, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 2, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[-1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.wte.attend(self.norm(x))


@pytest.mark.long
def test_nnx_gpt_with_dropout():
    """Windows of one long text are cut when they are asked for; tied weights; the model writes at the end."""
    text, length = np.tile(np.arange(10), 20).astype(np.uint16), 8

    def windows(indices):
        rows = text[indices[:, None] * 3 + np.arange(length + 1)]
        return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)

    model = nnx.jit(lambda: GPT(letters=10, length=length, width=8, layers=1, rngs=nnx.Rngs(0)))()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, example, key):
        x, y = example
        model = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(model, dropout=key)
        return cross_entropy(model(x), y).mean()

    first = jax.tree.map(jnp.copy, params)
    training = Training(loss, optax.adamw(0.03), windows, quiet_plan(), clip_norm=1.0)
    state = last(training.steps(training.init(params)))
    assert training.finished
    nnx.update(model, state.weights)
    model.eval()
    written = nnx.jit(lambda model, tokens: model(tokens)[-1].argmax())(model, jnp.arange(4))
    assert 0 <= written < 10
    assert learns(loss, first, state.weights, windows)
    assert_first_sum_is_autograds(loss, first, windows)


# --- haiku: an LSTM of letters --------------------------------------------------------------------------------


def test_haiku_lstm():
    """Texts of different lengths in a list of padded examples with their masks; the loss is a mean over tokens."""
    lengths = np.random.default_rng(1).integers(4, 11, size=EXAMPLES)
    data = [
        {"tokens": text, "mask": (np.arange(12) < length).astype(np.float32)}
        for text, length in zip(toy_texts(), lengths, strict=True)
    ]

    @hk.transform
    def network(tokens):
        core = hk.LSTM(8)
        x = hk.Embed(10, 8)(tokens)
        hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        return hk.Linear(10)(hidden)

    params = jax.jit(network.init)(jax.random.key(0), data[0]["tokens"])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))

    def loss(params, example):
        logits = network.apply(params, None, example["tokens"][:-1])
        each, mask = cross_entropy(logits, example["tokens"][1:]), example["mask"][1:]
        return (each * mask).sum() / mask.sum()

    training = Training(loss, optimizer, data, quiet_plan(), clip_norm=1.0)
    state = last(training.steps(training.init(params)))
    assert training.finished
    assert learns(loss, params, state.weights, data)
    assert_first_sum_is_autograds(loss, params, data)


# --- LoRA with nnx --------------------------------------------------------------------------------------------


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.hidden = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)
        self.head = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.hidden(self.embed(tokens).mean(0))))


def test_nnx_lora():
    """The adapter and the head are trained, the rest of the model is given and frozen."""
    texts = toy_texts()
    data = {"tokens": texts, "label": (texts.mean(1) > 4.5).astype(np.int32)}
    graph, params = nnx.split(Classifier(nnx.Rngs(0)))
    adapters = nnx.map_state(lambda path, _: "lora" in path or "head" in path, params)

    def loss(params, example):
        return cross_entropy(nnx.merge(graph, params)(example["tokens"]), example["label"])

    training = Training(
        loss, optax.adam(0.05), data, quiet_plan(), clip_norm=1.0, trainable=jax.tree.map(bool, adapters)
    )
    state = last(training.steps(training.init(params)))
    assert training.finished
    np.testing.assert_array_equal(state.weights["hidden"]["kernel"].get_value(), params["hidden"]["kernel"].get_value())
    assert learns(loss, params, state.weights, data)
    assert_first_sum_is_autograds(loss, params, data, trainable=adapters)


# --- linen: a deep classifier of texts, MultiSteps inside ------------------------------------------------------


class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        x = x + y
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))), None


class Encoder(nn.Module):
    width: int = 8
    layers: int = 3

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, self.width)(tokens)
        x = x + self.param("places", nn.initializers.normal(0.02), (12, self.width))
        real = tokens < 10
        stack = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers,
            in_axes=nn.broadcast,
        )  # fmt: skip
        x, _ = stack(self.width)(x, nn.make_attention_mask(real, real))
        pooled = (x * real[..., None]).sum(-2) / real.sum(-1, keepdims=True)
        return nn.Dense(2)(pooled)


@pytest.mark.long
def test_linen_encoder_with_multi_steps():
    """Layers in a scan, recomputed; gradients of two steps are gathered; rates by group; a rate that is injected."""
    dice, texts = np.random.default_rng(1), toy_texts()
    padded = np.where(np.arange(12) < dice.integers(5, 13, size=(EXAMPLES, 1)), texts, 10).astype(np.int32)
    data = padded, ((texts[:, 1] - texts[:, 0]) % 10 == 2).astype(np.int32)
    model = Encoder()
    params = jax.jit(model.init)(jax.random.key(0), padded[:1])

    def group(params):
        return jax.tree.map_with_path(
            lambda path, _: "slow" if "embedding" in jax.tree_util.keystr(path) else "fast", params
        )

    rates = {
        "fast": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.05, 12)),
        "slow": optax.adam(0.005),
    }
    optimizer = optax.MultiSteps(optax.multi_transform(rates, group), every_k_schedule=2)

    def loss(params, batch):
        tokens, labels = batch
        return cross_entropy(model.apply(params, tokens), labels).mean()

    training = Training(loss, optimizer, data, quiet_plan(), clip_norm=1.0, keep_batch_dim=True)
    for state in training.steps(training.init(params)):
        if state.step % 2:  # nothing moves before two are gathered
            middle = jax.tree.map(np.array, state.weights)
    assert training.finished
    assert int(state.optimizer.gradient_step) == 12
    assert not np.allclose(middle["params"]["Dense_0"]["kernel"], params["params"]["Dense_0"]["kernel"])
    assert learns(loss, params, state.weights, data, keep_batch_dim=True)
    assert_first_sum_is_autograds(loss, params, data, keep_batch_dim=True)


# --- a masked language model, whose masks are drawn -------------------------------------------------------------


@pytest.mark.long
def test_haiku_masked_language_model():
    """A fifth of the letters is hidden, drawn anew in each step; dropout by haiku's own keys."""
    data = toy_texts()

    def forward(tokens, train):
        places = hk.get_parameter("places", (12, 8), init=hk.initializers.RandomNormal(0.1))
        x = hk.Embed(11, 8)(tokens) + places
        y = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(), model_size=8)(x, x, x)
        x = hk.LayerNorm(-1, True, True)(x + (hk.dropout(hk.next_rng_key(), 0.1, y) if train else y))
        return hk.Linear(10)(jax.nn.relu(hk.Linear(32)(x)))

    network = hk.transform(forward)
    params = jax.jit(network.init, static_argnums=2)(jax.random.key(0), data[0], False)

    def loss(params, tokens, rng):
        hiding, dropping = jax.random.split(rng)
        hidden = jax.random.bernoulli(hiding, 0.2, tokens.shape).at[3].set(True)
        logits = network.apply(params, dropping, jnp.where(hidden, 10, tokens), True)
        return (cross_entropy(logits, tokens) * hidden).sum() / hidden.sum()

    training = Training(loss, optax.adam(0.03), data, quiet_plan(steps=48), clip_norm=1.0)
    state = last(training.steps(training.init(params)))
    assert training.finished
    assert learns(loss, params, state.weights, data)
    assert_first_sum_is_autograds(loss, params, data)


# --- preferences ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_linen_dpo():
    """Both answers of an example go through the policy and, as they were, through the reference."""
    texts = toy_texts()
    spoiled = np.where(np.arange(12) > 5, texts[:, ::-1], texts).astype(np.int32)
    data = {"chosen": texts, "rejected": spoiled}
    model = nn.Sequential([nn.Embed(10, 8), nn.Dense(16), nn.tanh, nn.Dense(10)])
    policy = jax.jit(model.init)(jax.random.key(0), texts[0])
    weights = {"policy": policy, "reference": policy}

    def score(params, text):
        return -cross_entropy(model.apply(params, text[:-1]), text[1:]).sum()

    def loss(weights, pair):
        better, worse = (
            score(weights["policy"], pair[which]) - score(weights["reference"], pair[which])
            for which in ("chosen", "rejected")
        )
        return -jax.nn.log_sigmoid(0.5 * (better - worse))

    only = {"policy": True, "reference": False}
    training = Training(loss, optax.rmsprop(0.01), data, quiet_plan(), clip_norm=1.0, trainable=only)
    state = last(training.steps(training.init(weights)))
    assert training.finished
    assert learns(loss, weights, state.weights, data)
    assert_first_sum_is_autograds(loss, weights, data, trainable=only)
