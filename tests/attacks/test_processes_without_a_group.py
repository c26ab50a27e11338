"""Processes that know of each other train one run, others none at all; in the long tests torchrun starts them."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import children  # noqa: E402
from bandmf.torch import Training  # noqa: E402
from children import HERE, environment  # noqa: E402
from pages import ROOT  # noqa: E402
from training import simple_plan, small_data, small_model  # noqa: E402

EXAMPLE = ROOT / "examples" / "ddp.py"


def losses(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def forked(processes, folder, script):
    """The script in processes with the environment that torchrun would give them; what it leaves is in the folder."""
    folder.mkdir(exist_ok=True)
    for rank in children.ranks(processes, HERE / "launched.py", folder, script):
        assert rank.returncode == 0, rank.stderr[-3000:]
    return folder


def launch(processes, folder, script):
    """The same under torchrun, as a user would start it."""
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*torchrun, HERE / "launched.py", folder, script]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.long
def test_the_replicas_of_the_example_end_with_the_weights_of_one_process(tmp_path):
    two, one = launch(2, tmp_path / "two", EXAMPLE), launch(1, tmp_path / "one", EXAMPLE)
    first, second = (torch.load(two / f"weights-{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.load(one / "weights-0.pt"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("start", [forked, pytest.param(launch, marks=pytest.mark.long)])
def test_processes_without_a_group_are_refused_on_every_rank(start, tmp_path):
    script = tmp_path / "forgot.py"
    starts = [line for line in EXAMPLE.read_text().splitlines() if "init_process_group" in line]
    assert len(starts) == 2  # one for GPUs, one for the CPU
    script.write_text(EXAMPLE.read_text().replace(starts[0], "    pass").replace(starts[1], "    pass"))
    start(2, tmp_path / "two", script)
    for rank in (0, 1):
        refusal = (tmp_path / "two" / f"refused-{rank}").read_text()
        assert refusal.startswith("WORLD_SIZE=2: ")
        assert "torch.distributed.init_process_group(" in refusal


@pytest.mark.parametrize(("size", "refused"), [("2", True), ("1", False), ("", False)])
def test_only_more_than_one_process_needs_a_group(size, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin():
        return Training(model, losses, optimizer, small_data(), simple_plan(), clip_norm=1.0)

    if refused:
        with pytest.raises(ValueError, match="init_process_group"):
            begin()
    else:
        assert begin().steps_taken == 0
