"""Compute the points of an experiment: in parallel, each cached, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path

from bandmf import plots
from bandmf._files import write_whole
from bandmf.paper import table as tables
from bandmf.paper.experiment import Experiment, Point, Verdict
from bandmf.paper.table import Row, Table

RECORDED = Path(__file__).parent / "recorded"


def run(
    experiment: Experiment,
    out: Path,
    *,
    quick: bool = False,
    jobs: int = -1,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Verdict]:
    """Write NAME.csv and NAME.png to `out`; the verdicts, judged from that CSV.

    Inside `with joblib.parallel_config("dask"):` the points are computed on that cluster.
    """
    cache = out / "points"
    cache.mkdir(parents=True, exist_ok=True)
    rows = compute_points(experiment, experiment.points(quick), cache, jobs, progress)
    if experiment.recorded is not None and (RECORDED / experiment.recorded).exists():
        rows += tables.read(RECORDED / experiment.recorded)
    path = out / f"{experiment.name}.csv"
    tables.write(rows, path)
    table = tables.read(path)
    plots.save(experiment.draw(table), path.with_suffix(".png"))
    return [claim.judge(table) for claim in experiment.claims]


def compute_points(
    experiment: Experiment, points: list[Point], cache: Path, jobs: int, progress: Callable[[int, int], None]
) -> Table:
    """The rows of all points, in order; those in the cache are not computed again."""
    from joblib import Parallel, delayed

    found = {place: known(experiment, point, cache) for place, point in enumerate(points)}
    missing = [place for place, rows in found.items() if rows is None]
    done = len(points) - len(missing)
    progress(done, len(points))
    # Several threads in each of several processes would only get in each other's way.
    pool = Parallel(n_jobs=1 if experiment.alone else jobs, return_as="generator_unordered", batch_size=1)
    tasks = (delayed(_compute)(experiment, place, points[place]) for place in missing)
    for place, rows in pool(tasks):
        found[place] = rows
        _keep(experiment, points[place], rows, cache)
        done += 1
        progress(done, len(points))
    return Table(row for place in range(len(points)) for row in found[place] or [])


def _compute(experiment: Experiment, place: int, point: Point) -> tuple[int, list[Row]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return place, experiment.compute(**point)


def known(experiment: Experiment, point: Point, cache: Path) -> list[Row] | None:
    """The rows of a point that an earlier run kept."""
    try:
        entry = json.loads(_entry(experiment, point, cache).read_bytes())
        return entry["rows"] if entry["question"] == _question(experiment, point) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(experiment: Experiment, point: Point, rows: list[Row], cache: Path) -> None:
    entry = {"question": _question(experiment, point), "rows": rows}
    write_whole(_entry(experiment, point, cache), json.dumps(entry).encode())


def _question(experiment: Experiment, point: Point) -> dict[str, object]:
    return {"experiment": experiment.name, "version": experiment.version, "point": point}


def _entry(experiment: Experiment, point: Point, cache: Path) -> Path:
    text = json.dumps(_question(experiment, point), sort_keys=True)
    return cache / f"{experiment.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
