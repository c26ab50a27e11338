"""Private training in JAX over a mesh: eight virtual devices, and two real processes, train as one device does."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from children import HERE, environment

CLAIMS = [
    "data-parallel", "sharded, in microbatches,", "no collective", "steps taken at once", "an eighth each",
    "two processes, restarted,", "sums of its own are refused",
]  # fmt: skip
FURTHER = ["flat over all devices", "restart on one device", "restart on eight devices, flat"]
SCRIPT = HERE / "jax_mesh_training.py"


def flags(devices):
    # Nearly all of the time is compilation, so let LLVM try less hard: what is computed stays the same.
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def output(folder):
    return one_process("one", folder) + two_processes(folder)


def one_process(kind, folder):
    env = environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags(8))
    done = subprocess.run(
        [sys.executable, SCRIPT, kind, folder], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def two_processes(folder):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    env = environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags(4))
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "two", folder, str(rank), port],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=400) for child in started]
    for child, (out, error) in zip(started, outputs, strict=True):
        assert child.returncode == 0, out + error[-3000:]
    return outputs[0][0]


@pytest.mark.parametrize("claim", CLAIMS)
def test_training_over_a_mesh(output, claim):
    assert f"{claim} holds" in output


@pytest.mark.long
def test_training_over_a_mesh_in_further_layouts(output, folder):
    found = one_process("more", folder)
    assert [line.removesuffix(" holds") for line in found.splitlines()] == FURTHER
