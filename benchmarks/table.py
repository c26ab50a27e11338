"""What the benchmarks share: a table on the screen, or JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

from rich.console import Console
from rich.table import Table


def timed(function: Callable[[], object], repeat: int = 1) -> tuple[float, object]:
    """The best wall-clock time of so many runs, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return best, result


def show(title: str, rows: list[dict[str, object]], packages: tuple[str, ...], as_json: bool) -> None:
    """Print the rows with the machine and the versions they were measured with."""
    versions = {name: version(name) for name in packages}
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    if as_json:
        print(json.dumps({"title": title, "machine": machine, "versions": versions, "rows": rows}, indent=2))
        return
    table = Table(title=title, title_justify="left", caption=f"{machine}; {versions}", caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=140).print(table)
