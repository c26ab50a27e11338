"""What all commands share: tables for any width, times, progress and JSON."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bandmf._text import number

console = Console(highlight=False)
messages = Console(stderr=True, highlight=False)  # progress never mixes with results

_GAP = 2  # columns between two columns of a table
_TEXT = 20  # columns; text is not squeezed into fewer


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
        option = name.replace("_", "-")
        raise ValueError(f"{name}={value!s}: has no meaning {where}; leave --{option} out")


# --- numbers and times --------------------------------------------------------------------------------


def listed(values: Sequence[float]) -> str:
    """Numbers as an enumeration.

    >>> listed([256, 16384, 0.5])
    '256, 16,384 or 0.5'
    """
    *first, last = (number(value) for value in values)
    return f"{', '.join(first)} or {last}" if first else last


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0312), duration(0.83), duration(75)
    ('0.03 s', '0.83 s', '1 min 15 s')
    """
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


# --- tables -------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A paragraph, wrapped between words."""
    console.print(text, markup=False)


def print_pairs(title: str, rows: dict[str, str]) -> None:
    """A table of names and values; a value too long for a line goes on on the next."""
    table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, _GAP, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Collection[str] = (),
    styles: dict[str, str] | None = None,
) -> None:
    """A table whose first column names the row; where the console is too narrow for it, row by row.

    Columns in `text` are wrapped between words, others never; `styles` are for whole entries.
    """
    entries = [[row[place] for row in rows] for place in range(len(columns))]
    least = [_least_width(name, some, name in text) for name, some in zip(columns, entries, strict=True)]
    room = console.width - _GAP * (len(columns) - 1)
    if sum(least) > room:
        _print_rows(title, columns, rows, text, styles or {})
        return
    most = [max(map(len, (name, *some))) for name, some in zip(columns, entries, strict=True)]
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for place, (name, width) in enumerate(zip(columns, _widths(least, most, room), strict=True)):
        left = place == 0 or name in text
        table.add_column(name, justify="left" if left else "right", width=width)
    for row in rows:
        table.add_row(*(Text(entry, style=(styles or {}).get(entry, "")) for entry in row))
    console.print(table)


def _least_width(name: str, entries: Sequence[str], wrapped: bool) -> int:
    """What a column needs so that no word of it is cut."""
    words = [len(word) for entry in (name, *(entries if wrapped else ())) for word in entry.split()]
    return max([*words, *(min(_TEXT, len(e)) if wrapped else len(e) for e in entries)], default=0)


def _widths(least: list[int], most: list[int], room: int) -> list[int]:
    """Widths between the least and the most, a column at a time where there is room.

    >>> _widths([4, 4], [9, 5], 11)
    [6, 5]
    """
    widths = list(least)
    while sum(widths) < room and widths != most:
        for place, wanted in enumerate(most):
            if widths[place] < wanted and sum(widths) < room:
                widths[place] += 1
    return widths


def _print_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[str], styles: dict[str, str]
) -> None:
    if title:
        console.print(Text(title, style="italic"))
    for row in rows:
        console.print(Text(row[0], style="bold"))
        short = []
        for name, entry in list(zip(columns, row, strict=True))[1:]:
            if entry and name in text:
                for line in textwrap.wrap(entry, console.width - 2, break_on_hyphens=False):
                    console.print(Text("  " + line))
            elif entry:
                short.append(entry if entry in styles else f"{name} {entry}")
        for line in _packed(short, console.width - 2):
            console.print(Text("  " + line))


def _packed(entries: Sequence[str], width: int) -> list[str]:
    """As many to a line as fit, none of them divided.

    >>> _packed(["RMSE 5.4", "sigma 1.6", "bands 8"], 20)
    ['RMSE 5.4, sigma 1.6,', 'bands 8']
    """
    lines: list[str] = []
    for place, entry in enumerate(entries):
        entry += "," if place < len(entries) - 1 else ""
        if lines and len(lines[-1]) + 1 + len(entry) <= width:
            lines[-1] += f" {entry}"
        else:
            lines.append(entry)
    return lines


# --- progress -----------------------------------------------------------------------------------------


class Status:
    """A line that says what is going on, refreshed at most a few times a second."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress, self.task, self.last = progress, task, 0.0

    def update(self, text: str) -> None:
        """Show this text."""
        if time.monotonic() - self.last > 0.2:
            self.last = time.monotonic()
            self.progress.update(self.task, description=text)

    def advance(self, text: str) -> None:
        """One of all is done; the next one is called this."""
        self.progress.update(self.task, description=text, advance=1)


def bars(*columns: ProgressColumn) -> Progress:
    """Progress on standard error; nothing at all where nobody watches."""
    return Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal)


@contextmanager
def status(text: str, total: int | None = None) -> Iterator[Status]:
    """A spinner (a bar where the total is known) with the time elapsed, for as long as the block runs."""
    shape = SpinnerColumn() if total is None else BarColumn(20)
    with bars(shape, TextColumn("{task.description}", markup=False), TimeElapsedColumn()) as progress:
        yield Status(progress, progress.add_task(text, total=total))
