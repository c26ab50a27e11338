"""Real processes: 1, 2 and 3 torch ranks over gloo add the oracle's noise, and load each other's checkpoints."""

from __future__ import annotations

import pytest

import children
from children import HERE

# World sizes in this order; a checkpoint such as rows2 is saved by two ranks and loaded by three.
SCENARIOS = {
    2: ["rows", "columns", "copies", "ddp", "module", "keys", "save_rows2", "save_ddp2", "save_kept2"],
    3: ["rows", "ddp", "load_rows2", "load_ddp2", "load_kept2", "save_rows3", "save_ddp3", "save_keptddp3"],
    1: ["rows", "ddp", "load_rows3", "load_ddp3", "load_keptddp3"],
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Of all ranks of all world sizes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plays = [f"{ranks}:{','.join(names)}" for ranks, names in SCENARIOS.items()]
    done = children.run(HERE / "torch_ranks.py", folder, *plays)
    return done.stderr + done.stdout


@pytest.mark.parametrize(("ranks", "scenario"), [(r, s) for r, names in SCENARIOS.items() for s in names])
def test_ranks_add_the_oracles_noise_and_resume_each_others_runs(output, ranks, scenario):
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: {scenario} holds" in output, output[-3000:]
