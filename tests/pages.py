"""The code on the pages of the documentation."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import children

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    """What stands between ```python and ``` on a page, such as "docs/plan.md"."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(page: str, **names: Any) -> dict[str, Any]:
    """Run all blocks of a page, one after the other, with these names defined; returns all names afterwards."""
    names |= {"__name__": "page"}
    for code in blocks(page):
        exec(compile(code, str(ROOT / page), "exec"), names)
    return names


def printed(page: str) -> str:
    """What a page says that its code prints: the blocks of ```text, one after the other."""
    return "".join(re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


def run_alone(page: str, folder: Path | None = None) -> str:
    """Run all blocks of a page in a process of its own, as a reader would, in a folder; returns what they print."""
    done = children.run(__file__, page, folder=folder, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def script(path: str) -> ModuleType:
    """A file that is no module of a package, such as "docs/site/pictures.py", as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run(sys.argv[1])
