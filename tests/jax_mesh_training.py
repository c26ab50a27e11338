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
from bandmf.jax.training.source import Source
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
    compare("steps taken at once", in_chunks(plan, mesh, rows, folder / "chunks"), expected)
    an_eighth_each(mesh)
    compiled_once(mesh)
    data_sets_over_devices(rows)
    devices_that_disagree(plan, mesh, rows)


def in_chunks(plan, mesh, rows, folder):
    """The weights after chunks, of which the second is taken again after a restart: it is the very same program."""
    training = Training(plan, placed(mesh, SPECS), rows=rows)
    for _ in range(2):
        run = open_run(plan, folder)
        training.begin(placed(mesh, SPECS))
        training.weights, training.state = run.restore((training.weights, training.state))
        for chunk in run.chunks(data(), steps=5, sharding=rows):
            training.weights, training.state = run.release_chunk(
                training.advance, chunk, training.weights, training.state
            )
            if run.steps_taken == 5:
                run.save((training.weights, training.state))
        assert len(run._programs._known) == 1
        run.close()
    return training.weights


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
    alone, cut = (
        Source(Changed(), EXAMPLES, 16, 24, sharding, key).rows(some, 5) for sharding in (None, rows)
    )
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(cut), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(cut.data[0].sharding.device_set) == 8
    print("data sets over devices holds", flush=True)


def devices_that_disagree(plan, mesh, rows):
    """A forgotten psum: each device has a sum of its own, and one noise would be put on all of them."""
    training, run = Training(plan, placed(mesh, dict.fromkeys(SPECS, P())), rows=rows), open_run(plan)
    clipped = clipped_gradient(loss, clip_norm=CLIP)

    def advance(rows, weights, state, secret):
        total = jax.shard_map(
            lambda weights, data, mask: clipped(weights, data, mask=mask),
            mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False,
        )(weights, rows.data, rows.mask)  # fmt: skip
        return training._update(total, weights, state, secret)

    chunk = next(run.chunks(data(), steps=2, sharding=rows))
    with pytest.raises(ValueError, match=r"devices have different sums of one step.*cannot go on"):
        run.release_chunk(advance, chunk, training.weights, training.state)
    assert run.spent() > 0
    training.begin(placed(mesh, dict.fromkeys(SPECS, P())))
    with pytest.raises(ValueError, match="were begun as one chunk that did not end"):
        run.release_chunk(training.advance, chunk, training.weights, training.state)
    print("devices that disagree holds", flush=True)


def compiled_once(mesh):
    """The state comes out of a step where it was, and so do weights, wherever they lie: nothing is compiled again."""
    narrow = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))
    for plan in (the_plan(bands=1), the_plan()):  # without a history, and without look-ahead
        for on, specs in ((mesh, dict.fromkeys(SPECS, P())), (mesh, SPECS), (narrow, SPECS)):
            for flat in (None, on):
                weights = placed(on, specs)
                found = update_of(plan, weights, flat)
                assert found == 1, (plan.bands, on.shape, specs, flat is not None, found)
    print("compiled once holds", flush=True)


def update_of(plan, weights, flat):
    """How often privatize is compiled in three steps."""
    noise, run = privatize(plan, clip_norm=CLIP, mesh=flat), open_run(plan)
    state, total = noise.init(weights), Clipped(jax.tree.map(jnp.zeros_like, weights), CLIP)
    update = jax.jit(lambda total, state, secret: noise.update(total, state, secret=secret), donate_argnums=1)
    for step in range(3):
        secret = run._secrets.of_step(plan, step, run._secrets.examined(total)[0])
        noisy, state = update(total, state, secret)
        for name, leaf in noisy.items():
            assert leaf.sharding.is_equivalent_to(weights[name].sharding, leaf.ndim), name
        assert np.isfinite(whole(noisy)).all()
    return update._cache_size()


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
    one_process_disagrees(plan)


def one_process_disagrees(plan):
    """All refuse a chunk in which the devices of one process have different sums: none waits for the other."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    training = Training(plan, placed(mesh, dict.fromkeys(SPECS, P())), rows=NamedSharding(mesh, P()))
    bias, last = training.weights["bias"], jax.devices()[-1]
    parts = [
        jax.device_put(first_weights()["bias"] + (0.5 if device == last else 0.0), device)
        for device in jax.local_devices()
    ]
    training.weights["bias"] = jax.make_array_from_single_device_arrays(bias.shape, bias.sharding, parts)
    run = open_run(plan)
    chunk = next(run.chunks(data(), steps=2, sharding=training.rows))
    with pytest.raises(ValueError, match="devices have different sums of one step"):
        run.release_chunk(training.advance, chunk, training.weights, training.state)
    print("one process disagrees holds", flush=True)


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
