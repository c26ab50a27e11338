"""What tests/test_noise_jax_sharding.py runs in a process with eight virtual devices: jax_devices.py"""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bandmf import Key
from bandmf.jax import Engine
from bandmf.strategies import Identity
from noise_families import FAMILIES, largest_difference, options, oracle_noise, toeplitz

SHAPES = {"weight": (16, 130), "bias": (10,), "cube": (2, 4, 6)}
KEY = Key(bytes([5] * 32))
STRATEGY = FAMILIES["normalized"]
KEPT, KEPT_OPTIONS = FAMILIES["inverse_partly_kept"], options("inverse_partly_kept")
STEPS = 15
P = PartitionSpec
EXPLICIT = (AxisType.Explicit,) * 2
LAYOUTS = {
    "rows": {"weight": P("x")},
    "all axes on rows": {"weight": P(("y", "x"))},
    "columns": {"weight": P(None, "y"), "cube": P(None, None, "y")},
    "both": {"weight": P("x", "y"), "cube": P("y", "x"), "bias": P("y")},
}
# All layouts in one gradient: a program for each would take four times as long to compile.
ALL_SHAPES = {f"{layout} {name}": shape for layout in LAYOUTS for name, shape in SHAPES.items()}
ALL_SPECS = {f"{layout} {name}": spec for layout, specs in LAYOUTS.items() for name, spec in specs.items()}


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


@cache
def truth(all_layouts: bool, strategy):
    return oracle_noise(strategy, KEY, ALL_SHAPES if all_layouts else SHAPES, 0.5)


def compare(noise, first: int = 0, strategy=STRATEGY) -> None:
    expected = truth(noise[0].keys() == ALL_SHAPES.keys(), strategy)[first : first + len(noise)]
    difference = largest_difference(noise, expected)
    assert difference < 1e-5, difference


def sharded(mesh, shapes, specs):
    made = {}
    for name, shape in shapes.items():
        place = NamedSharding(mesh, specs[name]) if name in specs else None
        made[name] = jax.device_put(jnp.zeros(shape), place) if place else jnp.zeros(shape)
    return made


def check_sharded(held, spec, mesh) -> None:
    parts = int(np.prod([mesh.shape[axis] for entry in spec if entry for axis in np.atleast_1d(entry)]))
    assert held.addressable_shards[0].data.size * parts == held.size, "the history is not sharded"


def main() -> None:
    assert len(jax.devices()) == 8
    auto = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    explicit = jax.make_mesh((4, 2), ("x", "y"), EXPLICIT)
    single = Mesh(np.array(jax.devices()[:1]), ("x",))
    state, noise = run(Engine(STRATEGY, KEY), sharded(auto, ALL_SHAPES, ALL_SPECS))
    compare(noise)
    for name, specs in LAYOUTS.items():
        check_sharded(state.history[f"{name} weight"], specs["weight"], auto)
        print(f"{name} holds", flush=True)
    compare(run(Engine(STRATEGY, KEY), sharded(explicit, SHAPES, LAYOUTS["rows"]), steps=3)[1])
    check_explicit()
    check_nothing_is_sent(auto)

    flat = Engine(STRATEGY, KEY, mesh=auto)
    state, noise = run(flat, SHAPES, steps=9)
    compare(noise)
    saved = flat.state_dict(state)
    held = state.history["weight"]
    assert held.addressable_shards[0].data.size * 8 == held.size
    compare(run(flat, SHAPES, state, steps=STEPS - 9)[1], first=9)
    compare(run(Engine(STRATEGY, KEY, mesh=explicit), SHAPES, steps=2)[1])
    print("flat holds", flush=True)

    for name, engine in {
        "one device": Engine(STRATEGY, KEY),
        "flat over one": Engine(STRATEGY, KEY, mesh=single),
        "flat over eight": Engine(STRATEGY, KEY, mesh=auto),
    }.items():
        again = engine.load_state_dict(engine.init(SHAPES), saved)
        compare(run(engine, SHAPES, again, steps=3)[1], first=9)
        print(f"restart on {name} holds", flush=True)
    check_kept_inputs(auto)


def check_explicit() -> None:
    """Where the user keeps track of shardings, empty histories and axes of one device are as they were written."""
    for rows, columns in ((4, 2), (4, 1)):
        mesh = jax.make_mesh((rows, columns), ("x", "y"), EXPLICIT, devices=jax.devices()[: rows * columns])
        for strategy in (Identity(3), toeplitz(3, 3)):  # without a history, and without look-ahead
            for specs in (LAYOUTS["rows"], LAYOUTS["both"]):
                noise = run(Engine(strategy, KEY), sharded(mesh, SHAPES, specs), steps=2)[1]
                compare(noise, strategy=strategy)
            compare(run(Engine(strategy, KEY, mesh=mesh), SHAPES, steps=2)[1], strategy=strategy)


def check_nothing_is_sent(mesh) -> None:
    """Every device makes the noise of its own part; the native kernel in one program that fits every step."""
    specs = LAYOUTS["both"]
    engine, gradients = Engine(STRATEGY, KEY), sharded(mesh, {name: SHAPES[name] for name in specs}, specs)
    state, add = engine.init(gradients), jax.jit(engine.add, donate_argnums=0)
    key = jax.device_put(engine.noise_key(), NamedSharding(mesh, P()))
    text = add.lower(state, gradients, 0.5, key).compile().as_text()
    assert not re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text)
    for _ in range(3):
        _, state = add(state, gradients, 0.5, key)
    assert add._cache_size() == 1
    print("nothing is sent", flush=True)


def check_kept_inputs(mesh) -> None:
    """z of the last two steps is kept where the gradient is, and goes on elsewhere."""
    eight, one = (Engine(KEPT, KEY, **KEPT_OPTIONS) for _ in range(2))
    state, noise = run(eight, sharded(mesh, SHAPES, LAYOUTS["both"]), steps=8)
    compare(noise, strategy=KEPT)
    check_sharded(state.history["weight"], LAYOUTS["both"]["weight"], mesh)
    print("kept inputs holds", flush=True)
    again = one.load_state_dict(one.init(SHAPES), eight.state_dict(state))
    compare(run(one, SHAPES, again, steps=4)[1], first=8, strategy=KEPT)
    print("restart on one device with kept inputs holds", flush=True)


if __name__ == "__main__":
    main()
