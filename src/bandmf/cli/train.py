"""`bandmf train`: DP-SGD and BandMF side by side on real images, at the same privacy budget."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from bandmf import _check
from bandmf._text import number
from bandmf.cli import outputs, show
from bandmf.demo import datasets
from bandmf.planning import Plan
from bandmf.planning import plan as make_plan
from bandmf.planning.labels import IN_BINS

if TYPE_CHECKING:
    from bandmf.demo.training import History

COVERS = (
    "Epsilon covers each final run on its own. It does not cover the search over learning rates, which trained on the "
    "same images, nor all seeds together."
)
EXAMPLE = "Example: bandmf train --epsilon 8 --epochs 4 --plot train.png"


class Usual(NamedTuple):
    """What the demo does with the data it can have: a setting that takes a minute or two on two cores."""

    batch_size: float
    epochs: float
    seeds: int
    delta: float
    rates: str


_USUAL = {"digits": Usual(16, 2, 5, 1e-4, "0.0625,0.125,0.25,0.5"), "Fashion-MNIST": Usual(256, 0.75, 3, 1e-5, "0.5,1")}


def train(
    data: Annotated[Path | None, typer.Option(help="Folder with the Fashion-MNIST files.")] = None,
    dataset: Annotated[str, typer.Option(help="auto, fashion-mnist or digits.")] = "auto",
    epsilon: Annotated[float, typer.Option(help="Privacy budget: epsilon.")] = 8.0,
    delta: Annotated[float | None, typer.Option(help="Privacy budget: delta.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    clip_norm: Annotated[float, typer.Option(help="Clip norm of each example's gradient.")] = 1.0,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each mechanism, each from a different initialization.")
    ] = None,
    learning_rates: Annotated[
        str | None, typer.Option(help="Comma-separated rates; each mechanism uses its best on held-out images.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against step.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    outputs.check({"plot": plot})
    _check.choice("dataset", dataset, datasets.NAMES)
    _check_numbers(epsilon, clip_norm, delta, batch_size, epochs, seeds)
    if learning_rates is not None:
        _rates(learning_rates)
    if importlib.util.find_spec("torch") is None:
        raise ValueError("torch is missing: training needs it; pip install 'bandmf[torch]'")
    with show.status("loading images") as line:
        tuning, images = datasets.hold_out(_load(dataset, data, line))
    usual = _USUAL[images.name]
    seeds = _check.whole("seeds", usual.seeds if seeds is None else seeds)
    setting: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": usual.delta if delta is None else delta,
        "examples": len(images.train),
        "batch_size": usual.batch_size if batch_size is None else batch_size,
        "epochs": usual.epochs if epochs is None else epochs,
    }
    rates = _rates(learning_rates or usual.rates)
    with show.status("planning"):
        plans = _plans(setting)
    results = {name: _tune_and_run(tuning, images, plan, name, rates, seeds, clip_norm) for name, plan in plans.items()}
    if plot is not None:
        curves = {name: [(h.steps, h.accuracies) for h in runs] for name, (_, runs) in results.items()}
        title = f"{images.name}, epsilon={epsilon:g}, delta={number(setting['delta'])}"
        from bandmf import plots

        plots.save(plots.accuracy(curves, title), plot)
    split = {"trained on": len(images.train), "tuned on": len(tuning.test), "tested on": len(images.test)}
    _report(plans, results, images.name, split, json)


def _check_numbers(
    epsilon: float,
    clip_norm: float,
    delta: float | None,
    batch_size: float | None,
    epochs: float | None,
    seeds: int | None,
) -> None:
    """Before anything is downloaded; the plan checks the rest."""
    above_zero = {"epsilon": epsilon, "clip_norm": clip_norm, "batch_size": batch_size, "epochs": epochs}
    for name, value in above_zero.items():
        if value is not None:
            _check.real(name, value, 0, open_low=True)
    if delta is not None:
        _check.real("delta", delta, 0, 1, open_low=True, open_high=True)
    if seeds is not None:
        _check.whole("seeds", seeds)


def _load(name: str, data: Path | None, line: show.Status) -> datasets.Images:
    try:
        return datasets.load(name, data, announce=_announce, progress=line.update)
    except ValueError as error:  # the folder is --data here
        raise ValueError(str(error).replace("folder=", "data=", 1)) from None


def _announce(text: str) -> None:
    show.messages.print(text, markup=False, soft_wrap=True)


def _plans(setting: dict[str, Any]) -> dict[str, Plan]:
    """DP-SGD, the paper's BandMF, and balls-in-bins where there is a whole epoch to put in bins."""
    plans = {"DP-SGD": make_plan(**setting, bands=1), "BandMF": make_plan(**setting, sampling="cyclic-poisson")}
    if setting["epochs"] > 0.99:
        binned = make_plan(**setting, sampling="balls-in-bins")
        plans[IN_BINS[binned.mechanism]] = binned
    return plans


def _rates(text: str) -> list[float]:
    try:
        return [_check.real("learning_rates", float(rate), 0, open_low=True) for rate in text.split(",")]
    except ValueError:
        raise ValueError(f"learning_rates={text!r}: must be numbers above zero, separated by commas") from None


def _tune_and_run(
    tuning: datasets.Images,
    images: datasets.Images,
    plan: Plan,
    name: str,
    rates: list[float],
    seeds: int,
    clip_norm: float,
) -> tuple[float, list[History]]:
    """The best learning rate, by one run for each on held-out images, and runs with it from other initializations."""
    from bandmf.demo import training

    spent = Spent(plan)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with show.bars(*columns) as progress:
        task = progress.add_task(name, total=(len(rates) + seeds) * plan.steps)

        def run(images: datasets.Images, rate: float, seed: int) -> History:
            began, shown = time.monotonic(), ""

            def listen(step: int, accuracy: float | None) -> None:
                nonlocal shown
                if accuracy is not None:
                    shown = f" accuracy {accuracy:.1%}"
                speed = step / (time.monotonic() - began)
                text = f"{name} step {step}{shown} epsilon {spent.at(step)} {speed:.0f} steps/s"
                progress.update(task, advance=1, description=text)

            return training.train(images, plan, rate, seed, clip_norm=clip_norm, listen=listen)

        best = max(rates, key=lambda rate: run(tuning, rate, 0).final)
        return best, [run(images, best, seed) for seed in range(1, seeds + 1)]


class Spent:
    """The epsilon spent after so many steps, at ten points of the run, as text."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.known = plan, dict[int, str]()

    def at(self, step: int) -> str:
        """Up to the end of the tenth of the run that the step lies in."""
        plan = self.plan
        mark = min(plan.steps, -(-step * 10 // plan.steps) * plan.steps // 10)
        if mark not in self.known:
            self.known[mark] = f"{plan.spent_after(mark):.2f}"
        return self.known[mark]


def _noise(plan: Plan) -> str:
    if plan.bands == 1:
        return "independent"
    return next(candidate.name for candidate in plan.candidates if plan.is_chosen(candidate))


def _report(
    plans: dict[str, Plan],
    results: dict[str, tuple[float, list[History]]],
    data: str,
    split: dict[str, int],
    as_json: bool,
) -> None:
    rows = []
    for name, plan in plans.items():
        rate, runs = results[name]
        finals = [run.final for run in runs]
        rows.append(
            {
                "mechanism": name,
                "noise": _noise(plan),
                "sigma": round(plan.noise_multiplier, 4),
                "RMSE": round(plan.mean_rmse, 4),
                "rate": rate,
                "accuracy": round(float(np.mean(finals)), 4),
                "lowest": round(min(finals), 4),
                "highest": round(max(finals), 4),
            }
        )
    if as_json:
        images = {name.replace(" ", "_"): count for name, count in split.items()}
        show.print_json({"data": data, "images": images, "epsilon_covers": COVERS, "runs": rows})
        return
    plan = plans["BandMF"]
    title = f"{data}: {plan.steps:,} steps of {plan.batch_size:g}, epsilon={plan.epsilon:g}, delta={number(plan.delta)}"
    percents = ("accuracy", "lowest", "highest")
    shown = [[f"{value:.1%}" if name in percents else number(value) for name, value in row.items()] for row in rows]
    show.print_table(title, tuple(rows[0]), shown)
    show.say("Images: " + ", ".join(f"{count:,} {name}" for name, count in split.items()) + ".")
    show.say(COVERS)
