"""The command `bandmf`. It reads options, calls the library and shows the result; it decides nothing."""

from __future__ import annotations

import sys

import typer

from bandmf.cli import bench, compare, optimize, plan, reproduce, train, web

app = typer.Typer(
    help="Train machine-learning models with differential privacy at the lowest noise.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare_command)
app.command("train")(train.train)
app.command("optimize")(optimize.optimize)
app.command("reproduce")(reproduce.reproduce)
app.command("web")(web.web)

benchmarks = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
benchmarks.command("noise")(bench.noise)
app.add_typer(benchmarks, name="bench")


@app.callback()
def _root() -> None:
    """Train machine-learning models with differential privacy at the lowest noise."""


def main() -> None:
    """Run the command line: bad input is one clear line and exit status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"bandmf: {error}", file=sys.stderr)
        sys.exit(2)
