"""Every example runs, shortened, as a user would start it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("classifier.py", ["--epochs", "1"], "test accuracy"),
        ("lora.py", ["--examples", "400", "--epochs", "1"], "noise history"),
        ("language_model.py", ["--epochs", "0.3", "--width", "32"], "bits per character"),
    ],
)
def test_example_runs(name, arguments, says):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert says in result.stdout


@pytest.mark.parametrize(("name", "arguments"), [("fsdp.py", ["--epochs", "0.5"]), ("ddp.py", [])])
def test_example_runs_on_two_processes(name, arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 processes" in result.stdout


def test_every_example_is_listed_here():
    listed = {"classifier.py", "lora.py", "language_model.py", "fsdp.py", "ddp.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == listed
