"""Shared set-up: repeatable property tests, and the reference values in tests/reference."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
from pathlib import Path

# Before NumPy is imported: threads inside a hundred thousand products of tiny matrices only cost time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What XLA compiles once serves all tests, in whichever process, and so do the answers of the accountant, which are
# not looked for in the user's cache. The first process makes the folders for the others.
if "BANDMF_TESTS_SHARE" not in os.environ:
    _shared = tempfile.TemporaryDirectory(prefix="bandmf-tests-")
    os.environ["BANDMF_TESTS_SHARE"] = _shared.name
    os.environ["BANDMF_CACHE"] = os.path.join(_shared.name, "answers")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(_shared.name, "compiled"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Dozens of tests start Python again: it must not compile all of bandmf each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

# Under nohup it is ignored, and all children would ignore it, too: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Minutes in few tests. Begun first: no worker shall be left alone with one of them when all others are done.
FIRST = (
    "test_examples", "test_jax_mesh", "test_notebooks", "test_noise_triton", "test_cli", "test_torch_ranks", "test_web",
    "test_readme", "test_truth_optimizers", "test_docs_pages", "test_jax_restart", "test_training_loops",
    "test_torch_restart", "test_jax_docs",
)  # fmt: skip
REFERENCE = Path(__file__).parent / "reference" / "values.json"

settings.register_profile(
    "bandmf", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("bandmf")


def pytest_collection_modifyitems(items):
    """Works with --no-loadscope-reorder: else files with few tests come last."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


def pytest_collection_finish():
    """What was imported stays: no collection of garbage need look at it again."""
    gc.freeze()


@pytest.fixture(scope="module")
def compiled_quickly():
    """For programs that run for milliseconds and are compiled for seconds: lets XLA try less hard.

    Not for tests of rounding, which is another in programs that are optimized: they shall have none of these.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(scope="session")
def reference():
    """reference/values.json as a dictionary; keys such as "64,4" become (64, 4)."""
    values = json.loads(REFERENCE.read_text())
    return {name: _by_size(table) for name, table in values.items() if isinstance(table, dict)}


def _by_size(table):
    """{"64,4": x} as {(64, 4): x} and {"64": x} as {64: x}; other keys as they are, notes left out."""

    def key(text):
        parts = text.split(",")
        if not all(part.isdigit() for part in parts):
            return text
        return int(text) if len(parts) == 1 else tuple(map(int, parts))

    return {key(text): value for text, value in table.items() if text != "_note"}
