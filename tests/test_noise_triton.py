"""The Triton kernels, run by Triton's interpreter on the CPU (a GPU runs them in benchmarks/noise_gpu.py)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from children import HERE, environment
from triton_kernels import CASES, CHECKS, PLANTED, SLOW, XLA_CASES


def interpret(*arguments: str, timeout: float = 300) -> str:
    """What triton_kernels.py prints; Triton must know of its interpreter before it is imported."""
    command = [sys.executable, str(HERE / "triton_kernels.py"), *arguments]
    env = environment(TRITON_INTERPRET="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def run(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def output():
    """Of all claims in one process: to start one takes longer than most claims."""
    return interpret()


@pytest.mark.parametrize("claim", [name for name in (*CASES, *XLA_CASES, *CHECKS) if name not in SLOW])
def test_kernels_equal_the_oracle(output, claim):
    assert f"{claim} holds" in output.splitlines()


@pytest.mark.parametrize("place", PLANTED)
def test_an_error_planted_in_the_kernels_is_seen_by_the_comparison(output, place):
    (found,) = re.findall(rf"^planted {place}: (.+)$", output, re.MULTILINE)
    if place == "nothing":  # to copy the kernels changes nothing
        assert float(found) < 1e-5
    else:
        assert float(found) > 0.1


@pytest.mark.long
def test_kernels_equal_the_oracle_for_every_family():
    interpret("sweep", timeout=1800)


def test_the_kernels_can_be_imported_without_a_gpu():
    done = run("import bandmf.native.triton_kernels; print('imported')")
    assert done.stdout.strip() == "imported", done.stderr


def test_the_package_imports_without_triton_and_fails_where_it_is_requested():
    done = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from bandmf.torch import Engine; from bandmf.strategies import Identity\n"
        "print('imported')\n"
        "engine = Engine(Identity(2), kernels='triton'); state = engine.init({'w': (3,)})\n"
        "engine.add(state, {'w': torch.zeros(3)}, 1.0)"
    )
    assert done.stdout.strip() == "imported", done.stderr
    assert done.returncode != 0
    assert "triton" in done.stderr.splitlines()[-1]
