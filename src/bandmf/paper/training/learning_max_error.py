"""Appendix "Max error vs. learning performance": the lines of Figures 3b and 3c against the largest error."""

from __future__ import annotations

from matplotlib.figure import Figure

from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Table
from bandmf.paper.training import learning
from bandmf.paper.training.learning_curves import curves_of, judged

FINDINGS = {
    "fewer bands learn better (adaptive)": ("adam", learning.fewer_is_better),
    "the banded lines line up (non-adaptive)": ("momentum", learning.lines_up),
    "the BLT learns less (non-adaptive)": ("momentum", learning.gap_to_blt),
}


def points(quick: bool) -> list[Point]:
    """At full size, the recorded rows: they are those of Figures 3b and 3c."""
    return learning.points(True) if quick else []


def same_findings(table: Table) -> Verdict:
    """Similar observations: each of the three findings is so at equal max error if it is so at equal RMSE."""
    rows = judged(table)
    if rows is None:
        return not_judged
    numbers, changed, neither = [], [], []
    for name, (optimizer, find) in FINDINGS.items():
        before = find(curves_of(rows, optimizer, "rmse"), "rmse")
        after = find(curves_of(rows, optimizer, "max_error"), "max_error")
        numbers.append(f"{name}: {yes_or_no(after)} ({yes_or_no(before)} at equal RMSE)")
        if before.so != after.so:
            changed.append(f"{name}: {after.why or before.why}")
        elif not after.so:
            neither.append(f"{name}: at neither ({after.why})")
    remark = "; ".join([*changed, *neither, learning.SETUP])
    return Verdict("does not hold" if changed else "holds with a remark", "; ".join(numbers), remark)


def yes_or_no(found: learning.Finding) -> str:
    return f"{'yes' if found.so else 'no'}, {found.share:.1%} of the curve's height"


def draw(table: Table) -> Figure:
    return learning.picture(table, "max_error")


EXPERIMENT = Experiment(
    name="learning_max_error",
    title="Max error and learning",
    place='Appendix "Max Error vs. Learning Performance"',
    points=points,
    compute=learning.compute,
    draw=draw,
    claims=(
        Claim(
            "learning-max-error",
            "Max error in place of RMSE gives the same findings about learning.",
            f"{learning.PLACE}, last paragraph",
            same_findings,
        ),
    ),
    alone=True,
    recorded="learning.csv",
)
