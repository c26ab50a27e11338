"""`bandmf plan`: from (epsilon, delta, data, steps) to a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bandmf._text import counted
from bandmf.cli import arguments, outputs, show
from bandmf.planning import Candidate, Plan
from bandmf.planning import plan as make_plan
from bandmf.planning.labels import candidate_table, labeled
from bandmf.planning.request import training_steps

EXAMPLE = (
    "Example: bandmf plan --epsilon 4 --delta 1e-8 --examples 1000000 --batch-size 500 --steps 16384 "
    "--save plan.json --plot plan.png"
)
_RATES = (0.001, 0.01, 0.1)  # of false positives


def plan(
    delta: Annotated[float, typer.Option(help="Privacy budget: delta.")],
    batch_size: Annotated[float, typer.Option(help="Expected batch size.")],
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: epsilon.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples in the data set.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, or give --epochs.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Trainable parameters of the model.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory for noise on each device, e.g. 1GB.")] = None,
    devices: Annotated[int, typer.Option(help="Devices that share the noise.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: where the noise will run.", show_default="the larger")
    ] = None,
    bands: Annotated[int | None, typer.Option(help="Fix the bands instead of choosing them.")] = None,
    momentum: Annotated[float, typer.Option(help="Optimize for SGD with this momentum.")] = 0.0,
    max_batch_size: Annotated[int | None, typer.Option(help="Cut larger batches to this size.")] = None,
    adjacency: Annotated[str, typer.Option(help="add-remove, zero-out or replace.")] = "add-remove",
    noise_multiplier: Annotated[float | None, typer.Option(help="Fix sigma instead of epsilon.")] = None,
    max_participations: Annotated[
        int | None, typer.Option(help="Plan without amplification: most participations per user (with --separation).")
    ] = None,
    separation: Annotated[int | None, typer.Option(help="Fewest steps between two participations of a user.")] = None,
    sampling: Annotated[
        str, typer.Option(help="auto, cyclic-poisson (the paper's), balls-in-bins, balls-in-bins-redrawn or b-min-sep.")
    ] = "auto",
    mechanism: Annotated[str, typer.Option(help="auto, banded, banded-inverse or blt.")] = "auto",
    inverse_bands: Annotated[int | None, typer.Option(help="Bands of a banded inverse.", show_default="16")] = None,
    certify_seconds: Annotated[float, typer.Option(help="Time to certify balls-in-bins or b-min-sep.")] = 30.0,
    explain: Annotated[bool, typer.Option("--explain", help="Say in words what is guaranteed.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw error against bands (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    attack_rates: Annotated[
        bool, typer.Option("--attack-rates", help="Bound the true positive rates of attacks on membership.")
    ] = False,
) -> None:
    if explain and json:
        raise ValueError("explain, json: give at most one of the two")
    outputs.check({"plot": plot}, {"save": save})
    participation = arguments.participation(max_participations, separation)
    workload = None  # running sums, of as many steps as the plan will have
    if momentum:
        workload = arguments.workload(training_steps(steps, epochs, batch_size, examples), momentum)
    with show.status("evaluating candidates") as line:

        def progress(found: Candidate | str) -> None:
            line.update(found if isinstance(found, str) else f"{found.name}: RMSE {found.rmse:.5g}")

        made = make_plan(
            epsilon=epsilon,
            delta=delta,
            examples=examples,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            parameters=parameters,
            memory=memory,
            devices=devices,
            device=device,
            bands=bands,
            workload=workload,
            max_batch_size=max_batch_size,
            participation=participation,
            adjacency=adjacency,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            mechanism=mechanism,
            inverse_bands=inverse_bands,
            certify_seconds=certify_seconds,
            progress=progress,
        )
        line.update("comparing with DP-SGD")
        summary, rates = made.summary(), dict[float, float]()
        if attack_rates:
            line.update("bounding attacks")
            rates = dict(zip(_RATES, made.attack_rates(_RATES), strict=True))
        if save is not None:
            made.save(save)
        if plot is not None:
            from bandmf import plots  # matplotlib, which takes a second

            line.update("drawing")
            plots.save(made.plot(progress), plot)
    _show(made, summary, rates, json, explain)


def _show(made: Plan, summary: dict[str, object], rates: dict[float, float], as_json: bool, in_words: bool) -> None:
    """As JSON, in words, or as tables with remarks."""
    if as_json:
        attacks = {"attack_rates": rates} if rates else {}
        show.print_json({**summary, **attacks, "candidates": [c._asdict() for c in made.candidates]})
        return
    if in_words:
        show.say(made.explain())
    else:
        show.print_pairs("Plan", labeled(summary))
        show.print_table("Candidates", *candidate_table(made), styles={"chosen": "bold"})
        for remark in _remarks(made):
            show.say(remark)
    if rates:
        found = {f"true positives at {rate:.1%} false ones, at most": f"{value:.2%}" for rate, value in rates.items()}
        show.print_pairs("Attacks on membership", found)


def _remarks(made: Plan) -> Iterator[str]:
    if made.choice:
        yield f"{made.choice[0].upper()}{made.choice[1:]}."
    limit = made.best_without_memory_limit
    if limit is not None:
        yield f"The memory limit costs {made.rmse / limit.rmse - 1:.1%}: {counted(limit.bands, 'band')} would be best."
    if made.memory is None and made.bands > 1 and not made.in_bins:
        yield (
            f"The noise keeps {counted(made.vectors, 'vector')} of the model's size; give --parameters and --memory "
            "for a plan that fits."
        )
    if made.epsilon == math.inf:
        yield "There is not enough noise for any guarantee; see also --explain."
    elif made.certificate is not None:
        samples = f"{made.certificate.samples:,}"
        yield f"Certified by {samples} samples: epsilon = {made.spent():.6g}; see also --explain."
    else:
        yield f"The accountant confirms epsilon = {made.spent():.6g}; see also --explain."
