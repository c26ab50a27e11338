"""A private model in JAX, sharded over a mesh of devices: weights and noise over one axis, examples over the other.

pip install 'bandmf[jax]'
python examples/jax_sharded.py               eight virtual devices where there is only a CPU
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bandmf
from bandmf.jax import Training

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


training = Training(loss, optax.adam(3e-3), (x, y), plan, clip_norm=1.0, sharding=rows)
first = training.init({name: place(name) for name in shapes})  # the noise is sharded like the weights
before = float(jnp.mean(jax.vmap(loss, (None, 0))(first.weights, (x, y))))
for state in training.steps(first):
    if state.step % 20 == 0:
        print(f"step {state.step} of {plan.steps}")
after = float(jnp.mean(jax.vmap(loss, (None, 0))(state.weights, (x, y))))

held = state.weights["in"]
share = held.addressable_shards[0].data.nbytes / held.nbytes
print(f"{state.step} steps on {len(devices)} devices, each holds {share:.0%} of the history of {plan.bands} bands")
print(f"mean squared error {before:.3f} before, {after:.3f} after, epsilon={training.spent():.2f}")
