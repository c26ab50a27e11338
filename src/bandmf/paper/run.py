"""Compute the points of an experiment: in parallel, each cached, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from bandmf import plots
from bandmf._files import cache_folder, write_whole
from bandmf.paper import table as tables
from bandmf.paper.experiment import Experiment, Point
from bandmf.paper.table import Row, Table

RECORDED = Path(__file__).parent / "recorded"


def run(
    experiment: Experiment,
    out: Path,
    *,
    quick: bool = False,
    fresh: bool = False,
    jobs: int = -1,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Table:
    """Write NAME.csv and NAME.png to `out`, and return the rows as the CSV has them.

    `fresh` computes points again that are in the cache. Inside `with joblib.parallel_config("dask"):` they are
    computed on that cluster.
    """
    out.mkdir(parents=True, exist_ok=True)
    points = experiment.points(quick)
    if fresh:
        forget(experiment, points)
    rows = compute_points(experiment, points, jobs, progress)
    if experiment.recorded is not None and (RECORDED / experiment.recorded).exists():
        rows += tables.read(RECORDED / experiment.recorded)
    path = out / f"{experiment.name}.csv"
    tables.write(rows, path)
    table = tables.read(path)
    plots.save(experiment.draw(table), path.with_suffix(".png"))
    return table


def compute_points(
    experiment: Experiment, points: list[Point], jobs: int, progress: Callable[[int, int], None]
) -> Table:
    """The rows of all points, in order; those in the cache are not computed again."""
    found = {place: known(experiment, point) for place, point in enumerate(points)}
    missing = [place for place, rows in found.items() if rows is None]
    done = len(points) - len(missing)
    progress(done, len(points))
    tasks = ((experiment, place, points[place]) for place in missing)
    for place, rows in _in_parallel(tasks, 1 if experiment.alone else jobs):
        found[place] = rows
        _keep(experiment, points[place], rows)
        done += 1
        progress(done, len(points))
    return Table(row for place in range(len(points)) for row in found[place] or [])


Task = tuple[Experiment, int, Point]


def _in_parallel(tasks: Iterable[Task], jobs: int) -> Iterator[tuple[int, list[Row]]]:
    """By joblib, where it is installed; results come when they are there."""
    try:
        from joblib import Parallel, delayed, effective_n_jobs
        from joblib.parallel import get_active_backend
    except ImportError:
        yield from (_compute(*task) for task in tasks)
        return
    workers = effective_n_jobs(jobs)
    if workers == 1:
        yield from (_compute(*task) for task in tasks)
        return
    calls = (delayed(_compute)(*task) for task in tasks)
    if get_active_backend()[0].supports_return_generator:
        with _unheard_interrupts():
            results = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(calls)
        yield from results
        return
    while some := list(islice(calls, 4 * workers)):  # Dask gives nothing before it has all
        yield from Parallel(n_jobs=jobs)(some)


@contextmanager
def _unheard_interrupts() -> Iterator[None]:
    """Processes that begin in here ignore Ctrl-C, and are ended by this one, without a traceback for each."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _compute(experiment: Experiment, place: int, point: Point) -> tuple[int, list[Row]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return place, experiment.compute(**point)


# --- the cache ------------------------------------------------------------------------------------------


def known(experiment: Experiment, point: Point) -> list[Row] | None:
    """The rows of a point that an earlier run kept."""
    path = _entry(experiment, point)
    try:
        entry = json.loads(path.read_bytes()) if path is not None else {}
        return entry["rows"] if entry["question"] == _question(experiment, point) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(experiment: Experiment, points: list[Point]) -> None:
    """Remove the rows of these points from the cache."""
    for point in points:
        if (path := _entry(experiment, point)) is not None:
            path.unlink(missing_ok=True)


def _keep(experiment: Experiment, point: Point, rows: list[Row]) -> None:
    entry = {"question": _question(experiment, point), "rows": rows}
    if (path := _entry(experiment, point)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(entry).encode())


def _question(experiment: Experiment, point: Point) -> dict[str, object]:
    return {"experiment": experiment.name, "version": experiment.version, "point": point}


def _entry(experiment: Experiment, point: Point) -> Path | None:
    folder = cache_folder("paper")
    text = json.dumps(_question(experiment, point), sort_keys=True)
    name = f"{experiment.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    return None if folder is None else folder / name
