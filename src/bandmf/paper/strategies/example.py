"""Example A.1: the best strategy with three bands for nine steps."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from bandmf import optimize, plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict
from bandmf.paper.table import Row, Table

# Printed in the paper, column by column: the diagonal, then the two entries below it.
PRINTED = (
    (0.740, 0.500, 0.450),
    (0.822, 0.492, 0.286),
    (0.876, 0.395, 0.278),
    (0.821, 0.462, 0.335),
    (0.855, 0.442, 0.272),
    (0.882, 0.403, 0.243),
    (0.892, 0.409, 0.194),
    (0.936, 0.353),
    (1.000,),
)


def points(quick: bool) -> list[Point]:
    return [{"steps": 9, "bands": 3}]


def compute(steps: int, bands: int) -> list[Row]:
    matrix = optimize.banded(steps, bands, gap=1e-12).strategy.materialize()
    return [
        {"row": i + 1, "column": j + 1, "entry": float(matrix[i, j]), "printed": PRINTED[j][i - j]}
        for i in range(steps)
        for j in range(max(0, i - bands + 1), i + 1)
    ]


def digits(table: Table) -> Verdict:
    """Printed to three digits, so a right entry is at most half a thousandth away."""
    gaps = np.abs(np.subtract(table.column("entry"), table.column("printed")))
    number = f"{np.sum(gaps <= 0.0005 + 1e-9)} of {len(table)} entries equal to the printed digits"
    return (
        Verdict("holds", number)
        if np.all(gaps <= 0.0005 + 1e-9)
        else Verdict("does not hold", number, f"off by {gaps.max():.2g}")
    )


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=5.4, height=4.4)
    axis.grid(visible=False)
    matrix = np.full((9, 9), np.nan)
    for row in table:
        matrix[row["row"] - 1, row["column"] - 1] = row["entry"]
        axis.text(row["column"], row["row"], f"{row['entry']:.3f}", ha="center", va="center", fontsize=8)
    axis.imshow(matrix, extent=(0.5, 9.5, 9.5, 0.5), cmap="Blues", vmin=0, vmax=2)
    axis.set(xlabel="column", ylabel="row", title="The best strategy with 3 bands for 9 steps")
    return figure


EXPERIMENT = Experiment(
    name="example",
    title="The 9 x 9 example",
    place="Example A.1",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "example-digits",
            "The best strategy with three bands for nine steps has the printed entries.",
            "Appendix B.1",
            digits,
        ),
    ),
)
