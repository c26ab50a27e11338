"""The figure on time: wall time of the loss, and of loss and gradient, against the number of steps, at 16 bands.

As in the paper, the steps grow until loss and gradient take 60 seconds together. The rows of a GPU are recorded
(`benchmarks/paper_gpu.py` writes them).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.figure import Figure

from bandmf import optimize, plots, strategies, workloads
from bandmf.error import mean_squared_error
from bandmf.error.toeplitz import ToeplitzError, mean_weights
from bandmf.optimize.banded import NormalizedLoss
from bandmf.optimize.dense import BandSearch, Classes, squared_errors
from bandmf.optimize.objectives import Objective
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain

EXPLICIT, STREAMED, BANDED, TOEPLITZ = "explicit", "streamed rows", "general banded", "Toeplitz"
BANDS, LIMIT = 16, 60.0
# Where the sizes start and, for want of memory, end.
SIZES = {EXPLICIT: (256, 4096), STREAMED: (1024, 2**20), BANDED: (1024, 2**20), TOEPLITZ: (2**15, 2**25)}
CPU, GPU = "CPU", "H200"

Work = Callable[[], object]


def points(quick: bool) -> list[Point]:
    if quick:
        return [{"family": family, "fewest": 64, "most": 256} for family in SIZES]
    return [{"family": family, "fewest": low, "most": high} for family, (low, high) in SIZES.items()]


def compute(family: str, fewest: int, most: int) -> list[Row]:
    """Twice (for the cheap ones four times) as many steps until the next size would take longer than the limit."""
    factor, order = (4, 1) if family in (BANDED, TOEPLITZ) else (2, 3 if family == EXPLICIT else 2)
    rows: list[Row] = []
    steps = fewest
    while steps <= most:
        loss, both = (None if work is None else least_seconds(work) for work in _work(family, steps))
        rows.append(
            {
                "family": family,
                "machine": CPU,
                "way": "",
                "steps": steps,
                "bands": BANDS,
                "loss_seconds": loss,
                "both_seconds": both,
            }
        )
        if max(loss or 0, both or 0) * factor**order > LIMIT:
            break
        steps *= factor
    return rows


def _work(family: str, steps: int) -> tuple[Work, Work | None]:
    """The loss, and loss and gradient; the generic streaming evaluation has no gradient of its own."""
    workload, mean = workloads.prefix(steps), Objective("mean")
    if family == TOEPLITZ:
        theta = optimize.banded_toeplitz(steps, BANDS, normalize_columns=False).strategy.columns(0, 1)[0]
        return lambda: ToeplitzError(theta, workload, False, steps).mean(), lambda: _toeplitz(theta, workload)
    if family == EXPLICIT:
        A = np.tril(np.ones((steps, steps)))
        search = BandSearch(A, Classes(steps, 1), BANDS, None)
        return lambda: squared_errors(A, search.gram(search.x)), lambda: search.loss(search.x, mean)
    strategy = strategies.banded_square_root(steps, BANDS, normalize_columns=True)
    if family == STREAMED:
        return lambda: sum(streamed_errors(strategy, workload)), None
    general = strategies.Banded(strategy.columns())
    loss = NormalizedLoss(workload)
    return lambda: mean_squared_error(general), lambda: loss(general.columns(), mean)


def _toeplitz(theta: np.ndarray, workload: workloads.Workload) -> object:
    """Every step of the response followed, as in the paper: the library's own way stops where it has settled."""
    error = ToeplitzError(theta, workload, False, workload.steps)
    weights, beyond = mean_weights(error)
    return error.mean(), error.gradient(weights, beyond, np.zeros(0))


def streamed_errors(strategy: strategies.Strategy, workload: workloads.Workload) -> Iterator[float]:
    """The paper's algorithm for any pair of streaming operators: the rows of A C^-1, one at a time."""
    n = strategy.steps
    rows = workload.operator.apply(strategy.inverse().apply(np.eye(1, n, i)[0] for i in range(n)))
    return (float(row @ row) for row in rows)


def least_seconds(work: Work) -> float:
    """The least of three times, or of fewer if they are long."""
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 20:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def reach(table: Table, family: str, column: str = "both_seconds") -> float:
    """The steps at which the limit is met, by the slope of the last three sizes."""
    rows = table.where(family=family, machine=CPU)[-3:]
    steps, seconds = np.log([row["steps"] for row in rows]), np.log([row[column] for row in rows])
    slope = np.polyfit(steps, seconds, 1)[0]
    return float(np.exp(steps[-1] + (math.log(LIMIT) - seconds[-1]) / slope))


def _complete(table: Table) -> bool:
    return all(table.where(family=family, machine=CPU, steps=low) for family, (low, _) in SIZES.items())


def dense_limit(table: Table) -> Verdict:
    """About 10^4: within a factor of two."""
    if not _complete(table):
        return not_judged
    n = reach(table, EXPLICIT)
    most = max(table.where(family=EXPLICIT, machine=CPU).column("steps"))
    how = ", extrapolated" if n > most else ""
    number = f"one loss and gradient takes {LIMIT:g} s at about n = {round(n, -2):,.0f}, on one core{how}"
    if 5e3 <= n <= 2e4:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "outside 5,000 to 20,000")


def banded_limit(table: Table) -> Verdict:
    """About 10^5 or more: a loss and gradient within the limit there."""
    if not _complete(table):
        return not_judged
    largest = max(table.where(family=BANDED, machine=CPU), key=lambda row: row["steps"])
    n = reach(table, BANDED)
    streamed = reach(table, STREAMED, "loss_seconds")
    most, seconds = largest["steps"], largest["both_seconds"]
    number = f"{seconds:.1f} s at n = {most:,}; {LIMIT:g} s at about {n / 1e6:.1f} million, extrapolated"
    if n < 1e5:
        return Verdict("does not hold", number, "less than 100,000 steps")
    remark = (
        f"on one CPU core, by a recursion on covariances whose cost is linear in n; with the paper's streamed rows the "
        f"loss alone takes {LIMIT:g} s at about n = {round(streamed, -3):,.0f} there"
    )
    return Verdict("holds with a remark", number, remark)


def toeplitz_limit(table: Table) -> Verdict:
    if not _complete(table):
        return not_judged
    within = [row for row in table.where(family=TOEPLITZ, machine=CPU) if row["both_seconds"] <= LIMIT]
    largest = max(within, key=lambda row: row["steps"])
    number = f"{largest['both_seconds']:.1f} s at n = {largest['steps']:,}"
    if largest["steps"] > 1e7:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "not beyond 10^7 steps in the time allowed")


def growing_gap(table: Table) -> Verdict:
    """Growing: twice as many losses for a gradient with a thousand times as many steps, n^0.1, or more."""
    rows = table.where(family=BANDED, machine=CPU)
    if len(rows) < 4:
        return not_judged
    ratios = [row["both_seconds"] / row["loss_seconds"] for row in rows]
    growth = np.polyfit(np.log(rows.column("steps")), np.log(ratios), 1)[0]
    number = f"loss and gradient take {np.median(ratios):.1f} losses (median), growing as n^{growth:.2f}"
    if growth >= 0.1:
        return Verdict("holds", number)
    remark = (
        "the paper's reason, parts computed twice to save memory, does not exist here: the gradient is a second "
        "recursion, backward"
    )
    return Verdict("not judged", number, remark)


def cpu_faster(table: Table) -> Verdict:
    """An order of magnitude: at least five times, at the most steps that both were timed at or near; ten times for no
    remark."""
    gpu = table.where(family=TOEPLITZ, machine=GPU)
    cpu = table.where(family=TOEPLITZ, machine=CPU)
    if not _complete(table):
        return not_judged
    if not gpu:
        return Verdict("not judged", "", "no times of a GPU are recorded")
    quickest = {n: min(gpu.where(steps=n).column("both_seconds")) for n in gpu.values("steps")}
    n = max(n for n in quickest if n <= max(cpu.column("steps")))
    logs = np.interp(math.log(n), np.log(cpu.column("steps")), np.log(cpu.column("both_seconds")))
    ratio = quickest[n] / math.exp(logs)
    number = f"{ratio:.0f} times faster on one CPU core than on the GPU ({GPU}), at n = {n:,}"
    if ratio >= 10:
        return Verdict("holds", number)
    if ratio >= 5:
        remark = "the GPU runs all steps in one kernel of ours; an operation for each step is slower still"
        return Verdict("holds with a remark", number, remark)
    return Verdict("does not hold", number, "less than five times")


def draw(table: Table) -> Figure:
    figure, (left, right) = plots.panels(2)
    for axis, families in ((left, (BANDED, STREAMED, EXPLICIT)), (right, (TOEPLITZ,))):
        for color, (name, rows) in zip(plots.COLORS, _curves(table, families).items(), strict=False):
            for column, style in (("loss_seconds", "-"), ("both_seconds", "--")):
                curve = sorted((row["steps"], row[column]) for row in rows if row[column] is not None)
                if curve:
                    axis.plot(*zip(*curve, strict=True), style, color=color, marker="o", markersize=4)
            top = max((row["steps"], row["both_seconds"] or row["loss_seconds"]) for row in rows)
            axis.annotate(name, top, (-7, 3), textcoords="offset points", ha="right", fontsize=9, color=color)
        axis.axhline(LIMIT, color="#777777", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="steps", ylabel="seconds")
        for style, what in (("-", "loss"), ("--", "loss and gradient")):
            axis.plot([], [], style, color="#777777", label=what)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
        used = [row for row in table if row["family"] in families]
        plain(axis, "x", [row["steps"] for row in used])
        plain(axis, "y", [LIMIT, *(row["loss_seconds"] for row in used)])
        axis.margins(x=0.08)
    left.set_title(f"General banded, {BANDS} bands, one core")
    right.set_title(f"Toeplitz, {BANDS} bands")
    return figure


def _curves(table: Table, families: tuple[str, ...]) -> dict[str, Table]:
    """By family on the CPU, where there are several; else by machine, and by way of doing it on the GPU."""
    if len(families) > 1:
        found = {family: table.where(family=family, machine=CPU) for family in families}
    else:
        rows = table.where(family=families[0])
        found = {CPU: rows.where(machine=CPU)}
        found |= {f"{GPU} ({way})": rows.where(machine=GPU, way=way) for way in rows.where(machine=GPU).values("way")}
    return {name: rows for name, rows in found.items() if rows}


EXPERIMENT = Experiment(
    name="timing",
    title="Time of the loss and its gradient",
    place='Appendix "Timing experiments", its figure',
    points=points,
    compute=compute,
    draw=draw,
    alone=True,
    recorded="timing.csv",
    version=2,
    claims=(
        Claim(
            "time-explicit",
            "With explicit matrices, optimization is limited to about 10,000 steps.",
            "Sections 1, 2.2 and 4.1",
            dense_limit,
        ),
        Claim(
            "time-banded",
            "Loss and gradient of general banded strategies are computed within a minute up to about 100,000 steps.",
            'Appendix "Timing experiments"',
            banded_limit,
        ),
        Claim(
            "time-toeplitz",
            "Loss and gradient of Toeplitz strategies are computed within a minute beyond 10 million steps.",
            'Appendix "Timing experiments"',
            toeplitz_limit,
        ),
        Claim(
            "time-gradient",
            "For general banded strategies the gradient falls behind the loss as the steps grow.",
            'Appendix "Timing experiments"',
            growing_gap,
        ),
        Claim(
            "time-gpu",
            "The Toeplitz computations are an order of magnitude faster on a CPU than on a GPU.",
            'Appendix "Timing experiments"',
            cpu_faster,
        ),
    ),
)
