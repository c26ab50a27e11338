"""Shared set-up: repeatable property tests, and the reference values in tests/reference."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

# Before NumPy is imported: threads inside a hundred thousand products of tiny matrices only cost time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What XLA compiles once serves all tests, in whichever process. The first process makes the folder for the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="bandmf-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import pytest
from hypothesis import HealthCheck, settings

REFERENCE = Path(__file__).parent / "reference" / "values.json"

settings.register_profile(
    "bandmf",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bandmf")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Answers of the accountant are remembered for these tests only, not found in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANDMF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
