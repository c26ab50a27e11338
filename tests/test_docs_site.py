"""The site builds without a warning, loads nothing from elsewhere, and its reference describes every argument."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pages import ROOT, script

# Not --quiet: what is not shown is not counted, and --strict would find nothing.
MKDOCS = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
ENTRY = re.compile(r"^::: (\S+)\n(?:    options: \{(.*)\}\n)?", re.MULTILINE)
MEMBERS = re.compile(r"members: \[([^\]]*)\]")


def build_site(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*MKDOCS, str(folder)], cwd=root, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def loaded_from_elsewhere(page: str) -> list[str]:
    """Scripts, styles, fonts and pictures with an address of another machine; links that a reader clicks are none."""
    sources = re.findall(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?((?:https?:)?//[^"'\s>]+)""", page)
    styles = re.findall(r"""<link[^>]*\shref=["']?((?:https?:)?//[^"'\s>]+)""", page)
    return sources + styles + re.findall(r"url\(\s*[\"']?((?:https?:)?//[^)\"']+)", page)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    done = build_site(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")}
    assert built - {Path("404.html")} == pages
    for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        assert loaded_from_elsewhere(path.read_text()) == [], path
    reference = (tmp_path / "api" / "torch.html").read_text()
    assert "micro_batch" in reference
    assert "&gt;&gt;&gt;" in reference  # examples are code, not quotations
    assert "<blockquote>" not in reference
    assert (tmp_path / "source" / "examples" / "ddp.py.txt").read_text() == (ROOT / "examples/ddp.py").read_text()


def test_a_broken_link_fails_the_build(tmp_path):
    """A small copy: its one page links to a page, and to a file of the repository, that are not there."""
    for broken, complaint in (("[gone](gone.md)", "gone.md"), ("[gone](../examples/gone.py)", "gone.py")):
        root = tmp_path / complaint
        shutil.copytree(ROOT / "docs" / "site", root / "docs" / "site")
        settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
        (root / "mkdocs.yml").write_text(settings + "\nnav: [index.md]\n")
        (root / "docs" / "index.md").write_text(f"# A page\n\n{broken}\n")
        done = build_site(tmp_path / "built", root)
        assert done.returncode != 0
        assert complaint in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', ["//fonts.example/a.css"]),
        ("@font-face { src: url(https://fonts.example/a.woff) }", ["https://fonts.example/a.woff"]),
        ('<a href="https://example.com">a link</a><script src="assets/x.js"></script>', []),
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(html, found):
    assert loaded_from_elsewhere(html) == found


def test_examples_in_docstrings_become_code():
    done = doctest.testmod(script("docs/site/docstrings.py"))
    assert done.attempted == 1
    assert done.failed == 0


def reference():
    """{path: object} of everything that the reference shows by itself."""
    found = {}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for path, options in ENTRY.findall(page.read_text()):
            members = MEMBERS.search(options)
            for name in members[1].split(", ") if members else [""]:
                module, _, last = (f"{path}.{name}" if name else path).rpartition(".")
                found[f"{module}.{last}"] = getattr(importlib.import_module(module), last)
    return found


def test_everything_in_the_reference_has_an_example_that_runs():
    """Doctests run them; state and results, which users do not make, need none; PrivateTrainer has a page that runs."""
    without = {"Clipped", "Outer", "Sensitivity", "Solution", "State", "PrivateTrainer"}
    silent = {path for path, thing in reference().items() if ">>>" not in (inspect.getdoc(thing) or "")}
    assert {path.rpartition(".")[2] for path in silent} <= without


def test_the_reference_shows_every_public_function():
    import bandmf
    import bandmf.jax
    import bandmf.torch
    from bandmf import optimize, strategies

    shown = {id(thing) for thing in reference().values()}
    helpers = {"stretch", "tree_encoder"}  # for authors of strategies
    missing = [
        f"{module.__name__}.{name}"
        for module in (bandmf, bandmf.torch, bandmf.jax, optimize, strategies)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name)) and name not in helpers
        and id(getattr(module, name)) not in shown
    ]  # fmt: skip
    assert missing == []


def undescribed(function) -> list[str]:
    """Arguments that the docstring does not describe, and descriptions of arguments that are not there."""
    text = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return sorted(set(re.findall(r"^    (\w+): \S", text, re.MULTILINE)) ^ set(inspect.signature(function).parameters))


def test_plan_and_training_describe_every_argument():
    import bandmf
    import bandmf.torch

    assert undescribed(bandmf.plan) == undescribed(bandmf.torch.Training) == []


def test_an_argument_that_is_not_described_is_found():
    def planted(one, two):
        """A function.

        Args:
            one: The first.
            three: Not there.
        """

    assert undescribed(planted) == ["three", "two"]


# --- the package --------------------------------------------------------------------------------------


def test_the_package_builds_and_an_index_would_take_it(tmp_path):
    """Without a compiler, as the library is optional and test_native_build.py builds it: this is about the rest."""
    copy = tmp_path / "repository"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    env = {**os.environ, "CC": "/nowhere/cc", "LDSHARED": "/nowhere/cc"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(tmp_path)]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    wheel, sdist = next(tmp_path.glob("*.whl")), next(tmp_path.glob("*.tar.gz"))
    check = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "bandmf").rglob("*.py")}
    data = {"bandmf/py.typed", "bandmf/planning/mechanisms.json", "bandmf/native/kernel.c", "bandmf/native/noise.h"}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert modules | data <= inside
    assert any(re.fullmatch(r"bandmf/paper/recorded/\w+\.csv", name) for name in inside)
    assert not any(name.startswith(("tests/", "docs/")) for name in inside)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "setup.py", "pyproject.toml", "src/bandmf/native/kernel.c"} <= names
