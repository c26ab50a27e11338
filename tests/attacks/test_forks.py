"""Forks of a run release nothing, and a crash while it begins bricks nothing: fork_cases.py, in a fresh process."""

from __future__ import annotations

import pytest

import children
from children import HERE

CASES = [
    "test_a_fork_of_a_run_releases_nothing[none]",
    "test_a_fork_of_a_run_releases_nothing[folder]",
    "test_a_crash_while_a_run_begins_bricks_nothing",
    "test_a_crash_while_a_copy_begins_bricks_nothing",
]


@pytest.fixture(scope="module")
def output():
    cases = HERE / "attacks" / "fork_cases.py"
    return children.run("-m", "pytest", "-rA", "-p", "no:cacheprovider", cases, timeout=200).stdout


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_of_its_own(output, case):
    lines = [line for line in output.splitlines() if line.endswith(f"::{case}")]
    assert [line.split()[0] for line in lines] == ["PASSED"], output[-3000:]
