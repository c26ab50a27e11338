"""`bandmf reproduce`: the paper's figures, tables and claims, computed again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from bandmf import _extras, paper
from bandmf.cli import outputs, show
from bandmf.paper import page
from bandmf.paper.experiment import Experiment
from bandmf.paper.run import run

EXAMPLE = "Example: bandmf reproduce against_epsilon example --quick --out reproduction"
_COLORS = {"holds": "green", "holds with a remark": "yellow", "does not hold": "red", "not judged": "dim"}


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments, or all; none lists them.", metavar="[NAME...|all]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, in a minute.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for CSV files and pictures; the page is written beside it.")] = Path(
        "reproduction"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again what is cached.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes at a time; -1: one for each core.")] = -1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    if not names:
        _print_names(json)
        return
    if "all" in names and len(names) > 1:
        raise ValueError("all: stands for every experiment; give it alone, or names")
    chosen = paper.NAMES if names == ["all"] else tuple(dict.fromkeys(names))
    if jobs == 0 or jobs < -1:
        raise ValueError(f"jobs={jobs}: must be -1 or at least 1")
    outputs.check_folder("out", out)
    experiments, out = _find(chosen, everything=names == ["all"]), out.resolve()
    page.check(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        seconds = _run(experiments, out, quick, fresh, jobs)
    except KeyboardInterrupt:
        show.messages.print("stopped; what was computed is kept: the same command goes on from there")
        raise typer.Exit(130) from None
    page.note_run(out, seconds, quick)
    written = page.write(out)
    own = {one.name for one in experiments}
    judged = [each for each in page.judge(out) if each.experiment.name in own]
    if json:
        _print_json(judged, seconds)
        return
    _print(judged)
    show.say(f"\n{page.count(judged)}. The page: {written}")


def _find(names: tuple[str, ...], everything: bool) -> list[Experiment]:
    """The experiments; of all, those that need a package which is missing are left out with a line."""
    found = []
    for name in names:
        try:
            found.append(paper.experiment(name))
        except ModuleNotFoundError as error:
            remedy = _extras.remedy(_extras.package_of(error))
            if remedy is None:
                raise
            missing = f"{name}: needs {error.name}; {remedy}"
            if not everything:
                raise ValueError(missing) from error
            show.messages.print(f"left out: {missing}", markup=False)
    return found


def _run(experiments: list[Experiment], out: Path, quick: bool, fresh: bool, jobs: int) -> dict[str, float | None]:
    """Seconds of each experiment; None where nothing had to be computed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seconds: dict[str, float | None] = {}
    with show.bars(*columns) as bars:
        whole = bars.add_task("experiments", total=len(experiments))
        for one in experiments:
            bar, start = bars.add_task(one.name, total=None), time.perf_counter()

            seen: list[int] = []

            def progress(done: int, of: int, bar: TaskID = bar, seen: list[int] = seen) -> None:
                bars.update(bar, completed=done, total=of)
                seen.append(done)

            run(one, out, quick=quick, fresh=fresh, jobs=jobs, progress=progress)
            seconds[one.name] = time.perf_counter() - start if len(seen) > 1 else None
            bars.remove_task(bar)
            bars.advance(whole)
    return seconds


def _print_names(as_json: bool) -> None:
    found = _find(paper.NAMES, everything=True)
    if as_json:
        rows = [{"name": one.name, "title": one.title, "place": one.place} for one in found]
        show.print_json({"experiments": rows})
        return
    columns = ("name", "what", "in the paper")
    shown = [(one.name, one.title, one.place) for one in found]
    show.print_table("bandmf reproduce NAME..., or all", columns, shown, text=columns[1:])


def _print_json(judged: list[page.Judged], seconds: dict[str, float | None]) -> None:
    rows = [
        {
            "experiment": each.experiment.name, "claim": each.claim.name, "statement": each.claim.statement,
            "place": each.claim.place, "outcome": each.verdict.outcome, "number": each.verdict.number,
            "remark": each.verdict.remark,
        }
        for each in judged
    ]  # fmt: skip
    show.print_json({"claims": rows, "seconds": seconds})


def _print(judged: list[page.Judged]) -> None:
    rows = []
    for each in judged:
        words = "; ".join(part for part in (each.verdict.number, each.verdict.remark) if part)
        rows.append((each.claim.statement, each.verdict.outcome, words))
    columns = ("claim", "verdict", "our number")
    show.print_table("", columns, rows, text=("claim", "our number"), styles=_COLORS)
