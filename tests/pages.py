"""The code on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
