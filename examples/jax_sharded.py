"""A private model in JAX, sharded over a mesh of devices: weights and noise over one axis, examples over the other.

pip install 'bandmf[jax]'
python examples/jax_sharded.py               eight virtual devices where there is only a CPU
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bandmf
from bandmf.jax import Run, clipped_gradient, privatize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--epochs", type=float, default=4.0)
arguments = parser.parse_args()

devices = np.array(jax.devices())
across = 2 if len(devices) % 2 == 0 else 1
mesh = Mesh(devices.reshape(-1, across), ("data", "model"))
rows = NamedSharding(mesh, P("data"))  # every process loads the rows of its own devices

dice = np.random.default_rng(0)
x = dice.normal(size=(4000, 32)).astype(np.float32)
y = np.sin(x @ dice.normal(size=32)).astype(np.float32)
shapes = {"in": (32, arguments.width), "bias": (arguments.width,), "out": (arguments.width,)}
specs = {"in": P(None, "model"), "bias": P("model"), "out": P("model")}
plan = bandmf.plan(
    epsilon=8, delta=1e-6, examples=len(x), batch_size=256, epochs=arguments.epochs, sampling="cyclic-poisson"
)


def place(name: str) -> jax.Array:
    """First weights, where they belong."""
    first = dice.normal(size=shapes[name]) / np.sqrt(shapes[name][0])
    return jax.device_put(jnp.asarray(first, jnp.float32), NamedSharding(mesh, specs[name]))


def loss(weights, example):
    x, y = example
    return (jnp.tanh(x @ weights["in"] + weights["bias"]) @ weights["out"] - y) ** 2


gradient = jax.jit(clipped_gradient(loss, clip_norm=1.0))
optimizer = optax.chain(privatize(plan, clip_norm=1.0), optax.adam(3e-3))


@partial(jax.jit, donate_argnums=(1, 2))
def update(total, weights, state, secret):
    updates, state = optimizer.update(total, state, weights, secret=secret)
    return optax.apply_updates(weights, updates), state


weights = {name: place(name) for name in shapes}
state = optimizer.init(weights)  # the history of the noise is sharded like the weights
run = Run(plan)
before = float(jnp.mean(jax.vmap(loss, (None, 0))(weights, (x, y))))
for batch in run.batches((x, y), sharding=rows):
    total = batch.sum(partial(gradient, weights))
    weights, state = run.release(update, total, weights, state)
after = float(jnp.mean(jax.vmap(loss, (None, 0))(weights, (x, y))))

held = state[0].noise.history["in"]
share = held.addressable_shards[0].data.nbytes / max(1, held.nbytes)
print(
    f"{run.steps_taken} steps on {len(devices)} devices, each holds {share:.0%} of the history of {plan.bands} bands"
)
print(f"mean squared error {before:.3f} before, {after:.3f} after, epsilon={run.spent():.2f}")
