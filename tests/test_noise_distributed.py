"""Real processes: 1, 2 and 3 torch ranks over gloo add the oracle's noise, and load each other's checkpoints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent
# World sizes in this order; a checkpoint such as rows2 is saved by two ranks and loaded by three.
SCENARIOS = {
    2: ["rows", "columns", "copies", "ddp", "module", "keys", "save_rows2", "save_ddp2"],
    3: ["rows", "ddp", "load_rows2", "load_ddp2", "save_rows3", "save_ddp3"],
    1: ["rows", "ddp", "load_rows3", "load_ddp3"],
}


def launch(ranks: int, folder: Path) -> list[str]:
    """Run the scenarios of one world size; the output of every rank."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(HERE / "torch_ranks.py"), str(folder), *SCENARIOS[ranks]]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {ranks: launch(ranks, folder) for ranks in SCENARIOS}


@pytest.mark.parametrize(("ranks", "scenario"), [(r, s) for r, names in SCENARIOS.items() for s in names])
def test_ranks_add_the_oracles_noise_and_resume_each_others_runs(outputs, ranks, scenario):
    for rank, output in enumerate(outputs[ranks]):
        assert f"rank {rank} of {ranks}: {scenario} holds" in output, output[-3000:]
