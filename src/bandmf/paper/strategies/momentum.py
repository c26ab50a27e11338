"""Section 4.3's premise: strategies optimized for running sums serve SGD with momentum and a cooldown as well."""

from __future__ import annotations

from matplotlib.figure import Figure

from bandmf import optimize, plots, workloads
from bandmf.error import rmse
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain

STEPS, BANDS, MOMENTA = (256, 1024, 4096), (4, 16, 64), (0.0, 0.9, 0.95)
PROOF = 5e-3
FINE = 0.05
FEW = 64  # steps for each band: few bands


def points(quick: bool) -> list[Point]:
    steps, bands = ((32,), (2, 4)) if quick else (STEPS, BANDS)
    return [{"steps": n, "bands": b} for n in reversed(steps) for b in reversed(bands)]


def compute(steps: int, bands: int) -> list[Row]:
    """Under every momentum, with and without a cooldown to a twentieth over the last quarter, as in prior work."""
    general = _optimized(workloads.prefix(steps), bands).strategy
    toeplitz = optimize.banded_toeplitz(steps, bands, normalize_columns="after").strategy
    rows: list[Row] = []
    for momentum, cooldown in [(beta, c) for beta in MOMENTA for c in (0, 1) if beta or c]:
        workload = workloads.momentum(steps, momentum, workloads.cooldown(steps) if cooldown else None)
        best = _optimized(workload, bands)
        row: Row = {"steps": steps, "bands": bands, "momentum": momentum, "cooldown": cooldown}
        row |= {"rmse": best.rmse, "proved_gap": best.optimality_gap}
        row |= {"for_running_sums": rmse(general, workload=workload)}
        row |= {"toeplitz_for_running_sums": rmse(toeplitz, workload=workload)}
        rows.append(row)
    return rows


def _optimized(workload: workloads.Workload, bands: int) -> optimize.Solution:
    return optimize.banded(workload.steps, bands, workload=workload, gap=PROOF, max_iterations=500)


def _losses(table: Table) -> dict[tuple[int, int], float]:
    """{(steps, bands): the most that a strategy for running sums loses there}."""
    found: dict[tuple[int, int], float] = {}
    for row in table:
        place = row["steps"], row["bands"]
        found[place] = max(found.get(place, 0.0), row["for_running_sums"] / row["rmse"] - 1)
    return found


def fine(table: Table) -> Verdict:
    """Fine: at most five percent more error than the strategy made for the momentum and the cooldown."""
    losses = _losses(table)
    if len(losses) < len(STEPS) * len(BANDS):
        return not_judged
    few = {beta: max(_few(_losses(table.where(momentum=beta)))) for beta in MOMENTA if beta}
    n, b = max(losses, key=lambda place: losses[place])
    by_momentum = ", ".join(f"{loss:.1%} with momentum {beta:g}" for beta, loss in few.items())
    number = f"for n >= {FEW} b at most {by_momentum}; {losses[n, b]:.1%} at n={n}, b={b}"
    if losses[n, b] <= FINE:
        return Verdict("holds", number)
    remark = (
        "the loss grows with the bands and falls with the steps. This is the error of what momentum makes of the "
        "gradients, where the work cited speaks of learning"
    )
    loose = max(row["proved_gap"] for row in table)
    remark += f"; the strategies compared with are proved to within {loose:.0%}, so it may be more"
    return Verdict("holds with a remark" if max(few.values()) <= 2 * FINE else "does not hold", number, remark)


def _few(losses: dict[tuple[int, int], float]) -> list[float]:
    """Those with many steps for each band."""
    return [loss for (n, b), loss in losses.items() if n >= FEW * b]


def cooldown_alone(table: Table) -> Verdict:
    """A cooldown without momentum: at most a tenth of a percent."""
    rows = table.where(momentum=0, cooldown=1)
    if len(rows) < len(STEPS) * len(BANDS):
        return not_judged
    most = max(row["for_running_sums"] / row["rmse"] - 1 for row in rows)
    number = f"at most {most:.2%} lost"
    if most <= 1e-3:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than a tenth of a percent")


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=6.4)
    for bands in table.values("bands"):
        places = [(n, value) for (n, b), value in sorted(_losses(table).items()) if b == bands]
        axis.plot(*zip(*[(n, 100 * v) for n, v in places], strict=True), marker="o", label=f"{bands} bands")
    axis.set(xscale="log", xlabel="steps", ylabel="percent more error, at most")
    plain(axis, "x", table.column("steps"))
    axis.set_ylim(bottom=0)
    axis.set_title("Optimized for running sums, used with momentum")
    axis.legend(frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="momentum",
    note=(
        "The error of what heavy-ball momentum, with and without a linear cooldown of the learning rate, "
        "makes of the noise."
    ),
    title="Strategies for running sums under momentum",
    place="Section 4.3",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "momentum-fine",
            "It is fine to optimize for running sums even when SGD with momentum is used.",
            "Section 4.3",
            fine,
        ),
        Claim(
            "cooldown-alone",
            "Under a learning-rate cooldown alone, a strategy for running sums loses practically nothing.",
            "beyond the paper",
            cooldown_alone,
        ),
    ),
)
