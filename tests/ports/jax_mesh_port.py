"""What tests/ports/test_jax_mesh_port.py runs in a process with eight virtual devices: jax_mesh_port.py FOLDER

A program for a mesh: examples are cut over one of its axes, kernels over the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bandmf.jax import Training
from ports.jax_harness import assert_first_sum_is_autograds, learns, quiet_plan, toy_texts

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Mixer(nn.Module):
    """Letters, mixed along the text and in every place."""

    width: int = 16

    @nn.compact
    def __call__(self, tokens):
        def dense(size, name, *axes):
            kernel = nn.with_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(size, kernel_init=kernel, name=name)

        x = nn.Embed(10, self.width)(tokens)
        x = x + dense(tokens.shape[-1], "along", None, None)(nn.LayerNorm()(x).mT).mT
        y = nn.gelu(dense(4 * self.width, "up", None, "model")(nn.LayerNorm()(x)))
        x = x + dense(self.width, "down", "model", None)(y)
        return nn.Dense(2)(x.mean(-2))


def main(folder):
    assert len(jax.devices()) == 8
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    texts = toy_texts()
    data = texts, ((texts[:, 1] - texts[:, 0]) % 10 == 2).astype(np.int32)
    model = Mixer()

    def init(key):
        return model.init(key, texts[0])["params"]

    boxed = jax.eval_shape(init, jax.random.key(0))
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        nn.get_partition_spec(boxed),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    params = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=places)(jax.random.key(0))

    def loss(params, example):
        tokens, label = example
        return cross_entropy(model.apply({"params": params}, tokens), label)

    evaluate = jax.jit(lambda params: jax.vmap(loss, (None, 0))(params, data).mean())
    rows, found = NamedSharding(mesh, PartitionSpec("data")), []
    training = Training(
        loss, optax.adam(0.03), data, quiet_plan(), clip_norm=1.0, sharding=rows, folder=folder, save_every=8
    )
    for state in training.steps(training.init(params)):
        if state.step % 8 == 0:
            found.append(float(evaluate(state.weights)))
    training.close()
    assert training.finished
    assert found[-1] < found[0]
    kernel = state.weights["up"]["kernel"]
    assert kernel.sharding.is_equivalent_to(params["up"]["kernel"].sharding, 2)
    assert kernel.addressable_shards[0].data.size * 2 == kernel.size
    print("trained holds", flush=True)
    alone, after = jax.device_get(params), jax.device_get(state.weights)
    assert learns(loss, alone, after, data)
    assert_first_sum_is_autograds(loss, params, data, sharding=rows)
    print("first sum holds", flush=True)
    again = Training(loss, optax.adam(0.03), data, quiet_plan(), clip_norm=1.0, folder=folder, save_every=8)
    restored = again.init(jax.tree.map(jnp.asarray, alone))
    assert restored.step == 24
    np.testing.assert_array_equal(restored.weights["up"]["kernel"], after["up"]["kernel"])
    again.close()
    print("on one device again holds", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
