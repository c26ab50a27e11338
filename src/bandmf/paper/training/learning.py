"""Figures 3b and 3c: what a strategy's RMSE says of learning, with an adaptive and a non-adaptive optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bandmf import plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.paper.training import machines
from bandmf.paper.training.learning_curves import BANDED, BUFFERED, OPTIMIZERS, Curves, curves_of, judged
from bandmf.paper.training.learning_curves import draw as draw_lines

VISIBLE = 0.05  # lines line up that are nowhere further apart than this part of the curve's height
ERRORS = {"rmse": "RMSE", "max_error": "max error"}
SETUP = (
    "measured on a causal character model of 110,720 parameters and tiny Shakespeare, not BertTiny and StackOverflow: "
    "2,048 steps of 32 examples, constant learning rate, column-normalized Toeplitz strategies, a BLT of 5 buffers"
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


class Finding(NamedTuple):
    """Whether it is so, the distance that decides it over the curve's height, the numbers, and what else to say."""

    so: bool
    share: float
    number: str
    why: str


def apart(curves: Curves, names: tuple[str, ...]) -> tuple[float, int]:
    """The largest distance between the means of these strategies at equal error, and where it is."""
    gaps = np.ptp([curves.mean(name) for name in names], axis=0)
    return float(gaps.max()), int(gaps.argmax())


def lines_up(curves: Curves, error: str) -> Finding:
    """Nowhere are the means of two banded strategies further apart than 5 percent of the curve's height."""
    gap, place = apart(curves, BANDED)
    luck = max(np.ptp(curves.losses[name][:, place]) for name in BANDED)
    number = (
        f"losses of 1, 8, 64 and 512 bands at most {gap:.3f} nats apart (at {ERRORS[error]} "
        f"{curves.errors[place]:.3g}), {gap / curves.height:.1%} of the curve's height ({curves.height:.2f}, "
        f"lowest to highest loss); seeds are {luck:.3f} apart there"
    )
    if gap <= VISIBLE * curves.height:
        return Finding(True, gap / curves.height, number, "")
    fewer = next(
        names for names in (BANDED[:count] for count in (3, 2, 1)) if apart(curves, names)[0] <= VISIBLE * curves.height
    )
    why = f"more than {VISIBLE:.0%} of the height"
    if len(fewer) > 1:
        share = apart(curves, fewer)[0] / curves.height
        why += f"; up to {fewer[-1]} the lines line up, {share:.1%} of the height apart at most"
    if fewer[-1] == "64 bands":
        why += "; 512 bands are a quarter of our steps (a tenth of the paper's, if its BLT of 5,000 bands had 5,000)"
    return Finding(False, gap / curves.height, number, why)


def gap_to_blt(curves: Curves, error: str) -> Finding:
    """Averaged over the curve the BLT loses to each banded strategy in every seed, and somewhere to their mean by more
    than 5 percent of the curve's height.
    """
    over = curves.mean(BUFFERED) - np.mean([curves.mean(name) for name in BANDED], axis=0)
    widest = int(np.argmax(over))
    leads = {name: (curves.losses[BUFFERED] - curves.losses[name]).mean(axis=1) for name in BANDED}
    share = over[widest] / curves.height
    number = (
        f"the BLT's loss is {over[widest]:.3f} nats above the mean of the banded strategies at {ERRORS[error]} "
        f"{curves.errors[widest]:.3g}, {share:.1%} of the curve's height; averaged over the curve, it is above "
        + ", ".join(f"{name} by {lead.mean():.3f}" for name, lead in leads.items())
    )
    if not all(np.all(lead > 0) for lead in leads.values()):
        return Finding(False, share, number, "it is not above every banded strategy in every seed")
    why = "" if share > VISIBLE else f"less than {VISIBLE:.0%} of the height everywhere"
    return Finding(bool(share > VISIBLE), share, number, why)


def fewer_is_better(curves: Curves, error: str) -> Finding:
    """Averaged over the curve, each of 1, 8, 64, 512 bands and the BLT loses to the one before; 512 bands somewhere
    lose to 1 by more than 5 percent of the curve's height, and nowhere does any win by as much in every seed.
    """
    names = [*BANDED, BUFFERED]
    average = {name: curves.losses[name].mean(axis=1) for name in names}
    last = curves.mean("512 bands") - curves.mean("1 band")
    widest = int(np.argmax(last))
    share = last[widest] / curves.height
    number = (
        "loss averaged over the curve: "
        + ", ".join(f"{name} {each.mean():.3f}" for name, each in average.items())
        + f"; that of 512 bands is {last[widest]:.3f} above that of 1 at {ERRORS[error]} {curves.errors[widest]:.3g}, "
        f"{share:.1%} of the curve's height"
    )
    steps = list(pairwise(names))
    unsure = [f"{a} and {b}" for a, b in steps if not np.all(average[a] < average[b])]
    # How far the strategy with more bands is ahead on average, where it is so in every seed.
    leads = [curves.losses[a] - curves.losses[b] for a, b in combinations(names, 2)]
    ahead = [np.where(np.all(lead > 0, axis=0), lead.mean(axis=0), 0) for lead in leads]
    so = (
        all(average[a].mean() < average[b].mean() for a, b in steps)
        and share > VISIBLE
        and np.max(ahead) <= VISIBLE * curves.height
    )
    why = [f"not in every seed between {', '.join(unsure)}"] if unsure else []
    if np.max(ahead) > 0:
        places = curves.errors[np.max(ahead, axis=0) > 0]
        why.append(
            f"more bands are ahead in every seed at {ERRORS[error]} {', '.join(f'{place:.3g}' for place in places)}, "
            f"by {np.max(ahead):.3f} at most"
        )
    return Finding(bool(so), share, number, "; ".join(why))


def verdict(table: Table, optimizer: str, find: Callable[[Curves, str], Finding], error: str) -> Verdict:
    """What a finding says, with the ways in which our experiment is not the paper's."""
    rows = judged(table)
    if rows is None:
        return not_judged
    curves = curves_of(rows, optimizer, error)
    found = find(curves, error)
    ends = f"the best rate is the first or last tried in {curves.at_end} of {curves.settings} settings"
    remark = "; ".join(part for part in (found.why, SETUP, ends if curves.at_end else "") if part)
    return Verdict("holds with a remark" if found.so else "does not hold", found.number, remark)


def non_adaptive_lines_up(table: Table) -> Verdict:
    found = verdict(table, "momentum", lines_up, "rmse")
    if found is not_judged:
        return found
    adaptive = curves_of(judged(table) or Table(), "adam", "rmse")
    share = apart(adaptive, BANDED)[0] / adaptive.height
    return replace(found, remark=f"{found.remark}; with the adaptive optimizer they are {share:.1%} apart")


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
