"""What tests/attacks/test_jax_clipping_leaks.py runs in a process with eight virtual devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bandmf.jax import clipped_gradient, clipping

ROWS = 16


def over_devices(mesh, gradient, turns=1, **more):
    """The sum over a mesh: every device clips its own rows, in so many turns."""

    def here(weights, rows, mask):
        every = jax.tree.map(lambda leaf: leaf.reshape(turns, -1, *leaf.shape[1:]), (rows, mask))
        sums = jax.lax.map(lambda part: gradient(weights, part[0], mask=part[1]), every)
        return jax.lax.psum(jax.tree.map(lambda leaf: leaf.sum(0), sums), "data")

    cut = P("data")
    return jax.jit(jax.shard_map(here, mesh=mesh, in_specs=(P(), cut, cut), out_specs=P(), **more))


def linear(weights, example):
    return weights @ example


def moved(total):
    """By how much another example in the place of one moves the sum, beside equal ones: by 2, if clipped alone."""
    x, every = np.full((ROWS, 3), 2.0, np.float32), np.ones(ROWS, bool)
    before = total(jnp.zeros(3), x, every)
    x[0] = -1e4
    return float(np.linalg.norm(total(jnp.zeros(3), x, every) - before))


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    x, mask = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32) * 10, np.arange(ROWS) % 3 > 0
    plain = clipped_gradient(linear, clip_norm=1.0)
    expected = np.asarray(plain(jnp.zeros(3), x, mask=mask).total)
    for name, turns, check in ("sum", 1, {}), ("turns", 2, {}), ("unchecked", 1, {"check_vma": False}):
        gradient = over_devices(mesh, plain, turns, **check)
        np.testing.assert_allclose(gradient(jnp.zeros(3), x, mask).total, expected, atol=2e-6)
        assert moved(lambda *given, own=gradient: np.asarray(own(*given).total)) <= 2 + 1e-5
        print(name, "holds", flush=True)
    print("contribution holds", flush=True)
    explicit_mesh(x, mask, expected)
    planted_fault(mesh)
    cut_weights(mesh)


def explicit_mesh(x, mask, expected):
    """Where shardings are part of types."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put((x, mask), NamedSharding(mesh, P("data")))
        gradient = jax.jit(clipped_gradient(linear, clip_norm=1.0))
        np.testing.assert_allclose(gradient(jnp.zeros(3), rows[0], mask=rows[1]).total, expected, atol=2e-6)
    print("explicit mesh holds", flush=True)


def planted_fault(mesh):
    """Weights that devices share: their gradients are added before they are clipped."""
    keep, clipping.gradient.own_weights = clipping.gradient.own_weights, lambda weights, _: weights
    gradient = over_devices(mesh, clipped_gradient(linear, clip_norm=1.0))
    found = moved(lambda *given: np.asarray(gradient(*given).total))
    clipping.gradient.own_weights = keep
    assert found > 4, found
    print("fault holds", flush=True)


def cut_weights(mesh):
    """Of weights that are cut inside shard_map a device knows its part of the norm only."""
    apart = clipped_gradient(lambda weights, one: jnp.sum(weights) * one, clip_norm=1.0)
    checked = jax.shard_map(apart, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with pytest.raises(ValueError, match="cut over the mesh axes"):
        checked(jnp.zeros(8), jnp.ones(4))
    print("cut weights holds", flush=True)


if __name__ == "__main__":
    main()
