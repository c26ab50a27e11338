"""Appendix "Scaling beyond n > 10^7": what a strategy loses that was optimized for the cut-off loss.

The response is followed for m steps and taken as settled after them. The appendix writes the tail with one term too
many; `optimize.banded_toeplitz(terms=m)` has the right number.
"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from bandmf import optimize, plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain

CASES = ((2**16, 64, "max"), (10**9, 16, "mean"))  # the paper's own example; one far beyond it


def points(quick: bool) -> list[Point]:
    cases = ((256, 4, "max"),) if quick else CASES
    return [
        {"steps": n, "bands": b, "objective": objective, "cutoff": cutoff}
        for n, b, objective in cases
        for cutoff in _cutoffs(b)
    ]


def _cutoffs(bands: int) -> list[int]:
    """From the number of bands to its square, by factors of two."""
    return [m for m in (bands << k for k in range(2 * bands)) if m <= bands**2]


def compute(steps: int, bands: int, objective: str, cutoff: int) -> list[Row]:
    best = optimize.banded_toeplitz(steps, bands, objective=objective, normalize_columns=False)
    row: Row = {"steps": steps, "bands": bands, "objective": objective, "cutoff": cutoff, "ratio": None}
    try:
        found = optimize.banded_toeplitz(steps, bands, objective=objective, normalize_columns=False, terms=cutoff)
    except ValueError:  # so early a cut-off does not see that the strategy it prefers never settles
        return [row]
    return [row | {"ratio": found.objective / best.objective}]


def cutoffs(table: Table) -> Verdict:
    """The printed digits: 1.032 and 1.0, of the root of the largest squared error."""
    rows = table.where(steps=2**16, bands=64, objective="max")
    if not rows:
        return not_judged
    few, many = (rows.where(cutoff=m).one("ratio") for m in (64, 4096))
    number = f"{few:.4f} with m = b, {many:.6f} with m = b^2"
    if round(few, 3) == 1.032 and round(many, 3) == 1.0:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "printed are 1.032 and 1.0")


def square_is_enough(table: Table) -> Verdict:
    """No loss: to a millionth."""
    rows = Table(row for row in table if row["cutoff"] == row["bands"] ** 2 and row["steps"] >= 2**16)
    if len(rows) < len(CASES):
        return not_judged
    losses = {(row["steps"], row["bands"]): (row["ratio"] or math.inf) - 1 for row in rows}
    number = ", ".join(f"{loss:.1e} at n={n:,}, b={b}" for (n, b), loss in losses.items())
    worst = max(losses, key=lambda place: losses[place])
    if losses[worst] <= 1e-6:
        return Verdict("holds", number)
    remark = f"not at n={worst[0]:,}, b={worst[1]}: the more steps, the longer the response takes to settle"
    if losses[2**16, 64] <= 1e-6:
        return Verdict("holds with a remark", number, remark)
    return Verdict("does not hold", number, remark)


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=6.4)
    for n, b in sorted({(row["steps"], row["bands"]) for row in table}):
        rows = table.where(steps=n, bands=b)
        curve = [(row["cutoff"], max(row["ratio"] - 1, 1e-16)) for row in rows if row["ratio"] is not None]
        axis.loglog(
            *zip(*curve, strict=True),
            marker="o",
            markersize=4,
            label=f"n={n:,}, {b} bands, {rows[0]['objective']} error",
        )
    axis.set(xlabel="steps of the response that are followed", ylabel="RMSE lost, relative")
    plain(axis, "x", table.column("cutoff"))
    axis.set_title("Optimized for the cut-off loss")
    axis.legend(frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="approximate_loss",
    note=("Ratios of root mean squared errors; the CSV keeps ten digits, so losses below 1e-9 are rounding."),
    title="The cut-off loss for very many steps",
    place='Appendix "Scaling beyond n > 10^7"',
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "cutoff-example",
            "At 65,536 steps and 64 bands, optimizing the largest error with a cut-off after b steps ends 1.032 "
            "times above the optimum, after b^2 steps 1.0 times.",
            'Appendix "Scaling beyond n > 10^7"',
            cutoffs,
        ),
        Claim(
            "cutoff-square",
            "A cut-off after b^2 steps loses nothing, for virtually any number of steps.",
            'Appendix "Scaling beyond n > 10^7"',
            square_is_enough,
        ),
    ),
)
