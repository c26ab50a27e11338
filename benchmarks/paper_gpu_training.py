"""Measures, on a GPU, what `bandmf reproduce` shows of training: time of noise and clipping, and learning under noise.

    PYTHONPATH=src python benchmarks/paper_gpu_training.py --out DIR --text FOLDER

FOLDER holds tinyshakespeare.txt. DIR gets noise_time.csv and learning.csv, written anew after every point; a run that
is given the same DIR again goes on where the last one stopped. The CSVs belong in src/bandmf/paper/recorded.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bandmf.paper import table
from bandmf.paper.table import Row, Value
from bandmf.paper.training import learning_runs, noise_time_runs

Point = dict[str, Value]


def known(rows: list[Row], point: Point) -> bool:
    """Whether the rows of a point are there."""
    return any(all(row.get(name) == value for name, value in point.items()) for row in rows)


def record(
    path: Path,
    points: list[dict[str, Any]],
    compute: Callable[[dict[str, Any]], list[Row]],
    names: Callable[[dict[str, Any]], Point],
    until: float,
) -> None:
    """Compute the points that the CSV lacks, and write it after each of them; none is begun after `until`.

    `names` are the values by which a point's rows are found.
    """
    rows: list[Row] = list(table.read(path)) if path.exists() else []
    longest = 0.0
    for done, point in enumerate(points, 1):
        if known(rows, names(point)):
            continue
        if time.monotonic() + longest > until:
            print(f"{path.name}: stopped after {done - 1} of {len(points)} points; run it again to go on", flush=True)
            return
        begin = time.monotonic()
        found = compute(point)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows += [{**row, **provenance()} for row in found]
        table.write(rows, path)
        spent = time.monotonic() - begin
        longest = max(longest, spent)
        print(f"{path.name}: {done} of {len(points)}, {spent:.1f} s, {point} {summary(found)}", flush=True)


def provenance() -> Row:
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return {"machine": kind, "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def summary(rows: list[Row]) -> str:
    """The figure, or the best loss at each level."""
    if "milliseconds" in rows[0]:
        return f"{rows[0]['milliseconds']:.3f} ms"
    best: dict[float, tuple[float, float]] = {}
    for row in rows:
        found = row["validation_loss"], row["learning_rate"]
        best[row["rmse"]] = min(best.get(row["rmse"], found), found)
    return ", ".join(f"{level:g}: {loss:.3f} at {rate:g}" for level, (loss, rate) in best.items())


def noise_time_names(point: dict[str, Any]) -> Point:
    amount = "bands" if point["part"] == "noise" else "batch"
    return {"setting": point["setting"], "part": point["part"], amount: point["amount"]}


def learning_names(point: dict[str, Any]) -> Point:
    strategy = learning_runs.name_of(point["bands"])
    return {**{name: point[name] for name in ("setting", "optimizer", "seed")}, "strategy": strategy}


def learning_points(setting: str, path: Path) -> list[dict[str, Any]]:
    """Every point with the rates that the CSV lacks, if any."""
    rows = table.read(path) if path.exists() else table.Table()
    points: list[dict[str, Any]] = []
    for point in learning_runs.points_of(setting):
        tried = rows.where(**learning_names(point)).values("learning_rate")
        wanted = learning_runs.SETTINGS[setting].rates[str(point["optimizer"])]
        if rates := tuple(rate for rate in wanted if rate not in tried):
            points.append({**point, "rates": rates})
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSVs")
    parser.add_argument("--text", help="folder with tinyshakespeare.txt")
    parser.add_argument("--only", choices=("noise_time", "learning"))
    parser.add_argument("--seconds", type=float, default=500, help="begin no point that would end later")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script on a CPU")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only != "learning":
        points = noise_time_runs.points_of("tiny" if arguments.tiny else "BERT-base")
        path = arguments.out / "noise_time.csv"
        record(path, points, lambda p: noise_time_runs.compute(**p), noise_time_names, until)
    if arguments.only != "noise_time":
        path = arguments.out / "learning.csv"
        points = learning_points("tiny" if arguments.tiny else "full", path)
        compute = lambda p: learning_runs.compute(**p, folder=arguments.text)  # noqa: E731
        names = lambda p: {**learning_names(p), "learning_rate": p["rates"][0]}  # noqa: E731
        record(path, points, compute, names, until)


if __name__ == "__main__":
    main()
