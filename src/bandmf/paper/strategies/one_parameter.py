"""Figure "single parameter": Toeplitz strategies with coefficients 1/i + c against the best Toeplitz strategies."""

from __future__ import annotations

from matplotlib.figure import Figure

from bandmf import optimize, plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain

BANDS = (4, 16, 64, 256)
STEPS = tuple(4**k for k in range(2, 11))
MANY = 64  # steps for each band: "n >> b"
EXCELLENT = 0.01


def points(quick: bool) -> list[Point]:
    bands, steps = ((2, 4), (16, 64)) if quick else (BANDS, STEPS)
    return [{"steps": n, "bands": b} for b in bands for n in steps if n >= b]


def compute(steps: int, bands: int) -> list[Row]:
    simple = optimize.inverse_plus_constant(steps, bands, normalize_columns=False)
    best = optimize.banded_toeplitz(steps, bands, normalize_columns=False)
    return [{"steps": steps, "bands": bands, "ratio": simple.rmse / best.rmse}]


def excellent(table: Table) -> Verdict:
    """Many steps: at least 64 for each band. Excellent: at most one percent more error."""
    many = {(row["steps"], row["bands"]): row["ratio"] - 1 for row in table if row["steps"] >= MANY * row["bands"]}
    if {b for _, b in many} != set(BANDS):
        return not_judged
    over = {place: value for place, value in many.items() if value > EXCELLENT}
    number = f"{min(many.values()):.2%} to {max(many.values()):.2%} above the best, for n >= {MANY} b"
    if not over:
        return Verdict("holds", number)
    where = ", ".join(f"{value:.1%} at n={n}, b={b}" for (n, b), value in over.items())
    far = max(value for (n, b), value in many.items() if n >= 16 * MANY * b)
    remark = f"more than one percent: {where}; for n >= {16 * MANY} b at most {far:.2%}"
    if far <= EXCELLENT:
        return Verdict("holds with a remark", number, remark)
    return Verdict("does not hold", number, remark)


def better_with_steps(table: Table) -> Verdict:
    """Particularly when n >> b: with the most steps less is lost than with the fewest, for every number of bands."""
    if set(table.values("bands")) != set(BANDS):
        return not_judged
    ends = {}
    for b in BANDS:
        rows = sorted(table.where(bands=b), key=lambda row: row["steps"])
        ends[b] = rows[0]["ratio"] - 1, rows[-1]["ratio"] - 1
    number = "; ".join(f"b={b}: {few:.2%} falling to {many:.2%}" for b, (few, many) in ends.items())
    wrong = [b for b, (few, many) in ends.items() if not many < few]
    if not wrong:
        return Verdict("holds", number)
    return Verdict("does not hold", number, f"not with {wrong} bands")


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=6.0)
    for bands in table.values("bands"):
        rows = table.where(bands=bands)
        axis.plot(rows.column("steps"), rows.column("ratio"), marker="o", markersize=4, label=f"{bands} bands")
    axis.set(xscale="log", xlabel="steps", ylabel="RMSE over the best Toeplitz strategy's")
    plain(axis, "x", table.column("steps"))
    axis.set_title("Coefficients 1/i + c, with the best c")
    axis.legend(frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="one_parameter",
    title="Near-optimal Toeplitz strategies without gradients",
    place='Appendix "Near-optimal banded Toeplitz strategies without gradients", its figure',
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "one-parameter",
            "Coefficients 1/i + c with the best c are an excellent approximation of the best Toeplitz strategy "
            "when there are many more steps than bands.",
            'Appendix "Near-optimal banded Toeplitz strategies without gradients"',
            excellent,
        ),
        Claim(
            "one-parameter-steps",
            "The approximation by 1/i + c is particularly good with many steps for each band.",
            'Appendix "Near-optimal banded Toeplitz strategies without gradients"',
            better_with_steps,
        ),
    ),
)
