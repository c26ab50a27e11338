"""Figure 2b: the best number of bands by epsilon and epochs, n = 4096 steps, and the paper's rule of thumb."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bandmf import plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.privacy import grid
from bandmf.paper.table import Row, Table

STEPS = 4096


def points(quick: bool) -> list[Point]:
    return grid.by_bands(32 if quick else STEPS)


def compute(steps: int, bands: int) -> list[Row]:
    return grid.banded_rows(steps, bands, grid.powers_of_two(steps), grid.epsilons(steps))


def full_size(table: Table) -> bool:
    return table.values("steps") == [STEPS]


def best(table: Table, epochs: int, epsilon: float) -> int:
    return grid.amplified(table, epochs, epsilon)["bands"]


def monotone(table: Table) -> Verdict:
    """From one power of two to the next, the best bands never rise with epochs and never fall with epsilon."""
    if not full_size(table):
        return not_judged
    epochs, epsilons = table.values("epochs"), table.values("epsilon")
    rises = [
        f"{few} to {many} epochs at epsilon {e:g}"
        for e in epsilons
        for few, many in pairwise(epochs)
        if best(table, many, e) > best(table, few, e)
    ]
    falls = [
        f"epsilon {low:g} to {high:g} with {k} epochs"
        for k in epochs
        for low, high in pairwise(epsilons)
        if best(table, k, high) < best(table, k, low)
    ]
    corners = [(epochs[0], epsilons[-1]), (epochs[0], epsilons[0]), (64, epsilons[-1]), (64, epsilons[0])]
    number = "best bands: " + ", ".join(
        f"{best(table, k, e)} (epsilon {e:g}, {k} epoch{'s' * (k > 1)})" for k, e in corners
    )
    return Verdict("does not hold", number, "; ".join(rises + falls)) if rises + falls else Verdict("holds", number)


def interior(table: Table) -> list[tuple[float, int, int]]:
    """(epsilon, epochs, best bands) where the best lies between the ends, DP-SGD and no sampling."""
    steps = table.values("steps")[0]
    cells = [(e, k, best(table, k, e)) for e in table.values("epsilon") for k in table.values("epochs")]
    return [(e, k, b) for e, k, b in cells if 1 < b < steps // k]


def fit(table: Table) -> tuple[float, float, float]:
    """(factor, x, y) of bands = factor * sqrt(steps) * epsilon^x / epochs^y, by least squares in logarithms."""
    cells = interior(table)
    matrix = np.array([[1, math.log(e), -math.log(k)] for e, k, _ in cells])
    goal = np.array([math.log(b / math.sqrt(table.values("steps")[0])) for *_, b in cells])
    factor, by_epsilon, by_epochs = np.linalg.lstsq(matrix, goal, rcond=None)[0]
    return math.exp(factor), float(by_epsilon), float(by_epochs)


def linear(table: Table) -> Verdict:
    """Roughly linear: powers between 0.75 and 1.25."""
    if not full_size(table):
        return not_judged
    factor, by_epsilon, by_epochs = fit(table)
    number = f"bands = {factor:.2f} sqrt(n) epsilon^{by_epsilon:.2f} / k^{by_epochs:.2f}, fitted between the ends"
    if 0.75 <= by_epsilon <= 1.25 and 0.75 <= by_epochs <= 1.25:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "a power is outside 0.75 to 1.25")


def rule(steps: int, epochs: int, epsilon: float) -> int:
    """The paper's epsilon sqrt(n) / k as a power of two that can be used."""
    bands = max(1.0, epsilon * math.sqrt(steps) / epochs)
    return int(min(2 ** round(math.log2(bands)), steps // epochs))


def excesses(table: Table) -> dict[tuple[float, int], float]:
    """RMSE with the rule's bands over the least, less 1, by epsilon and epochs."""
    found = {}
    for e in table.values("epsilon"):
        for k in table.values("epochs"):
            here = table.where(epochs=k, epsilon=e)
            by_rule = here.where(bands=rule(table.values("steps")[0], k, e)).one("rmse")
            found[e, k] = by_rule / grid.least(here)["rmse"] - 1
    return found


def rule_of_thumb(table: Table) -> Verdict:
    """Near-optimal: within 10 percent of the least RMSE, everywhere; in most places: a remark."""
    if not full_size(table):
        return not_judged
    found = excesses(table)
    counted = {cell: found[cell] for cell in found if found[cell] > 0 or best(table, cell[1], cell[0]) > 1}
    far = {cell: excess for cell, excess in counted.items() if excess > 0.10}
    median = float(np.median(list(counted.values())))
    number = (
        f"within 10 percent of the least RMSE in {len(counted) - len(far)} of {len(counted)} places where more "
        f"than one band is best (median {median:.1%}, at most {max(found.values()):.0%})"
    )
    if not far:
        return Verdict("holds", number)
    worst = ", ".join(f"{x:.0%} at epsilon {e:g} with {k} epoch{'s' * (k > 1)}" for (e, k), x in far.items())
    remark = f"but {worst}; between the ends the best is about {fit(table)[0]:.1f} times the rule"
    return Verdict("holds with a remark" if len(far) < len(counted) / 2 else "does not hold", number, remark)


def capped(table: Table) -> Verdict:
    """Every number of bands from two up to the best beats DP-SGD at epsilon 16 with one epoch."""
    if not full_size(table):
        return not_judged
    here = table.where(epochs=1, epsilon=16)
    dpsgd, most = here.where(bands=1).one("rmse"), grid.least(here)["bands"]
    gains = {b: dpsgd / here.where(bands=b).one("rmse") for b in here.values("bands") if 1 < b <= most}
    shown = [b for b in (2, 8, 32, 128) if b in gains] + [most]
    number = "DP-SGD's RMSE over BandMF's: " + ", ".join(f"{gains[b]:.2f}x with {b} bands" for b in shown)
    behind = [b for b, gain in gains.items() if gain <= 1]
    return Verdict("does not hold", number, f"not with {behind} bands") if behind else Verdict("holds", number)


def draw(table: Table) -> Figure:
    epochs, epsilons = table.values("epochs"), table.values("epsilon")
    steps = table.values("steps")[0]
    bands = [[best(table, k, e) for k in epochs] for e in epsilons]
    title = f"Best bands (powers of 2), {steps:,} steps, delta 1e-8"
    figure = plots.best_bands(epochs, epsilons, bands, title)
    axis = figure.axes[0]
    for row, e in enumerate(epsilons):  # where the rule of thumb costs more than 10 percent
        for column, k in enumerate(epochs):
            if excesses(table)[e, k] > 0.10:
                corner = (column - 0.47, row - 0.46)
                axis.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, color=plots.COLORS[1], linewidth=2))
    axis.set_xlabel("epochs (framed: the rule of thumb costs more than 10 percent)")
    return figure


EXPERIMENT = Experiment(
    name="best_bands",
    note=("n = 4,096 steps, delta = 1e-8; bands are powers of two, as in the paper (within a factor of two)."),
    title="The best number of bands",
    place="Figure 2b",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "best-bands-monotone",
            "The best number of bands falls with epochs and grows with epsilon.",
            "Section 4.2",
            monotone,
        ),
        Claim(
            "best-bands-linear", "It is roughly proportional to epsilon and inversely to epochs.", "Section 4.2", linear
        ),
        Claim("best-bands-rule-of-thumb", "epsilon sqrt(n) / k bands are near-optimal.", "Section 4.2", rule_of_thumb),
        Claim(
            "too-few-bands-beat-dpsgd",
            "Where the best number of bands is too large to use (one epoch, epsilon 16), fewer bands still beat "
            "DP-SGD.",
            "Section 4.2",
            capped,
        ),
    ),
)
