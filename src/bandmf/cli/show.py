"""What all commands share: tables, progress and JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console()
messages = Console(stderr=True)  # progress never mixes with results


def print_json(result: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(_finite(result), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """The same, with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_options(given: dict[str, Any], where: str) -> None:
    """Fail, naming the first option that has no meaning there."""
    for name, value in given.items():
        raise ValueError(f"{name}={value!s}: has no meaning {where}; leave --{name} out")


def size(count: float) -> str:
    """A number of bytes for people.

    >>> size(8e9), size(1500)
    ('8 GB', '1.5 kB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_pairs(title: str, rows: dict[str, str]) -> None:
    """A table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


class Status:
    """A line that says what is going on, refreshed at most a few times a second."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress, self.task, self.last = progress, task, 0.0

    def update(self, text: str) -> None:
        """Show this text."""
        if time.monotonic() - self.last > 0.2:
            self.last = time.monotonic()
            self.progress.update(self.task, description=text)


@contextmanager
def status(text: str) -> Iterator[Status]:
    """A spinner with the time elapsed, for as long as the block runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        yield Status(progress, progress.add_task(text, total=None))
