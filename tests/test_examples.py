"""Every example runs, shortened; in the long tests as a user would start it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import children

EXAMPLES = Path(__file__).parents[1] / "examples"


EVERY = pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("classifier.py", ["--epochs", "2"], "47 steps, balls-in-bins, "),
        ("lora.py", ["--public-steps", "5", "--epochs", "0.3"], "% before, "),
        ("language_model.py", ["--epochs", "0.3", "--width", "32"], "bits per character"),
        ("lightning_digits.py", ["--epochs", "0.5"], "12 steps, epsilon=8.00: held-out accuracy"),
        ("accelerate_digits.py", ["--epochs", "0.5"], "12 steps on 1 process, learning rate 0.025, epsilon=8.00"),
        ("jax_logistic.py", ["--epochs", "1"], "12 steps, balls-in-bins, epsilon=4.00"),
        ("jax_transformer.py", ["--epochs", "0.15", "--width", "8", "--layers", "1"], "bits per character"),
        ("jax_sharded.py", ["--epochs", "0.25"], "steps on 8 devices, each holds 50% of the history"),
    ],
)


@EVERY
def test_example_runs(name, arguments, says):
    # JAX spends nearly all of the time on compilation, so let LLVM try less hard.
    devices = 8 if name == "jax_sharded.py" else 1
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    result = children.run(EXAMPLES / name, *arguments, env={**os.environ, "XLA_FLAGS": flags})
    assert result.returncode == 0, result.stderr
    assert says in result.stdout


@pytest.mark.long
@EVERY
def test_example_runs_in_a_process_of_its_own(name, arguments, says):
    """Where nothing is imported that it does not import itself."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert says in result.stdout


@pytest.mark.long
def test_private_adapters_learn_a_task_of_held_out_sentences():
    command = [sys.executable, str(EXAMPLES / "lora.py"), "--public-steps", "300", "--epochs", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    before, after = map(float, re.findall(r"accuracy ([\d.]+)% before, ([\d.]+)% after", result.stdout)[0])
    assert after > 80
    assert after > before + 25


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SHARED = [("fsdp.py", ["--epochs", "0.5"]), ("ddp.py", [])]


@pytest.fixture
def wrapper(tmp_path):
    """Runs a script, and leaves the names of the threads of gloo that are alive when Python shuts down."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(dedent(
        """
        import atexit, os, pathlib, runpy, sys

        def shut_down(note):
            names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
            note.write_text("".join(name for name in names if "gloo" in name))

        atexit.register(shut_down, pathlib.Path(__file__).with_name("alive-" + os.environ["RANK"]))
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        """
    ))  # fmt: skip
    return wrapper


@pytest.mark.parametrize(("name", "arguments"), SHARED)
def test_example_runs_on_two_processes_and_ends_after_the_threads_of_gloo(name, arguments, wrapper):
    """Python must not shut down before them: it ends one that frees a tensor of the last collective just then, and
    that aborts the process.
    """
    ranks = children.ranks(2, wrapper, EXAMPLES / name, *arguments)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert "2 processes" in ranks[0].stdout
    assert "".join(path.read_text() for path in wrapper.parent.glob("alive-*")) == ""


@pytest.mark.long
@pytest.mark.parametrize(("name", "arguments"), SHARED)
def test_torchrun_runs_an_example_on_two_processes(name, arguments, wrapper):
    command = [*TORCHRUN, str(wrapper), str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 processes" in result.stdout
    assert "".join(path.read_text() for path in wrapper.parent.glob("alive-*")) == ""


def test_every_example_is_listed_here():
    listed = {"classifier.py", "lora.py", "language_model.py", "fsdp.py", "ddp.py"}
    listed |= {"lightning_digits.py", "accelerate_digits.py"}
    listed |= {"jax_logistic.py", "jax_transformer.py", "jax_sharded.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == listed
