"""What tests/test_jax_mesh.py runs: private training over a mesh, in one process with eight virtual devices or in two.

python jax_mesh_training.py one FOLDER                   eight devices
python jax_mesh_training.py more FOLDER                  again, in further layouts
python jax_mesh_training.py two FOLDER RANK PORT         one of two processes with four devices each
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bandmf
from bandmf import Key
from bandmf.jax import Training
from bandmf.jax.training.data import Source
from training import same_run

EXAMPLES, WIDTH, STEPS, CLIP = 64, 16, 10, 0.5
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
PARAMETERS = 8 * WIDTH + WIDTH * 2 + 2
SPECS = {"in": P(None, "model"), "out": P("model", None), "bias": P()}


def the_plan(**more):
    settings = {"steps": STEPS, "bands": 4, "batch_size": 16, "sampling": "cyclic-poisson"} | more
    return bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, **settings)


def data():
    dice = np.random.default_rng(0)
    return dice.normal(size=(EXAMPLES, 8)).astype(np.float32), dice.normal(size=(EXAMPLES, 2)).astype(np.float32)


def first_weights():
    dice = np.random.default_rng(1)
    shapes = {"in": (8, WIDTH), "out": (WIDTH, 2), "bias": (2,)}
    return {name: dice.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def loss(weights, example):
    x, y = example
    return jnp.sum((jnp.tanh(x @ weights["in"]) @ weights["out"] + weights["bias"] - y) ** 2)


def placed(mesh, specs):
    """The first weights on a mesh."""

    def on_mesh(leaf, spec):
        return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index])

    return {name: on_mesh(leaf, specs[name]) for name, leaf in first_weights().items()}


def open_run(plan, rows=None, folder=None, **more):
    with same_run():
        return Training(
            loss, optax.adam(0.05), more.pop("data", None) or data(), plan, clip_norm=CLIP, sharding=rows,
            folder=folder, save_every=None if folder is None else 4, key=Key(bytes(32)), **more,
        )  # fmt: skip


def trained(training, weights, until=STEPS, at_once=1):
    """The weights after so many steps, or chunks of them."""
    for state in training.steps(training.init(weights), at_once=at_once):
        if state.step >= until:
            break
    return training.state.weights


def on_one_device():
    return {name: jnp.asarray(leaf) for name, leaf in first_weights().items()}


def whole(tree):
    """All weights in one vector, gathered from all processes."""
    if jax.process_count() > 1:
        tree = jax.tree.map(partial(jax.experimental.multihost_utils.process_allgather, tiled=True), tree)
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


def compare(name, found, expected, tolerance=1e-5):
    difference = np.abs(whole(found) - expected).max()
    assert difference < tolerance, (name, difference)
    print(name, "holds", flush=True)


def one(folder):
    """Every layout against one device."""
    plan = the_plan()
    expected = whole(trained(open_run(plan), on_one_device()))
    np.save(folder / "expected.npy", expected)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    replicated = dict.fromkeys(SPECS, P())
    compare("data-parallel", trained(open_run(plan, rows), placed(mesh, replicated)), expected)
    both = open_run(plan, rows, micro_batch=8)
    compare("sharded, in micro-batches,", trained(both, placed(mesh, SPECS)), expected)
    history = both._held.noise.history["in"]
    assert history.addressable_shards[0].data.size * 2 == history.size  # sharded like the weights, over two
    no_collective(both)
    compiled_once(both)
    compare("steps taken at once", in_chunks(plan, mesh, rows, folder / "chunks"), expected)
    an_eighth_each(mesh, rows)
    data_sets_over_devices(rows)
    devices_that_disagree(plan, mesh, rows)


def no_collective(training):
    """Noise and update move nothing between devices."""
    held = training._held
    total = jax.tree.map(jnp.zeros_like, held.trained)
    text = training._programs.advance.lower(total, held, training._secrets.noise).compile().as_text()
    assert not [line for line in text.splitlines() if any(f" {word}" in line for word in COLLECTIVES)]
    print("no collective holds", flush=True)


def compiled_once(training):
    """What comes out of a step lies where it was: nothing is compiled again."""
    assert training._programs.clip._cache_size() == 1
    assert training._programs.advance._cache_size() == 1
    print("compiled once holds", flush=True)


def in_chunks(plan, mesh, rows, folder):
    """The weights after chunks, of which the last is taken again after a restart: it is the very same program."""
    run = open_run(plan, rows, folder)
    trained(run, placed(mesh, SPECS), until=8, at_once=4)
    run._let_go()
    run = open_run(plan, rows, folder)
    weights = trained(run, placed(mesh, SPECS), at_once=4)
    assert run._opened.on_ledger(lambda ledger: ledger.replays) == 4
    lie_as_given(weights, placed(mesh, SPECS))
    run.close()
    return weights


def lie_as_given(weights, given):
    """What was restored is on the devices of what `init` was given, however it was saved."""
    for name, leaf in given.items():
        assert weights[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name


def more(folder):
    """With the history flat over all devices, and restarts on one device and on eight."""
    plan, expected = the_plan(), np.load(folder / "expected.npy")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows, flat = NamedSharding(mesh, P("data")), the_plan(devices=8, parameters=PARAMETERS)
    compare("flat over all devices", trained(open_run(flat, rows), placed(mesh, SPECS)), expected)
    for name, begins, ends in (("one device", rows, None), ("eight devices", None, rows)):
        run = open_run(plan, begins, folder / name)
        trained(run, on_one_device() if begins is None else placed(mesh, SPECS), until=5)
        run.close()
        run = open_run(plan, ends, folder / name)
        given = on_one_device() if ends is None else placed(mesh, SPECS)
        weights = trained(run, given)
        lie_as_given(weights, given)
        compare(f"restart on {name}", weights, expected)
        run.close()


def an_eighth_each(mesh, rows):
    """With a plan for eight devices each of them holds an eighth of the history."""
    plan = bandmf.plan(
        epsilon=8, delta=1e-5, examples=EXAMPLES, batch_size=4, steps=32, bands=16, sampling="cyclic-poisson",
        devices=8, parameters=PARAMETERS,
    )  # fmt: skip
    run = open_run(plan, rows)
    run.init(placed(mesh, dict.fromkeys(SPECS, P())))
    held = run._held.noise.history["in"]
    assert {shard.data.size * 8 for shard in held.addressable_shards} == {held.size}
    print("an eighth each holds", flush=True)


class Changed:
    """Examples with random changes, one for an index."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        x, y = data()
        return x[index] + np.random.normal(size=8).astype(np.float32), y[index]


def data_sets_over_devices(rows):
    """Rows that are cut over devices are those of one device, random changes too."""
    key, some = Key(bytes(32)), np.arange(3, 20)
    alone, cut = (Source(Changed(), the_plan(), 24, sharding).rows([some], 5, key) for sharding in (None, rows))
    np.testing.assert_array_equal(alone.places, cut.places)
    held = np.asarray(alone.places) >= 0  # the others are some example or other
    assert held.sum() == len(some)
    for one, other in zip(alone.data, cut.data, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[held], np.asarray(other)[held])
    assert len(cut.data[0].sharding.device_set) == 8
    memory = np.empty((len(some) * 8, 8), np.float32)

    def refill(indices):
        return np.take(data()[0], indices, 0, out=memory[: len(indices)])

    # Each is read before the function is asked again, as a step is taken before the next one is loaded.
    ways = (Source(refill, the_plan(), 24, sharding) for sharding in (None, rows))
    alone, cut = (np.array(way.rows([some], 5, key).data) for way in ways)
    np.testing.assert_array_equal(alone[held], cut[held])
    print("data sets over devices holds", flush=True)


def unequal(mesh):
    """Weights that one device has otherwise than all others."""
    weights = placed(mesh, dict.fromkeys(SPECS, P()))
    bias, last = weights["bias"], jax.devices()[-1]
    parts = [
        jax.device_put(first_weights()["bias"] + (0.5 if device == last else 0.0), device)
        for device in jax.local_devices()
    ]
    return weights | {"bias": jax.make_array_from_single_device_arrays(bias.shape, bias.sharding, parts)}


def devices_that_disagree(plan, mesh, rows):
    """Each device has a sum of its own, and one noise would be put on all of them."""
    flat = Mesh(np.array(jax.devices()), ("data",))
    run = open_run(plan, NamedSharding(flat, P()))
    with pytest.raises(ValueError, match="devices have different ones"):
        run.init(unequal(flat))
    assert run.spent() == 0
    print("devices that disagree holds", flush=True)


def two(folder, rank, port):
    """One of two processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    plan = the_plan()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    expected = np.load(folder / "expected.npy")
    run = open_run(plan, rows, folder / "two")
    trained(run, placed(mesh, SPECS), until=5)
    run.close()
    run = open_run(plan, rows, folder / "two")
    weights = trained(run, placed(mesh, SPECS))
    compare("two processes, restarted,", weights, expected)
    run.close()
    own_sums_are_refused(plan, rank)
    flat = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ValueError, match="devices have different ones"):
        trained(open_run(plan, NamedSharding(flat, P())), unequal(flat))
    print("one process disagrees holds", flush=True)


def own_sums_are_refused(plan, rank):
    """Processes that do not share their rows would put one noise on two sums."""
    run = open_run(plan, data=tuple(part * (1 + rank) for part in data()))
    with pytest.raises(ValueError, match="digest of the sum"):
        trained(run, on_one_device())
    print("sums of its own are refused holds", flush=True)


if __name__ == "__main__":
    kind, place, *numbers = sys.argv[1:]
    {"one": one, "more": more, "two": two}[kind](Path(place), *map(int, numbers))
