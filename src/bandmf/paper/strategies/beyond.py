"""Beyond the paper: general banded strategies for a million steps, and column normalization optimized as such.

The paper normalizes the columns of a Toeplitz strategy after optimizing it, and expects that optimizing it as
normalized costs what general banded strategies cost. It costs no more than the plain one.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from bandmf import optimize, plots
from bandmf.error import per_step_error
from bandmf.optimize.certificate import optimality_gap
from bandmf.optimize.objectives import Objective
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain
from bandmf.workloads import prefix

LARGE = (10**5, 10**6)
PROVED = 0.01
PAIRS = [(n, b) for n in (256, 1024, 4096, 16384, 10**6) for b in (4, 16, 64, 128)]
FEW = 64  # steps for each band: few bands
SMALL = 1e-3


def points(quick: bool) -> list[Point]:
    large, pairs = ((64,), [(64, 4), (64, 16)]) if quick else (LARGE, PAIRS)
    general: list[Point] = [{"part": "general", "steps": n, "bands": 4 if quick else 16} for n in large[::-1]]
    return general + [{"part": "normalized", "steps": n, "bands": b} for n, b in pairs]


def compute(part: str, steps: int, bands: int) -> list[Row]:
    row: Row = {"part": part, "steps": steps, "bands": bands}
    after = optimize.banded_toeplitz(steps, bands, normalize_columns="after")
    if part == "normalized":
        return [row | {"after": after.rmse} | _normalized(steps, bands)]
    quick = optimize.horizon(steps, bands)
    best = optimize.banded(steps, bands, gap=PROVED, max_iterations=100)
    return [
        row
        | {
            "after": after.rmse,
            "horizon": quick.rmse,
            "horizon_gap": _gap(quick),
            "horizon_seconds": quick.seconds,
            "general": best.rmse,
            "general_gap": best.optimality_gap,
            "general_seconds": best.seconds,
        }
    ]


def _gap(solution: optimize.Solution) -> float:
    """What can be proved of a strategy that was not searched for, by the same certificate."""
    strategy = solution.strategy
    workload = prefix(strategy.steps)
    return optimality_gap(strategy, workload, per_step_error(strategy, workload=workload), Objective("mean"))


def _normalized(steps: int, bands: int) -> Row:
    direct = optimize.banded_toeplitz(steps, bands, normalize_columns="optimized")
    return {
        "plain": optimize.banded_toeplitz(steps, bands, normalize_columns=False).rmse,
        "direct": direct.rmse,
        "direct_seconds": direct.seconds,
        "one_parameter": optimize.inverse_plus_constant(steps, bands, normalize_columns=True).rmse,
    }


def million(table: Table) -> Verdict:
    """Within one percent, proved, and better than the Toeplitz strategy."""
    rows = table.where(part="general", steps=LARGE[-1])
    if not rows:
        return not_judged
    row = rows[0]
    gain = row["after"] / row["general"] - 1
    number = (
        f"within {row['general_gap']:.2%} of the best, proved, after {row['general_seconds']:.0f} s; "
        f"{gain:.1e} below normalized Toeplitz"
    )
    if row["general_gap"] <= PROVED and gain > 0:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "not proved to one percent, or no better than Toeplitz")


def interpolated(table: Table) -> Verdict:
    """Seconds: at most sixty."""
    rows = table.where(part="general", steps=LARGE[-1])
    if not rows:
        return not_judged
    gap, seconds = rows[0]["horizon_gap"], rows[0]["horizon_seconds"]
    number = f"within {gap:.2%} of the best, proved; found in {seconds:.1f} s"
    if gap <= PROVED and seconds <= 60:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "not proved to one percent, or not in a minute")


def improves(table: Table) -> Verdict:
    rows = _complete(table)
    if not rows:
        return not_judged
    gains = [row["plain"] / row["after"] - 1 for row in rows]
    number = f"{min(gains):.1e} to {max(gains):.2%} less error, in {len(rows)} settings"
    if min(gains) > 0:
        return Verdict("holds", number)
    if min(gains) > -1e-12:
        return Verdict("holds with a remark", number, "too little to see in double precision at most steps")
    return Verdict("does not hold", number, "in some setting normalizing makes it worse")


def small_loss(table: Table) -> Verdict:
    """Few bands: at most one for 64 steps. Small: at most a tenth of a percent."""
    rows = _complete(table)
    if not rows:
        return not_judged
    few = max(row["plain"] / row["after"] - 1 for row in rows if row["steps"] >= FEW * row["bands"])
    many = max(row["plain"] / row["after"] - 1 for row in rows)
    number = f"at most {few:.3%} more error for n >= {FEW} b; {many:.2%} with many bands"
    if few <= SMALL:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than a tenth of a percent")


def not_optimal(table: Table) -> Verdict:
    """Not optimal: a millionth or more is left somewhere. Never worse: in all settings."""
    rows = _complete(table)
    if not rows:
        return not_judged
    gains = {(row["steps"], row["bands"]): row["after"] / row["direct"] - 1 for row in rows}
    n, b = max(gains, key=lambda place: gains[place])
    number = f"optimized as normalized, up to {gains[n, b]:.2%} less error (n={n}, b={b})"
    if gains[n, b] < 1e-6 or min(gains.values()) < -1e-12:
        return Verdict("does not hold", number, "nothing gained, or worse somewhere")
    few = max(gain for place, gain in gains.items() if place[0] >= FEW * place[1])
    remark = f"it matters little: at most {few:.1e} for n >= {FEW} b"
    return Verdict("holds", number) if few > SMALL else Verdict("holds with a remark", number, remark)


def no_dearer(table: Table) -> Verdict:
    """No cost that grows with n: a million steps in at most ten times the seconds of the fewest, plus a second."""
    rows = _complete(table)
    if not rows:
        return not_judged
    few, many = (
        max(row["direct_seconds"] for row in rows if row["steps"] == n)
        for n in (min(rows.column("steps")), max(rows.column("steps")))
    )
    number = f"at most {many:.2f} s at n = {max(rows.column('steps')):,}, {few:.2f} s at {min(rows.column('steps'))}"
    if many <= 10 * few + 1:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "the time grows with the steps")


def gradient_free(table: Table) -> Verdict:
    """Too small to matter: at most one percent, for at least 64 steps for each band."""
    rows = _complete(table)
    if not rows:
        return not_judged
    losses = {(row["steps"], row["bands"]): row["one_parameter"] / row["direct"] - 1 for row in rows}
    few = max(loss for place, loss in losses.items() if place[0] >= FEW * place[1])
    n, b = max(losses, key=lambda place: losses[place])
    number = f"at most {few:.2%} more error for n >= {FEW} b; {losses[n, b]:.2%} at n={n}, b={b}"
    if losses[n, b] <= 0.01:
        return Verdict("holds", number)
    if few <= 0.01:
        return Verdict("holds with a remark", number, "more than one percent with many bands beside the steps")
    return Verdict("does not hold", number, "more than one percent")


def _complete(table: Table) -> Table:
    rows = table.where(part="normalized")
    return rows if len(rows) == len(PAIRS) else Table()


def draw(table: Table) -> Figure:
    figure, (left, right) = plots.panels(2)
    rows = table.where(part="normalized")
    for bands in rows.values("bands"):
        chosen = sorted(rows.where(bands=bands), key=lambda row: row["steps"])
        for axis, high, low in ((left, "plain", "after"), (right, "after", "direct")):
            curve = [(row["steps"], 100 * max(row[high] / row[low] - 1, 1e-12)) for row in chosen]
            axis.loglog(*zip(*curve, strict=True), marker="o", markersize=4, label=f"{bands} bands")
    for axis in (left, right):
        axis.set(xlabel="steps", ylabel="percent less error")
        axis.set_ylim(bottom=1e-7, top=3)
        plain(axis, "x", rows.column("steps"))
        plain(axis, "y", (1e-7, 1))
    left.set_title("By normalizing columns")
    right.set_title("By optimizing as normalized")
    left.legend(frameon=False, fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="beyond",
    title="A million steps, and normalized columns",
    place="Section 3.2, last appendix, and beyond the paper",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "general-million",
            "General banded strategies are optimized for a million steps, ten times the paper's limit, and proved "
            "to be within one percent of the best.",
            "beyond the paper",
            million,
        ),
        Claim(
            "horizon-million",
            "A general banded strategy interpolated from a few Toeplitz optima takes seconds for a million steps, and "
            "is proved to be within one percent of the best as it is.",
            "beyond the paper",
            interpolated,
        ),
        Claim(
            "normalize-improves",
            "Normalizing the columns after optimizing lowers the error.",
            'Appendix "Optimizing column-normalized banded Toeplitz strategies"',
            improves,
        ),
        Claim(
            "normalize-small",
            "With few bands, little is lost by not normalizing the columns.",
            "Section 3.2",
            small_loss,
        ),
        Claim(
            "normalize-direct",
            "Normalizing after optimizing is not the best normalized Toeplitz strategy.",
            'Appendix "Optimizing column-normalized banded Toeplitz strategies"',
            not_optimal,
        ),
        Claim(
            "normalize-cost",
            "Optimizing a Toeplitz strategy as normalized takes no time that grows with the steps.",
            "beyond the paper",
            no_dearer,
        ),
        Claim(
            "normalize-gradient-free",
            "Among normalized strategies too, coefficients 1/i + c lose too little to matter.",
            'Appendix "Optimizing column-normalized banded Toeplitz strategies"',
            gradient_free,
        ),
    ),
)
