"""Rows of numbers, kept as CSV: what verdicts and pictures are made from, and nothing else."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Value = str | int | float | None
Row = dict[str, Any]  # of Value; a type checker cannot know which kind a column holds


class Table(list[Row]):
    """A list of rows with the few questions that verdicts ask.

    >>> table = Table([{"bands": 1, "rmse": 2.0}, {"bands": 8, "rmse": 1.5}])
    >>> table.where(bands=8).one("rmse")
    1.5
    >>> table.column("bands")
    [1, 8]
    """

    def where(self, **wanted: Value) -> Table:
        """The rows with these values."""
        rows: list[Row] = self
        for name, value in wanted.items():
            rows = [row for row in rows if row.get(name) == value]
        return Table(rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, in order."""
        return [row[name] for row in self]

    def one(self, name: str) -> Any:
        """The value of a column in the only row; more or fewer rows are an error."""
        if len(self) != 1:
            raise LookupError(f"{len(self)} rows where one was expected, asking for {name}")
        return self[0][name]

    def values(self, name: str) -> list[Any]:
        """The different values of one column, sorted."""
        return sorted({row[name] for row in self if row.get(name) is not None})


def write(table: Iterable[Row], path: Path) -> None:
    """All rows as CSV; columns in the order of their first appearance, floats to ten digits."""
    rows = list(table)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _text(value) for name, value in row.items()})


def read(path: Path) -> Table:
    """The rows of a CSV file, with numbers as numbers and empty cells as None."""
    with path.open(newline="", encoding="utf-8") as file:
        return Table({name: _value(text) for name, text in row.items()} for row in csv.DictReader(file))


def _text(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
