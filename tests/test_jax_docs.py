"""The pages on JAX do what they say: every block of code on them runs."""

from __future__ import annotations

import pytest

from pages import run

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def test_the_page_on_jax_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it keeps its run in a folder
    names = run("docs/jax.md")
    assert names["state"].step == 1
    assert capsys.readouterr().out.splitlines()[-1] == "step 60: epsilon=8.00"


def test_the_page_for_jax_privacy_runs():
    assert run("docs/migrate-jax-privacy.md")["training"].finished
