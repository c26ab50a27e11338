"""The pages on training do what they say: every block of code on them runs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(code, page, names):
    exec(compile(code, str(DOCS / page), "exec"), names)


def test_the_page_on_training_runs():
    names = {"__name__": "page"}
    for code in blocks("training.md"):
        run(code, "training.md", names)
    assert names["private"].finished


def test_the_page_for_opacus_runs_and_changes_at_most_five_lines():
    before, after = blocks("migrate-opacus.md")
    run(before, "migrate-opacus.md", {"__name__": "before"})
    names = {"__name__": "after"}
    run(after, "migrate-opacus.md", names)
    assert names["private"].finished
    changed = [
        line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")
    ]
    assert len([line for line in changed if line.strip("+ ")]) <= 5


def test_the_page_for_the_trainer_runs(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("migrate-hf-trainer.md")
    run(code, "migrate-hf-trainer.md", {"__name__": "page"})
