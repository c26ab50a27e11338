"""`bandmf compare`: every mechanism for one's own run, best first."""

from __future__ import annotations

from importlib.resources import files
from json import load
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bandmf import plots
from bandmf.cli import show
from bandmf.planning.compare import Comparison, against_memory, compare
from bandmf.planning.planner import plan

_EXAMPLE = "Example: bandmf compare --steps 2048 --epochs 8 --epsilon 4 --delta 1e-8 --plot compare.png"
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def compare_command(
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    delta: Annotated[float | None, typer.Option(help="Privacy budget: delta.")] = None,
    epsilon: Annotated[float, typer.Option(help="Privacy budget: epsilon.")] = 8.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw RMSE against epsilon for all mechanisms (takes a minute).")
    ] = None,
    map: Annotated[
        Path | None, typer.Option(help="Draw the best bands over epochs and epsilon (takes minutes).")
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Draw RMSE against the vectors that noise keeps (takes a minute).")
    ] = None,
    mechanisms: Annotated[
        bool, typer.Option("--mechanisms", help="List all mechanisms and their measured properties.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    if mechanisms:
        given = {"steps": steps, "epochs": epochs, "delta": delta, "plot": plot, "map": map, "memory": memory}
        show.refuse_options(
            {name: value for name, value in given.items() if value is not None}, "with --mechanisms"
        )
        _print_properties(json)
        return
    if steps is None or epochs is None or delta is None:
        raise ValueError("steps, epochs, delta: all three are needed (or --mechanisms)")
    with show.status("comparing") as line:
        table = compare(epsilon=epsilon, delta=delta, steps=steps, epochs=epochs, progress=line.update)
        if plot is not None:
            _plot(steps, epochs, delta, plot, line)
        if memory is not None:
            curves = against_memory(epsilon, delta, steps, epochs, line.update)
            title = f"{steps} steps, {epochs} epochs, epsilon={epsilon:g}, delta={delta:g}"
            plots.save(plots.memory(curves, title), memory)
        if map is not None:
            _map(steps, delta, map, line)
    if json:
        show.print_json({"mechanisms": [row._asdict() for row in table]})
    else:
        _print(table, f"{steps} steps, {epochs} epochs, epsilon={epsilon:g}, delta={delta:g}")


compare_command.__doc__ = f"Compare every mechanism's error at the same privacy budget.\n\n{_EXAMPLE}"


def _print_properties(as_json: bool) -> None:
    """The paper's three properties of every mechanism, as measured by benchmarks/mechanisms.py."""
    found = load(files("bandmf.planning").joinpath("mechanisms.json").open())
    if as_json:
        show.print_json(found)
        return
    table = Table(
        title=f"Mechanisms, measured on {found['date']}", title_justify="left", box=None, padding=(0, 1)
    )
    table.add_column("mechanism", no_wrap=True)
    for name in ("quickly found", "little state", "best somewhere"):
        table.add_column(name, justify="center")
    for row in found["rows"]:
        marks = (row["efficient_selection"], row["sublinear_overhead"], row["optimal_somewhere"])
        table.add_row(row["mechanism"], *("yes" if mark else "no" for mark in marks))
    show.console.print(table)
    grid, scale = found["grid"], found["scale"]
    show.console.print(
        f"Quickly found: under a minute at {scale} steps. Little state: at most an eighth of the steps as "
        f"vectors. Best somewhere: on the grid steps {grid['steps']}, epochs {grid['epochs']}, epsilon "
        f"{grid['epsilon']}, delta {grid['delta']:g}.",
        highlight=False,
    )


def _print(rows: list[Comparison], title: str) -> None:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("mechanism", no_wrap=True)
    for name in ("RMSE", "ratio", "sigma", "bands", "vectors", "sampled"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.rmse:.5g}", f"{row.ratio:.3f}x", f"{row.noise_multiplier:.4f}", str(row.bands))
        table.add_row(row.mechanism, *numbers, str(row.vectors), "yes" if row.amplified else "no")
    show.console.print(table)


def _plot(steps: int, epochs: int, delta: float, path: Path, line: show.Status) -> None:
    curves: dict[str, list[float]] = {}
    for epsilon in _EPSILONS:
        line.update(f"epsilon={epsilon:g}")
        for row in compare(epsilon=epsilon, delta=delta, steps=steps, epochs=epochs):
            curves.setdefault(row.mechanism, []).append(row.ratio)
    plots.save(plots.mechanisms(_EPSILONS, curves, f"{steps} steps, {epochs} epochs"), path)


def _map(steps: int, delta: float, path: Path, line: show.Status) -> None:
    epochs = [2**i for i in range(8) if 2**i <= steps]
    best = []
    for epsilon in _EPSILONS:
        line.update(f"best bands at epsilon={epsilon:g}")
        setting = {"epsilon": epsilon, "delta": delta, "batch_size": 1024, "steps": steps}
        plans = [plan(**setting, examples=steps * 1024 // k, sampling="cyclic-poisson") for k in epochs]  # type: ignore[arg-type]
        best.append([each.bands for each in plans])
    plots.save(plots.best_bands(epochs, list(_EPSILONS), best, f"Best bands, {steps} steps"), path)
