"""Private training in JAX over a mesh: eight virtual devices, and two real processes, train as one device does."""

from __future__ import annotations

import pytest

import children
from children import HERE, devices

CLAIMS = [
    "data-parallel", "sharded, in micro-batches,", "no collective", "steps taken at once", "an eighth each",
    "compiled once", "data sets over devices", "devices that disagree", "two processes, restarted,",
    "sums of its own are refused", "one process disagrees",
]  # fmt: skip
FURTHER = ["flat over all devices", "restart on one device", "restart on eight devices"]
SCRIPT = HERE / "jax_mesh_training.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def output(folder):
    return [*one_process("one", folder), *two_processes(folder)]


def one_process(kind, folder):
    done = children.run(SCRIPT, kind, folder, env=devices(8), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


def two_processes(folder):
    port = str(children.free_port())
    started = [children.Started(SCRIPT, "two", folder, str(rank), port, env=devices(4)) for rank in range(2)]
    ended = [child.wait(400) for child in started]
    for done in ended:
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return ended[0].stdout.splitlines()


@pytest.mark.parametrize("claim", CLAIMS)
def test_training_over_a_mesh(output, claim):
    assert f"{claim} holds" in output


@pytest.mark.long
def test_training_over_a_mesh_in_further_layouts(output, folder):
    found = one_process("more", folder)
    assert [line.removesuffix(" holds") for line in found] == FURTHER
