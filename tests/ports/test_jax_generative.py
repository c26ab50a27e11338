"""Generative programs in JAX, ported: a linen VAE, diffusion with equinox, a GAN, a flow with haiku."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bandmf.jax import Training
from ports.jax_harness import EXAMPLES, assert_first_sum_is_autograds, last, learns, mean_loss, quiet_plan, toy_images

pytestmark = pytest.mark.usefixtures("compiled_quickly")


# --- a VAE ------------------------------------------------------------------------------------------------------


class VAE(nn.Module):
    latents: int = 2

    def setup(self):
        self.hidden, self.mean, self.logvar = nn.Dense(16), nn.Dense(self.latents), nn.Dense(self.latents)
        self.decoder = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(64)])

    def __call__(self, x, z_rng):
        hidden = nn.relu(self.hidden(x))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        return self.decoder(z), mean, logvar

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))


def test_linen_vae():
    """The loss of the flax example: cross-entropy of pixels and the divergence; it samples after each epoch."""
    images = (toy_images()[0].reshape(EXAMPLES, -1) > 0).astype(np.float32)
    model = VAE()
    params = jax.jit(model.init)(jax.random.key(0), images[:1], jax.random.key(1))["params"]

    def loss(params, batch, z_rng):
        recon, mean, logvar = model.apply({"params": params}, batch, z_rng)
        bce = optax.sigmoid_binary_cross_entropy(recon, batch).sum(-1).mean()
        kld = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1).mean()
        return bce + kld

    training = Training(loss, optax.adam(0.02), images, quiet_plan(), clip_norm=1.0, keep_batch_dim=True)
    state = last(training.steps(training.init(params)))
    assert training.finished
    sampled = model.apply({"params": state.weights}, jnp.zeros((3, 2)), method=VAE.generate)
    assert sampled.shape == (3, 64)
    assert learns(loss, params, state.weights, images, keep_batch_dim=True)
    assert_first_sum_is_autograds(loss, params, images, keep_batch_dim=True)


# --- diffusion --------------------------------------------------------------------------------------------------


class Denoiser(eqx.Module):
    """A convolutional network that is told the time."""

    into: eqx.nn.Conv2d
    time: eqx.nn.MLP
    norm: eqx.nn.GroupNorm
    out: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.into = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0])
        self.time = eqx.nn.MLP(2, 8, 8, 1, activation=jax.nn.silu, key=keys[1])
        self.norm = eqx.nn.GroupNorm(2, 8)
        self.out = eqx.nn.Conv2d(8, 1, 3, padding=1, key=keys[2])

    def __call__(self, t, y):
        told = self.time(jnp.stack([jnp.sin(t), jnp.cos(t)]))
        return self.out(jax.nn.silu(self.norm(self.into(y) + told[:, None, None])))


def test_equinox_diffusion():
    """Denoising score matching at a drawn time, an average of the weights, samples by the reverse equation."""
    data = np.moveaxis(toy_images()[0], -1, 1)
    params, static = eqx.partition(Denoiser(jax.random.key(0)), eqx.is_inexact_array)
    t1, int_beta = 3.0, lambda t: t

    def loss(params, image, key):
        when, what = jax.random.split(key)
        t = jax.random.uniform(when, (), minval=0.1, maxval=t1)
        mean, std = image * jnp.exp(-0.5 * int_beta(t)), jnp.sqrt(-jnp.expm1(-int_beta(t)))
        noise = jax.random.normal(what, image.shape)
        score = eqx.combine(params, static)(t, mean + std * noise)
        return jnp.mean((score + noise) ** 2)

    average, tx = params, optax.adabelief(0.02)
    blend = jax.jit(lambda old, new: optax.incremental_update(new, old, 0.3))
    training = Training(loss, tx, data, quiet_plan(), clip_norm=1.0)
    for state in training.steps(training.init(params)):
        average = blend(average, state.weights)
    assert training.finished

    @eqx.filter_jit
    def sample(model, y, steps=5):
        def backward(y, t):
            score = model(t, y) / jnp.sqrt(-jnp.expm1(-t))
            return y + 0.5 * (t1 / steps) * (y + score), None

        return jax.lax.scan(backward, y, jnp.linspace(t1, 0.1, steps))[0]

    assert jnp.isfinite(sample(eqx.combine(average, static), jnp.ones((1, 8, 8)))).all()
    assert learns(loss, params, state.weights, data)
    assert_first_sum_is_autograds(loss, params, data)


# --- a GAN ------------------------------------------------------------------------------------------------------


def test_gan():
    """The discriminator sees private images; the generator learns from it alone, in the loop.

    What changes between steps comes with the data: each example is loaded with an image made by the generator of now.
    """
    images = toy_images()[0].reshape(EXAMPLES, -1)
    generator = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(64)])
    discriminator = nn.Sequential([nn.Dense(16), nn.leaky_relu, nn.Dense(1)])
    make = jax.jit(generator.apply)
    g_params = jax.jit(generator.init)(jax.random.key(0), jnp.ones(4))
    d_params = jax.jit(discriminator.init)(jax.random.key(1), jnp.ones(64))
    g_tx = optax.adam(0.02, b1=0.5)
    g_state = g_tx.init(g_params)

    class Made:
        def __len__(self):
            return EXAMPLES

        def __getitem__(self, index):
            return make(g_params, np.random.normal(size=4).astype(np.float32))

    def loss(d_params, example):
        real, fake = (discriminator.apply(d_params, image)[0] for image in example)
        return jax.nn.softplus(-real) + jax.nn.softplus(fake)

    @jax.jit
    def generator_step(g_params, g_state, d_params, key):
        def fooled(g_params):
            fake = generator.apply(g_params, jax.random.normal(key, (16, 4)))
            return jax.nn.softplus(-discriminator.apply(d_params, fake)).mean()

        updates, g_state = g_tx.update(jax.grad(fooled)(g_params), g_state)
        return optax.apply_updates(g_params, updates), g_state

    first, seen = jax.device_get(g_params), []
    training = Training(loss, optax.adam(0.02, b1=0.5), (images, Made()), quiet_plan(), clip_norm=1.0)
    for state in training.steps(training.init(d_params)):
        seen.append(make(g_params, jnp.ones(4)))
        g_params, g_state = generator_step(g_params, g_state, state.weights, jax.random.key(state.step))
    assert training.finished
    assert len({leaf.tobytes() for leaf in map(np.asarray, seen)}) == len(seen)
    fixed = images, np.stack([make(first, np.full(4, i / 64, np.float32)) for i in range(EXAMPLES)])
    assert learns(loss, d_params, state.weights, fixed)
    assert_first_sum_is_autograds(loss, d_params, fixed)


# --- a flow -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_haiku_flow():
    """Affine couplings; the likelihood of points by the change of variables."""
    angles = np.random.default_rng(0).uniform(0, np.pi, EXAMPLES)
    points = (2 + np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)

    def log_density(x):
        total = 0.0
        for layer in range(4):
            x = jnp.roll(x, 1) if layer else x
            scale, shift = jnp.split(hk.nets.MLP([8, 2], activation=jnp.tanh)(x[:1]), 2)
            x = jnp.concatenate([x[:1], (x[1:] - shift) * jnp.exp(-jnp.tanh(scale))])
            total = total - jnp.tanh(scale).sum()
        return total - 0.5 * (x**2).sum() - jnp.log(2 * jnp.pi)

    network = hk.without_apply_rng(hk.transform(log_density))
    params = jax.jit(network.init)(jax.random.key(0), points[0])

    def loss(params, point):
        return -network.apply(params, point)

    training = Training(loss, optax.adam(0.03), points, quiet_plan(), clip_norm=1.0)
    state = last(training.steps(training.init(params)))
    assert training.finished
    assert mean_loss(loss, state.weights, points) < mean_loss(loss, params, points)
    assert_first_sum_is_autograds(loss, params, points)
