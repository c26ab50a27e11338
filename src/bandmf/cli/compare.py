"""`bandmf compare`: every mechanism for one's own run, best first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bandmf import plots
from bandmf.cli import show
from bandmf.planning.compare import Comparison, compare
from bandmf.planning.search import plan

_EXAMPLE = "Example: bandmf compare --steps 2048 --epochs 8 --epsilon 4 --delta 1e-8 --plot compare.png"
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def compare_command(
    steps: Annotated[int, typer.Option(help="Training steps.")],
    epochs: Annotated[int, typer.Option(help="Passes over the data.")],
    delta: Annotated[float, typer.Option(help="Privacy budget: delta.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget: epsilon.")] = 8.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw RMSE against epsilon for all mechanisms (takes a minute).")
    ] = None,
    map: Annotated[
        Path | None, typer.Option(help="Draw the best bands over epochs and epsilon (takes minutes).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    with show.status("comparing") as line:
        table = compare(epsilon=epsilon, delta=delta, steps=steps, epochs=epochs, progress=line.update)
        if plot is not None:
            _plot(steps, epochs, delta, plot, line)
        if map is not None:
            _map(steps, delta, map, line)
    if json:
        show.print_json({"mechanisms": [row._asdict() for row in table]})
    else:
        _print(table, f"{steps} steps, {epochs} epochs, epsilon={epsilon:g}, delta={delta:g}")


compare_command.__doc__ = f"Compare every mechanism's error at the same privacy budget.\n\n{_EXAMPLE}"


def _print(rows: list[Comparison], title: str) -> None:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("mechanism", no_wrap=True)
    for name in ("RMSE", "ratio", "sigma", "bands", "sampled"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.rmse:.5g}", f"{row.ratio:.3f}x", f"{row.noise_multiplier:.4f}", str(row.bands))
        table.add_row(row.mechanism, *numbers, "yes" if row.amplified else "no")
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
        row = [
            plan(epsilon=epsilon, delta=delta, examples=steps * 1024 // k, batch_size=1024, steps=steps).bands
            for k in epochs
        ]
        best.append(row)
    plots.save(plots.best_bands(epochs, list(_EPSILONS), best, f"Best bands, {steps} steps"), path)
