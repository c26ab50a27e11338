"""What tests/test_jax_mesh.py runs: private training over a mesh, in one process with eight virtual devices or in two.

python jax_mesh_training.py one FOLDER                   eight devices
python jax_mesh_training.py more FOLDER                  again, in further layouts
python jax_mesh_training.py two FOLDER RANK PORT         one of two processes with four devices each
"""

from __future__ import annotations

import re
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
from bandmf.jax import Clipped, Run, clipped_gradient, privatize
from bandmf.jax.privatize import private_states
from training import same_run

EXAMPLES, WIDTH, STEPS, CLIP = 64, 16, 10, 0.5
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
SPECS = {"in": P(None, "model"), "out": P("model", None), "bias": P()}


def the_plan(**more):
    settings = {"steps": STEPS, "bands": 4, "batch_size": 16, "sampling": "cyclic-poisson"} | more
    return bandmf.plan(epsilon=8, delta=1e-5, examples=EXAMPLES, **settings)


def data():
    dice = np.random.default_rng(0)
    return dice.normal(size=(EXAMPLES, 8)).astype(np.float32), dice.normal(size=(EXAMPLES, 2)).astype(
        np.float32
    )


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


class Training:
    """One layout of weights, history and batches."""

    def __init__(self, plan, weights, mesh=None, rows=None, microbatch=None):
        self.gradient = jax.jit(clipped_gradient(loss, clip_norm=CLIP, microbatch=microbatch))
        self.optimizer = optax.chain(privatize(plan, clip_norm=CLIP, mesh=mesh), optax.adam(0.05))
        self.update, self.rows = jax.jit(self._update, donate_argnums=(1, 2)), rows
        self.begin(weights)

    def begin(self, weights):
        """From these weights, with what was compiled before."""
        self.weights, self.state = weights, self.optimizer.init(weights)
        return self

    def _update(self, total, weights, state, secret):
        updates, state = self.optimizer.update(total, state, weights, secret=secret)
        return optax.apply_updates(weights, updates), state

    def advance(self, rows, weights, state, secret):
        return self._update(self.gradient(weights, rows.data, mask=rows.mask), weights, state, secret)

    def train(self, run, until=STEPS):
        for batch in run.batches(data(), sharding=self.rows):
            total = batch.sum(partial(self.gradient, self.weights))
            self.weights, self.state = run.release(self.update, total, self.weights, self.state)
            if run.steps_taken == until:
                break
        return self

    def program(self, run):
        """The compiled text of the update alone."""
        total = Clipped(jax.tree.map(jnp.zeros_like, self.weights), CLIP)
        secret = run._secrets.of_step(run.plan, 0, run._secrets.seeds)
        return self.update.lower(total, self.weights, self.state, secret=secret).compile().as_text()

    @property
    def history(self):
        (private,) = private_states(self.state)
        return private.noise.history


def open_run(plan, folder=None):
    with same_run():
        return Run(plan, folder, key=Key(bytes(32)))


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
    alone = Training(plan, {name: jnp.asarray(leaf) for name, leaf in first_weights().items()}).train(
        open_run(plan)
    )
    expected = whole(alone.weights)
    np.save(folder / "expected.npy", expected)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    replicated = {name: P() for name in SPECS}
    compare(
        "data-parallel",
        Training(plan, placed(mesh, replicated), rows=rows).train(open_run(plan)).weights,
        expected,
    )
    both = Training(plan, placed(mesh, SPECS), rows=rows, microbatch=8)
    text = both.program(open_run(plan))
    # The digest of the sum, four words, is all that devices tell each other.
    lines = [line for line in text.splitlines() if any(f" {word}" in line for word in COLLECTIVES)]
    shapes = [
        shape
        for line in lines
        for shape in re.findall(r"(\w+\[[\d,]*\])", line.split(" = ")[1].split("(%")[0])
    ]
    assert set(shapes) <= {"u32[4]", "u32[]", "u32[1]"}, lines
    print("no collective holds", flush=True)
    compare("sharded, in microbatches,", both.train(open_run(plan)).weights, expected)
    shard = both.history["in"].addressable_shards[0].data
    assert shard.size * 2 == both.history["in"].size  # sharded like the weights, over two
    at_once = Training(plan, placed(mesh, SPECS), rows=rows)
    run = open_run(plan)
    for chunk in run.chunks(data(), steps=5, sharding=rows):
        at_once.weights, at_once.state = run.release_chunk(
            at_once.advance, chunk, at_once.weights, at_once.state
        )
    compare("steps taken at once", at_once.weights, expected)
    an_eighth_each(mesh)


def more(folder):
    """With the history flat over all devices, and restarts on one device and on eight."""
    plan, expected = the_plan(), np.load(folder / "expected.npy")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))

    def sharded(flat):
        return Training(plan, placed(mesh, SPECS), mesh=mesh if flat else None, rows=rows)

    def alone():
        return Training(plan, {name: jnp.asarray(leaf) for name, leaf in first_weights().items()})

    compare("flat over all devices", sharded(True).train(open_run(plan)).weights, expected)
    restart("one device", partial(sharded, False), alone, folder, plan, expected)
    restart("eight devices, flat", partial(sharded, True), partial(sharded, True), folder, plan, expected)


def restart(name, begins, ends, folder, plan, expected):
    """A run that begins in one layout goes on in another."""
    run, first = open_run(plan, folder / name), begins()
    first.train(run, until=5)
    run.save((first.weights, first.state))
    run.close()
    training, run = ends(), open_run(plan, folder / name)
    training.weights, training.state = run.restore((training.weights, training.state))
    compare(f"restart on {name}", training.train(run).weights, expected)


def an_eighth_each(mesh):
    """With 128 bands each of eight devices holds an eighth of the history."""
    plan = bandmf.plan(
        epsilon=8, delta=1e-5, examples=12_800, batch_size=50, steps=256, bands=128, sampling="cyclic-poisson"
    )
    state = privatize(plan, clip_norm=1.0, mesh=mesh).init({"w": jnp.zeros((64, 64))})
    held = state.noise.history["w"]
    assert held.shape == (127, 4096)
    assert {shard.data.size for shard in held.addressable_shards} == {127 * 512}
    print("an eighth each holds", flush=True)


def two(folder, rank, port):
    """One of two processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    plan = the_plan()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    expected = np.load(folder / "expected.npy")
    run = open_run(plan, folder / "two")
    training = Training(plan, placed(mesh, SPECS), rows=rows).train(run, until=4)
    run.save((training.weights, training.state))
    run.close()
    again, run = training.begin(placed(mesh, SPECS)), open_run(plan, folder / "two")
    again.weights, again.state = run.restore((again.weights, again.state))
    assert run.steps_taken == 4
    again.train(run)
    compare("two processes, restarted,", again.weights, expected)
    own_sums_are_refused(plan, rank)


def own_sums_are_refused(plan, rank):
    """Processes that do not share their rows would put one noise on two sums."""
    training, run = (
        Training(plan, {name: jnp.asarray(leaf) for name, leaf in first_weights().items()}),
        open_run(plan),
    )
    batch = next(run.batches(tuple(part * (1 + rank) for part in data())))
    total = batch.sum(partial(training.gradient, training.weights))
    with pytest.raises(ValueError, match="digest of the sum"):
        run.release(training.update, total, training.weights, training.state)
    print("sums of its own are refused holds", flush=True)


if __name__ == "__main__":
    kind, place, *numbers = sys.argv[1:]
    {"one": one, "more": more, "two": two}[kind](Path(place), *map(int, numbers))
