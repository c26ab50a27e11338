"""`bandmf optimize`: the best strategy of a family."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bandmf import optimize as optimizers
from bandmf import plots, strategies, workloads
from bandmf._check import FloatArray
from bandmf.cli import show
from bandmf.error import max_error, per_step_error, rmse
from bandmf.optimize.solution import Solution, Watcher
from bandmf.workloads import Workload

_EXAMPLE = "Example: bandmf optimize --steps 4096 --bands 16 --family banded --plot strategy.png"
_PLOTTABLE = 2_000_000  # per-step errors that are worth drawing


class Family(StrEnum):
    """Families of strategies."""

    toeplitz = "toeplitz"
    banded = "banded"
    horizon = "horizon"
    dense = "dense"
    inverse_plus_constant = "inverse-plus-constant"


class Normalize(StrEnum):
    """What to do about the columns of a Toeplitz strategy."""

    no = "no"
    after = "after"
    optimized = "optimized"


def optimize(
    steps: Annotated[int, typer.Option(help="Training steps n.")],
    bands: Annotated[int, typer.Option(help="Bands b of the strategy.")] = 16,
    family: Annotated[Family, typer.Option(help="Which strategies to search.")] = Family.toeplitz,
    epochs: Annotated[int, typer.Option(help="Participations of each example (dense only).")] = 1,
    momentum: Annotated[float, typer.Option(help="Measure the error on SGD with this momentum.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="Learning rates: constant, cooldown or cosine.")] = "constant",
    objective: Annotated[str, typer.Option(help="mean, max or last.")] = "mean",
    normalize: Annotated[Normalize, typer.Option(help="Unit columns (Toeplitz).")] = Normalize.optimized,
    gap: Annotated[float | None, typer.Option(help="Stop when proved this close to the best.")] = None,
    load: Annotated[Path | None, typer.Option(help="Show this strategy file instead of searching.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the strategy to this file (.npz).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    workload = _workload(steps, momentum, schedule)
    if load is not None:
        strategy, solution = strategies.load(load), None
    else:
        with show.status(f"optimising {family.value}") as line:

            def watch(iteration: int, loss: float, x: FloatArray) -> bool:
                line.update(f"iteration {iteration}: error {math.exp(loss / 2):.6f}")
                return False

            solution = _solve(family, steps, bands, epochs, workload, objective, normalize, gap, watch)
        strategy = solution.strategy
    result = _describe(strategy, workload, solution)
    if save is not None:
        result["saved"] = str(strategies.save(strategy, save))
    if plot is not None:
        result["plot"] = str(_plot(strategy, workload, plot))
    if json:
        show.print_json(result)
    else:
        show.print_pairs("Strategy", {name.replace("_", " "): _text(value) for name, value in result.items()})


optimize.__doc__ = f"Find the best noise-correlation strategy and prove how good it is.\n\n{_EXAMPLE}"


def _workload(steps: int, momentum: float, schedule: str) -> Workload:
    schedules = {"constant": None, "cooldown": workloads.cooldown, "cosine": workloads.cosine}
    if schedule not in schedules:
        raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(schedules)}")
    rates = schedules[schedule]
    if rates is None and momentum == 0:
        return workloads.prefix(steps)
    return workloads.momentum(steps, momentum, None if rates is None else rates(steps))


def _solve(
    family: Family,
    steps: int,
    bands: int,
    epochs: int,
    workload: Workload,
    objective: str,
    normalize: Normalize,
    gap: float | None,
    watch: Watcher,
) -> Solution:
    if family is Family.banded:
        return optimizers.banded(steps, bands, workload, objective, gap=gap, watch=watch)
    if family is Family.dense:
        return optimizers.dense(steps, epochs, workload, objective, gap=gap, watch=watch)
    if family is Family.horizon:
        return optimizers.horizon(steps, bands, workload)
    if family is Family.inverse_plus_constant:
        return optimizers.inverse_plus_constant(steps, bands, normalize is not Normalize.no)
    mode = False if normalize is Normalize.no else normalize.value
    return optimizers.banded_toeplitz(steps, bands, workload, objective, mode, watch=watch)


def _describe(
    strategy: strategies.Strategy, workload: Workload, solution: Solution | None
) -> dict[str, object]:
    result: dict[str, object] = {
        "family": type(strategy).__name__,
        "steps": strategy.steps,
        "bands": strategy.bands,
        "workload": workload.name,
        "rmse": solution.rmse if solution else rmse(strategy, workload),
        "max_error": max_error(strategy, workload),
        "independent_noise_rmse": rmse(strategies.Identity(strategy.steps), workload),
    }
    if solution is not None:
        result |= {
            "optimality_gap": solution.optimality_gap,
            "converged": solution.converged,
            "iterations": solution.iterations,
            "seconds": round(solution.seconds, 3),
            "message": solution.message,
        }
    result["first_column"] = [float(x) for x in strategy.columns(0, 1)[0][:8]]
    return result


def _text(value: object) -> str:
    if value is None:
        return "none proved (Toeplitz: see --family banded)"
    if isinstance(value, list):
        return ", ".join(f"{x:.6f}" for x in value) + (", ..." if len(value) == 8 else "")
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _plot(strategy: strategies.Strategy, workload: Workload, path: Path) -> Path:
    n = strategy.steps
    if n > _PLOTTABLE:
        raise ValueError(
            f"steps={n}: per-step errors are drawn for at most {_PLOTTABLE} steps; leave out --plot"
        )
    shown = {
        step: strategy.columns(step, step + 1)[0][: min(256, n - step)]
        for step in dict.fromkeys((0, n // 2, max(0, n - strategy.bands // 2 - 1)))
    }
    errors = {
        f"{strategy.bands} bands": per_step_error(strategy, workload),
        "independent noise": per_step_error(strategies.Identity(n), workload),
    }
    figure = plots.strategy(shown, errors, f"{type(strategy).__name__}, {n} steps, {strategy.bands} bands")
    return plots.save(figure, path)
