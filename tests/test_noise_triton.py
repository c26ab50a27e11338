"""The Triton kernels, run by Triton's interpreter on the CPU (a GPU runs them in benchmarks/noise_gpu.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")


@needs_triton
def test_kernels_equal_the_oracle():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_the_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import bandmf.torch; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "imported", done.stderr


def test_a_requested_triton_that_is_missing_fails():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from bandmf.torch import Engine; from bandmf.strategies import Identity\n"
        "engine = Engine(Identity(2), kernels='triton'); state = engine.init({'w': (3,)})\n"
        "engine.add(state, {'w': torch.zeros(3)}, 1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "triton" in done.stderr.splitlines()[-1]


def main() -> None:
    from bandmf import Key
    from bandmf.strategies import BandedInverse, BufferedToeplitz, Identity, tree_aggregation
    from noise_families import largest_difference, oracle_noise, toeplitz, torch_noise

    key, shapes = Key(), {"w": (3, 700), "b": (5,)}
    for strategy, options in [
        (Identity(2), {}),
        (toeplitz(18, 17), {"lookahead": 7}),
        (toeplitz(5, 3), {}),
        (BandedInverse([1, -0.5, 0.2, 0.1], 4), {}),
        (tree_aggregation(5), {}),
        (BufferedToeplitz([0.3, 0.1], [0.9, 0.5], 4), {}),
    ]:
        got = torch_noise(strategy, key, shapes, kernels="triton", cipher_rounds=8, **options)
        assert largest_difference(got, oracle_noise(strategy, key, shapes, cipher_rounds=8)) < 1e-5, strategy
        print(strategy, flush=True)


if __name__ == "__main__":
    main()
