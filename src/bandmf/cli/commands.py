"""The table of commands. A command's module is imported when the command is run: help and --version are quick."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import bandmf


class Entry(NamedTuple):
    """Where a command lives, its function, and what it does. The module has an EXAMPLE for its help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "plan": Entry(
        "bandmf.cli.plan", "plan", "Plan private training: the mechanism of least noise for a privacy budget."
    ),
    "compare": Entry(
        "bandmf.cli.compare", "compare_command", "Compare every mechanism's error at the same privacy budget."
    ),
    "train": Entry("bandmf.cli.train", "train", "Train DP-SGD and BandMF on real images at the same privacy budget."),
    "optimize": Entry(
        "bandmf.cli.optimize",
        "optimize",
        "Find the best noise-correlation strategy (with --family banded or dense, prove how good it is).",
    ),
    "reproduce": Entry("bandmf.cli.reproduce", "reproduce", "Compute the paper's figures, tables and claims again."),
    "web": Entry("bandmf.cli.web", "web", "Open a page to plan with: sliders, charts, and the plan to download."),
}
BENCHMARKS = {
    "noise": Entry(
        "bandmf.cli.bench", "noise", "Time and memory of correlated noise against independent noise and other code."
    )
}
_BOXES_FIT = 80  # columns; with fewer, help in boxes is cut off, and plain help is not


def _markup() -> Any:
    return "rich" if shutil.get_terminal_size().columns >= _BOXES_FIT else None


class _Waiting(TyperCommand):
    """A command that only has a name and a summary, until it is run."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary, short_help=entry.summary, rich_markup_mode=_markup())
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the command itself, which takes over from here."""
        return _load(self.name or "", self.entry).make_context(info_name, args, parent=parent, **extra)


def _load(name: str, entry: Entry) -> Any:
    module = import_module(entry.module)
    alone = typer.Typer(add_completion=False, rich_markup_mode=_markup())
    alone.command(name, help=f"{entry.summary}\n\n{module.EXAMPLE}")(getattr(module, entry.function))
    return typer.main.get_command(alone)


def options(arguments: Sequence[str]) -> list[str]:
    """The options of the command that is meant, by their names in Python."""
    table, names = COMMANDS, list(arguments)
    if names[:1] == ["bench"]:
        table, names = BENCHMARKS, names[1:]
    entry = table.get(names[0]) if names else None
    if entry is None:
        return []
    return [each.name for each in _load(names[0], entry).params if each.name and each.opts[0].startswith("--")]


def _group(table: dict[str, Entry]) -> type[TyperGroup]:
    """A group with these commands, and with those that it is given."""

    class Group(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**(options | {"rich_markup_mode": _markup()}))

        def list_commands(self, ctx: Any) -> list[str]:
            return [*table, *super().list_commands(ctx)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            entry = table.get(cmd_name)
            return super().get_command(ctx, cmd_name) if entry is None else _Waiting(cmd_name, entry)

    return Group


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bandmf {bandmf.__version__}")
        raise typer.Exit


app = typer.Typer(cls=_group(COMMANDS), add_completion=False, pretty_exceptions_enable=False)
benchmarks = typer.Typer(cls=_group(BENCHMARKS))
app.add_typer(benchmarks, name="bench")


@benchmarks.callback()
def _bench() -> None:
    """Measure on this machine.

    Example: bandmf bench noise --bands 8,32,128
    """


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train machine-learning models with differential privacy, with less noise than DP-SGD.

    Example: bandmf plan --epsilon 4 --delta 1e-6 --examples 50000 --batch-size 500 --epochs 8
    """


def invoke(arguments: list[str]) -> int:
    """Run a command; its exit status. Errors, and Ctrl-C, are for the caller to show."""
    try:
        with typer.main.get_command(app).make_context("bandmf", arguments) as context:
            context.command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0
