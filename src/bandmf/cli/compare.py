"""`bandmf compare`: every mechanism for one's own run, best first."""

from __future__ import annotations

from importlib.resources import files
from json import load
from pathlib import Path
from typing import Annotated

import typer

from bandmf._text import number
from bandmf.cli import outputs, show
from bandmf.planning.compare import Comparison, against_memory, compare
from bandmf.planning.planner import plan

EXAMPLE = "Example: bandmf compare --steps 2048 --epochs 8 --epsilon 4 --delta 1e-8 --plot compare.png"
_PROPERTIES = {
    "quickly found": "efficient_selection",
    "little state": "sublinear_overhead",
    "best somewhere": "optimal_somewhere",
}
_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def compare_command(
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    delta: Annotated[float | None, typer.Option(help="Privacy budget: delta.")] = None,
    epsilon: Annotated[float, typer.Option(help="Privacy budget: epsilon.")] = 8.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw RMSE against epsilon for all mechanisms (takes a minute).")
    ] = None,
    plot_map: Annotated[
        Path | None, typer.Option(help="Draw the best bands over epochs and epsilon (takes minutes).")
    ] = None,
    plot_memory: Annotated[
        Path | None, typer.Option(help="Draw RMSE against the vectors that noise keeps (takes a minute).")
    ] = None,
    mechanisms: Annotated[
        bool, typer.Option("--mechanisms", help="List all mechanisms and their measured properties.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    pictures = {"plot": plot, "plot_map": plot_map, "plot_memory": plot_memory}
    if mechanisms:
        given = {"steps": steps, "epochs": epochs, "delta": delta, **pictures}
        show.refuse_options({name: value for name, value in given.items() if value is not None}, "with --mechanisms")
        _print_properties(json)
        return
    if steps is None or epochs is None or delta is None:
        raise ValueError("steps, epochs, delta: all three are needed (or --mechanisms)")
    outputs.check(pictures)
    with show.status("comparing") as line:
        table = compare(epsilon=epsilon, delta=delta, steps=steps, epochs=epochs, progress=line.update)
        if plot is not None:
            _plot(steps, epochs, delta, plot, line)
        if plot_memory is not None:
            from bandmf import plots

            curves = against_memory(epsilon, delta, steps, epochs, line.update)
            plots.save(plots.memory(curves, _title(steps, epochs, epsilon, delta)), plot_memory)
        if plot_map is not None:
            _map(steps, delta, plot_map, line)
    if json:
        show.print_json({"mechanisms": [row._asdict() for row in table]})
    else:
        _print(table, _title(steps, epochs, epsilon, delta))
        show.say("The noise of rows in bins is estimated; bandmf plan certifies it, 0.3 to 1.1 percent higher.")


def _title(steps: int, epochs: int, epsilon: float, delta: float) -> str:
    return f"{steps:,} steps, {epochs} epochs, epsilon={epsilon:g}, delta={number(delta)}"


def _print_properties(as_json: bool) -> None:
    """The paper's three properties of every mechanism, as measured by benchmarks/mechanisms.py."""
    found = load(files("bandmf.planning").joinpath("mechanisms.json").open())
    if as_json:
        show.print_json(found)
        return
    rows = [(row["mechanism"], *(number(row[name]) for name in _PROPERTIES.values())) for row in found["rows"]]
    show.print_table(f"Mechanisms, measured on {found['date']}", ("mechanism", *_PROPERTIES), rows)
    grid = {name: show.listed(found["grid"][name]) for name in ("steps", "epochs", "epsilon")}
    show.say(
        f"Quickly found: under a minute at {found['scale']:,} steps. Little state: at most an eighth of the steps "
        f"as vectors. Best somewhere: with {grid['steps']} steps, {grid['epochs']} epochs, epsilon "
        f"{grid['epsilon']} and delta {number(found['grid']['delta'])}."
    )


def _print(rows: list[Comparison], title: str) -> None:
    columns = ("mechanism", "RMSE", "ratio", "sigma", "bands", "vectors", "sampled")
    shown = [
        (
            row.mechanism,
            number(row.rmse, 5),
            f"{row.ratio:.3f}x",
            f"{row.noise_multiplier:.4f}",
            number(row.bands),
            number(row.vectors),
            number(row.amplified),
        )
        for row in rows
    ]
    show.print_table(title, columns, shown)


def _plot(steps: int, epochs: int, delta: float, path: Path, line: show.Status) -> None:
    from bandmf import plots

    curves: dict[str, list[float]] = {}
    for epsilon in _EPSILONS:
        line.update(f"epsilon={epsilon:g}")
        for row in compare(epsilon=epsilon, delta=delta, steps=steps, epochs=epochs):
            curves.setdefault(row.mechanism, []).append(row.ratio)
    plots.save(plots.mechanisms(_EPSILONS, curves, f"{steps:,} steps, {epochs} epochs"), path)


def _map(steps: int, delta: float, path: Path, line: show.Status) -> None:
    from bandmf import plots

    epochs = [2**i for i in range(8) if 2**i <= steps]
    best = []
    for epsilon in _EPSILONS:
        line.update(f"best bands at epsilon={epsilon:g}")
        setting = {"epsilon": epsilon, "delta": delta, "batch_size": 1024, "steps": steps}
        plans = [plan(**setting, examples=steps * 1024 // k, sampling="cyclic-poisson") for k in epochs]  # type: ignore[arg-type]
        best.append([each.bands for each in plans])
    plots.save(plots.best_bands(epochs, list(_EPSILONS), best, f"Best bands, {steps:,} steps"), path)
