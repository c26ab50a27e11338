"""The pages on training do what they say: every block of code on them runs."""

from __future__ import annotations

import difflib

from pages import blocks, run


def test_the_page_on_training_runs():
    assert run("docs/training.md")["private"].finished


def test_the_page_for_opacus_runs_and_changes_at_most_five_lines():
    before, after = blocks("docs/migrate-opacus.md")
    exec(compile(before, "before", "exec"), {"__name__": "before"})
    names = {"__name__": "after"}
    exec(compile(after, "after", "exec"), names)
    assert names["private"].finished
    changed = [
        line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")
    ]
    assert len([line for line in changed if line.strip("+ ")]) <= 5
