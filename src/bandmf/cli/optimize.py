"""`bandmf optimize`: the best strategy of a family."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bandmf import optimize as optimizers
from bandmf import strategies
from bandmf._text import number
from bandmf._types import FloatArray
from bandmf.cli import arguments, outputs, show
from bandmf.error import max_error, per_step_error, rmse
from bandmf.optimize.descent import Watcher
from bandmf.optimize.solution import Solution
from bandmf.participation import FixedEpochs, Participation
from bandmf.strategies.files import file_name
from bandmf.workloads import Workload

EXAMPLE = "Example: bandmf optimize --steps 4096 --bands 16 --family banded --plot strategy.png"
_NAMES = {
    "rmse": "RMSE",
    "independent_noise_rmse": "independent noise's RMSE",
    "seconds": "time",
    "message": "how it ended",
}
_SHOWN = 8  # numbers of the first column; --save writes all
_LEFT_OUT = "first_column_left_out"
_PLOTTABLE = 2_000_000  # per-step errors that are worth drawing


class Family(StrEnum):
    """Families of strategies."""

    toeplitz = "toeplitz"
    banded = "banded"
    horizon = "horizon"
    dense = "dense"
    inverse_plus_constant = "inverse-plus-constant"


# Which of the options each family has a use for; workload and participation are for the optimizer to judge.
_OPTIONS = {
    Family.toeplitz: ("bands", "objective", "normalize"),
    Family.inverse_plus_constant: ("bands", "objective", "normalize"),
    Family.horizon: ("bands", "objective"),
    Family.banded: ("bands", "objective", "gap"),
    Family.dense: ("bands", "objective", "gap"),
}


class Normalize(StrEnum):
    """What to do about the columns of a Toeplitz strategy."""

    no = "no"
    after = "after"
    optimized = "optimized"


def optimize(
    steps: Annotated[int, typer.Option(help="Training steps n.")],
    bands: Annotated[int | None, typer.Option(help="Bands b of the strategy.", show_default="16; dense: all")] = None,
    family: Annotated[Family | None, typer.Option(help="Strategies to search.", show_default="toeplitz")] = None,
    epochs: Annotated[int, typer.Option(help="Participations of each example, evenly spaced.")] = 1,
    momentum: Annotated[float, typer.Option(help="Measure the error on SGD with this momentum.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="Learning rates: constant, cooldown or cosine.")] = "constant",
    objective: Annotated[str | None, typer.Option(help="mean, max or last.", show_default="mean")] = None,
    normalize: Annotated[Normalize | None, typer.Option(help="Unit columns (Toeplitz families).")] = None,
    gap: Annotated[float | None, typer.Option(help="Stop when proved this close to the best (banded, dense).")] = None,
    load: Annotated[Path | None, typer.Option(help="Show this strategy file instead of searching.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the strategy to this file (.npz).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    outputs.check({"plot": plot}, {"save": None if save is None else file_name(save)})
    if plot is not None and steps > _PLOTTABLE:
        raise ValueError(f"steps={steps}: per-step errors are drawn for at most {_PLOTTABLE:,} steps; leave out --plot")
    workload = arguments.workload(steps, momentum, schedule)
    participation = FixedEpochs(epochs) if epochs != 1 else None
    choices = {"bands": bands, "objective": objective, "normalize": normalize, "gap": gap}
    given = {name: value for name, value in choices.items() if value is not None}
    if load is not None:
        show.refuse_options({**given, **({} if family is None else {"family": family})}, "with --load")
        strategy, solution = strategies.load(load), None
    else:
        family = family or Family.toeplitz
        with show.status(f"optimizing {family.value}") as line:

            def watch(iteration: int, loss: float, x: FloatArray) -> bool:
                line.update(f"iteration {iteration}: error {math.exp(loss / 2):.6f}")
                return False

            solution = _solve(family, steps, workload, participation, given, watch)
        strategy = solution.strategy
    with show.status("measuring errors"):
        result = _describe(strategy, workload, participation, solution)
        if save is not None:
            result["saved"] = str(strategies.save(strategy, save))
        if plot is not None:
            result["plot"] = str(_plot(strategy, workload, plot))
    if json:
        show.print_json(result)
    else:
        more = ", ..." if result.pop(_LEFT_OUT) else ""
        shown = {_NAMES.get(name, name.replace("_", " ")): _text(name, value, more) for name, value in result.items()}
        show.print_pairs("Strategy", shown)


def _solve(
    family: Family,
    steps: int,
    workload: Workload,
    participation: Participation | None,
    given: dict[str, Any],
    watch: Watcher,
) -> Solution:
    """Run the optimizer of this family; what it cannot honor is refused, by it or here."""
    show.refuse_options({name: given[name] for name in given if name not in _OPTIONS[family]}, f"for {family.value}")
    options: dict[str, Any] = {
        "objective": given.get("objective", "mean"),
        "workload": workload,
        "participation": participation,
    }
    proof: dict[str, Any] = {"gap": given.get("gap"), "watch": watch}
    bands, normalize = given.get("bands", min(16, steps)), given.get("normalize", Normalize.optimized)
    match family:
        case Family.banded:
            return optimizers.banded(steps, bands, **options, **proof)
        case Family.dense:
            return optimizers.dense(steps, bands=given.get("bands"), **options, **proof)
        case Family.horizon:
            return optimizers.horizon(steps, bands, **options)
        case Family.inverse_plus_constant:
            if normalize is Normalize.after:
                raise ValueError("normalize=after: this family is normalized inside the search; use optimized or no")
            normalized = normalize is Normalize.optimized
            return optimizers.inverse_plus_constant(steps, bands, normalize_columns=normalized, **options)
        case Family.toeplitz:
            mode = False if normalize is Normalize.no else normalize.value
            return optimizers.banded_toeplitz(steps, bands, normalize_columns=mode, watch=watch, **options)


def _describe(
    strategy: strategies.Strategy, workload: Workload, participation: Participation | None, solution: Solution | None
) -> dict[str, object]:
    measured: dict[str, Any] = {"workload": workload, "participation": participation}
    result: dict[str, object] = {
        "family": type(strategy).__name__,
        "steps": strategy.steps,
        "bands": strategy.bands,
        "workload": workload.name,
        "rmse": solution.rmse if solution else rmse(strategy, **measured),
        "max_error": max_error(strategy, **measured),
        "independent_noise_rmse": rmse(strategies.Identity(strategy.steps), **measured),
    }
    if solution is not None:
        result |= {
            "optimality_gap": solution.optimality_gap,
            "converged": solution.converged,
            "iterations": solution.iterations,
            "seconds": round(solution.seconds, 3),
            "message": solution.message,
        }
    column = strategy.columns(0, 1)[0]
    shown = [float(x) for x in column[:_SHOWN]]
    return result | {"first_column": shown, _LEFT_OUT: len(column) - len(shown)}


def _text(name: str, value: object, more: str) -> str:
    if value is None:
        return "none proved (Toeplitz: see --family banded)"
    if isinstance(value, list):
        return ", ".join(f"{x:.6f}" for x in value) + more
    if name == "seconds" and isinstance(value, float):
        return show.duration(value)
    return number(value, 7)


def _plot(strategy: strategies.Strategy, workload: Workload, path: Path) -> Path:
    from bandmf import plots

    errors = {
        f"{strategy.bands:,} bands": per_step_error(strategy, workload=workload),
        "independent noise": per_step_error(strategies.Identity(strategy.steps), workload=workload),
    }
    return plots.save(plots.strategy(strategy, errors), path)
