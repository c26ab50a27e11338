"""Figures 3b and 3c: what a strategy's RMSE says of learning, with an adaptive and a non-adaptive optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from bandmf import plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.paper.training import machines
from bandmf.paper.training.learning_curves import (
    BANDED,
    BUFFERED,
    OPTIMIZERS,
    Curves,
    curves_of,
    judged,
)
from bandmf.paper.training.learning_curves import (
    draw as draw_lines,
)

VISIBLE = 0.05  # lines line up that are nowhere further apart than this part of the curve's height
ERRORS = {"rmse": "RMSE", "max_error": "max error"}
SETUP = (
    "a causal character model of 110,720 parameters on tiny Shakespeare in place of BertTiny (4 million) on "
    "StackOverflow; 2,048 steps of 32 examples; Toeplitz strategies with normalized columns, a BLT of 5 buffers; a "
    "constant learning rate"
)


def points(quick: bool) -> list[Point]:
    """Full sizes take half an hour of a GPU; without one, the rows recorded on ours are used."""
    if not machines.has_torch() or not (quick or machines.has_gpu()):
        return []
    from bandmf.paper.training import learning_runs

    return learning_runs.points_of("tiny" if quick else "full")


def compute(setting: str, bands: int, optimizer: str, seed: int) -> list[Row]:
    from bandmf.paper.training import learning_runs

    return learning_runs.compute(setting, bands, optimizer, seed)


Finding = tuple[bool, str, str]  # whether it is so, the number, and what else there is to say


def lines_up(curves: Curves, error: str) -> Finding:
    """Nowhere are the means of two banded strategies further apart than 5 percent of the curve's height."""
    gaps = np.ptp([curves.mean(name) for name in BANDED], axis=0)
    worst = int(np.argmax(gaps))
    luck = max(np.ptp(curves.losses[name][:, worst]) for name in BANDED)
    number = (
        f"losses of 1, 8, 64 and 512 bands at most {gaps[worst]:.3f} nats apart (at {ERRORS[error]} "
        f"{curves.errors[worst]:.3g}), {gaps[worst] / curves.height:.1%} of the curve's height of {curves.height:.2f}; "
        f"seeds are {luck:.3f} apart there"
    )
    return bool(gaps[worst] <= VISIBLE * curves.height), number, ""


def gap_to_blt(curves: Curves, error: str) -> Finding:
    """The BLT loses to each banded strategy on average, in every seed, and somewhere to all by more than 5 percent."""
    over = curves.mean(BUFFERED) - np.max([curves.mean(name) for name in BANDED], axis=0)
    widest = int(np.argmax(over))
    leads = np.array([(curves.losses[BUFFERED] - curves.losses[name]).mean(axis=1) for name in BANDED])
    by_seed = leads.mean(axis=0)
    number = (
        f"the BLT's loss is {over[widest]:.3f} nats above the highest of the banded strategies at {ERRORS[error]} "
        f"{curves.errors[widest]:.3g}, {over[widest] / curves.height:.1%} of the curve's height; averaged over the "
        f"curve, {leads.mean():.3f} above them ({by_seed.min():.3f} to {by_seed.max():.3f} by seed)"
    )
    worse = np.all(leads > 0)
    why = (
        "its loss is not above that of every banded strategy in every seed"
        if not worse
        else f"less than {VISIBLE:.0%} of the height everywhere"
    )
    so = bool(worse and over[widest] > VISIBLE * curves.height)
    return so, number, "" if so else why


def fewer_is_better(curves: Curves, error: str) -> Finding:
    """From 1 band to 8, 64, 512 and the BLT, the loss averaged over the curve rises each time, in every seed."""
    names = [*BANDED, BUFFERED]
    means = {name: curves.losses[name].mean(axis=1) for name in names}
    wrong = [(left, right) for left, right in pairwise(names) if not np.all(means[left] < means[right])]
    last = curves.mean(BUFFERED) - curves.mean(BANDED[0])
    widest = int(np.argmax(np.abs(last)))
    number = (
        "loss averaged over the curve: "
        + ", ".join(f"{name} {mean.mean():.3f}" for name, mean in means.items())
        + f"; the BLT's is {last[widest]:.3f} above 1 band's at {ERRORS[error]} {curves.errors[widest]:.3g}"
    )
    broken = [
        f"{curves.errors[place]:.3g}"
        for place in range(len(curves.errors))
        if np.any(np.diff([curves.mean(name)[place] for name in names]) < 0)
    ]
    why = f"the means are out of this order at {ERRORS[error]} {', '.join(broken)}" if broken else ""
    if wrong:
        why = "not in every seed: " + ", ".join(f"{left} before {right}" for left, right in wrong)
    return not wrong, number, why


def verdict(table: Table, optimizer: str, find: Callable[[Curves, str], Finding], error: str) -> Verdict:
    """What a finding says, with the ways in which our experiment is not the paper's."""
    rows = judged(table)
    if rows is None:
        return not_judged
    curves = curves_of(rows, optimizer, error)
    so, number, why = find(curves, error)
    ends = f"the best rate is the first or last tried in {curves.at_end} of {curves.settings} settings"
    remark = "; ".join(part for part in (why, SETUP, ends if curves.at_end else "") if part)
    return Verdict("holds with a remark" if so else "does not hold", number, remark)


def non_adaptive_lines_up(table: Table) -> Verdict:
    return verdict(table, "momentum", lines_up, "rmse")


def non_adaptive_gap(table: Table) -> Verdict:
    return verdict(table, "momentum", gap_to_blt, "rmse")


def adaptive_order(table: Table) -> Verdict:
    return verdict(table, "adam", fewer_is_better, "rmse")


def picture(table: Table, error: str) -> Figure:
    """The two panels, of full size where the table has it."""
    figure, axes = plots.panels(2)
    rows = machines.rows_of(table, "full") or table.where(setting="tiny")
    for axis, optimizer in zip(axes, OPTIMIZERS, strict=True):
        if rows.where(optimizer=optimizer):
            draw_lines(axis, rows, optimizer, error)
            axis.legend(frameon=False, fontsize=9)
            axis.set_xlabel(f"{ERRORS[error]} of running sums (clip norms)")
    return figure


def draw(table: Table) -> Figure:
    return picture(table, "rmse")


PLACE = 'Section "RMSE vs. Learning Performance"'
EXPERIMENT = Experiment(
    name="learning",
    title="RMSE and learning",
    place="Figures 3b and 3c",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "learning-adaptive-fewer-bands",
            "With an adaptive optimizer and equal RMSE, strategies with fewer bands learn better.",
            f"{PLACE}, first finding",
            adaptive_order,
        ),
        Claim(
            "learning-non-adaptive-lines-up",
            "With a non-adaptive optimizer, strategies of 1, 8, 64 and 512 bands learn alike at equal RMSE.",
            f"{PLACE}, second finding",
            non_adaptive_lines_up,
        ),
        Claim(
            "learning-non-adaptive-blt",
            "With a non-adaptive optimizer and equal RMSE, a BLT learns less than banded strategies.",
            f"{PLACE}, second finding",
            non_adaptive_gap,
        ),
    ),
    alone=True,
    recorded="learning.csv",
)
