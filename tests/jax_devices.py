"""What tests/test_noise_jax_sharding.py runs in a process with eight virtual devices: jax_devices.py"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bandmf import Key
from bandmf.jax import Engine
from noise_families import FAMILIES, largest_difference, oracle_noise

SHAPES = {"weight": (16, 130), "bias": (10,), "cube": (2, 4, 6)}
KEY = Key(bytes([5] * 32))
STRATEGY = FAMILIES["normalized"]
STEPS = 15
P = PartitionSpec


def run(engine: Engine, prototype, state=None, steps: int = STEPS):
    state = engine.init(prototype) if state is None else state
    add, noise = jax.jit(engine.add, donate_argnums=0), []
    zeros = {
        name: jnp.zeros_like(value) if hasattr(value, "dtype") else jnp.zeros(value)
        for name, value in prototype.items()
    }
    for _ in range(steps):
        gradients, state = add(state, zeros, 0.5)
        noise.append({name: np.asarray(value) for name, value in gradients.items()})
        for name, value in zeros.items():
            assert gradients[name].shape == value.shape
    return state, noise


def compare(noise, first: int = 0) -> None:
    difference = largest_difference(
        noise, oracle_noise(STRATEGY, KEY, SHAPES, 0.5)[first : first + len(noise)]
    )
    assert difference < 1e-5, difference


def sharded(mesh, specs):
    made = {}
    for name, shape in SHAPES.items():
        place = NamedSharding(mesh, specs[name]) if name in specs else None
        made[name] = jax.device_put(jnp.zeros(shape), place) if place else jnp.zeros(shape)
    return made


def main() -> None:
    assert len(jax.devices()) == 8
    auto = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    explicit = jax.make_mesh((4, 2), ("x", "y")) if hasattr(jax, "make_mesh") else auto
    single = Mesh(np.array(jax.devices()[:1]), ("x",))
    layouts = {
        "rows": {"weight": P("x")},
        "all axes on rows": {"weight": P(("y", "x"))},
        "columns": {"weight": P(None, "y"), "cube": P(None, None, "y")},
        "both": {"weight": P("x", "y"), "cube": P("y", "x"), "bias": P("y")},
    }
    for name, specs in layouts.items():
        state, noise = run(Engine(STRATEGY, KEY), sharded(auto, specs))
        compare(noise)
        spec, held = specs["weight"], state.history["weight"]
        parts = int(np.prod([auto.shape[axis] for entry in spec if entry for axis in np.atleast_1d(entry)]))
        assert held.addressable_shards[0].data.size * parts == held.size, "the history is not sharded"
        print(f"{name} holds", flush=True)
    run_explicit = run(Engine(STRATEGY, KEY), sharded(explicit, layouts["rows"]), steps=3)
    compare(run_explicit[1])

    flat = Engine(STRATEGY, KEY, mesh=auto)
    state, noise = run(flat, SHAPES)
    compare(noise)
    held = state.history["weight"]
    assert held.addressable_shards[0].data.size * 8 == held.size
    compare(run(Engine(STRATEGY, KEY, mesh=explicit), SHAPES, steps=2)[1])
    print("flat holds", flush=True)

    state, _ = run(flat, SHAPES, steps=9)
    saved = flat.state_dict(state)
    for name, engine in {
        "one device": Engine(STRATEGY, KEY),
        "flat over one": Engine(STRATEGY, KEY, mesh=single),
        "flat over eight": Engine(STRATEGY, KEY, mesh=auto),
    }.items():
        again = engine.load_state_dict(engine.init(SHAPES), saved)
        compare(run(engine, SHAPES, again, steps=3)[1], first=9)
        print(f"restart on {name} holds", flush=True)


if __name__ == "__main__":
    main()
