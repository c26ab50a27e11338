"""The pages on training do what they say: every block of code on them runs."""

from __future__ import annotations

import pytest

from pages import blocks, run


def test_the_page_on_training_runs():
    assert run("docs/training.md")["training"].finished


def test_the_page_on_layers_runs():
    names = run("docs/supported-layers.md")
    report = names["check"](names["model"])
    assert [problem.layer for problem in report.problems] == ["1", "4"]


def test_the_page_for_opacus_runs_both_programs():
    """Opacus is a peer of the tests, not a dependency."""
    pytest.importorskip("opacus")
    before, after = blocks("docs/migrate-opacus.md")
    exec(compile(before, "before", "exec"), {"__name__": "before"})
    names = {"__name__": "after"}
    exec(compile(after, "after", "exec"), names)
    assert names["training"].finished
    assert len(after.splitlines()) < len(before.splitlines())
