"""Appendix "Theoretical guarantees": the bound on the banded square root, and who inherits it.

The appendix states it of the Frobenius norm, where a factor 1 / sqrt(n) is missing: it is a bound on the RMSE.
"""

from __future__ import annotations

import math
from itertools import pairwise

from matplotlib.figure import Figure

from bandmf import optimize, plots, strategies
from bandmf.error import rmse
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain

BANDS = (2, 4, 16, 64, 256, 1024)
SHARES = (1, 4, 16, 256, 4096, 2**20)  # steps for each band
FULL = tuple(4**k for k in range(2, 10))  # as many bands as steps


def points(quick: bool) -> list[Point]:
    if quick:
        return [{"steps": n, "bands": b} for b in (2, 4) for n in (4, 64)]
    pairs = {(b * share, b) for b in BANDS for share in SHARES} | {(n, n) for n in FULL}
    return [{"steps": n, "bands": b} for n, b in sorted(pairs)]


def compute(steps: int, bands: int) -> list[Row]:
    root = rmse(strategies.banded_square_root(steps, bands))
    row: Row = {"steps": steps, "bands": bands, "root": root, "optimized": None}
    if bands <= BANDS[-1]:
        row["optimized"] = optimize.banded_toeplitz(steps, bands, normalize_columns=False).rmse
    return [row]


def _constant(row: Row) -> float:
    """RMSE of the square root over sqrt(n log b / b)."""
    return row["root"] / math.sqrt(row["steps"] * math.log(row["bands"]) / row["bands"])


def bounded(table: Table) -> Verdict:
    """O(...): the constant must not grow without end, neither with the steps nor with the bands.

    Two ways to grow: with at least 16 steps for each band, and with as many bands as steps.
    """
    full = Table(row for row in table if row["steps"] == row["bands"])
    wide = {(r["steps"] // r["bands"], r["bands"]): _constant(r) for r in table if r["steps"] >= 16 * r["bands"]}
    if len(full) < len(FULL):
        return not_judged
    number = f"RMSE / sqrt(n log b / b) at most {max(wide.values()):.2f} for n >= 16 b, falling with n and b"
    along_bands = [(wide[s, b], wide[s, c]) for s in SHARES if s >= 16 for b, c in pairwise(BANDS)]
    along_steps = [(wide[s, b], wide[t, b]) for b in BANDS for s, t in pairwise(SHARES) if s >= 16]
    if any(more > less for less, more in along_bands + along_steps):
        return Verdict("does not hold", number.split(",")[0], "it grows with the bands or the steps")
    least = min(full, key=_constant)
    before, last = sorted(full, key=lambda row: row["steps"])[-2:]
    if _constant(last) <= _constant(before):
        return Verdict("holds", number)
    remark = (
        f"with as many bands as steps it keeps growing, from {_constant(least):.2f} at n={least['steps']} to "
        f"{_constant(last):.2f} at n={last['steps']}: there the RMSE is {last['root'] / _logarithm(last):.2f} "
        f"log(n) / pi, at n={before['steps']} {before['root'] / _logarithm(before):.2f}; the bound needs a term of "
        "the order log b beside the one printed"
    )
    return Verdict("holds with a remark", number, remark)


def _logarithm(row: Row) -> float:
    return math.log(row["steps"]) / math.pi


def never_worse(table: Table) -> Verdict:
    rows = Table(row for row in table if row["optimized"] is not None)
    if len(rows) < len(BANDS) * len(SHARES):
        return not_judged
    ratios = [row["optimized"] / row["root"] for row in rows]
    number = f"{min(ratios):.3f} to {max(ratios):.3f} times the square root's, in {len(rows)} settings"
    if max(ratios) <= 1 + 1e-12:
        return Verdict("holds", number)
    worst = rows[ratios.index(max(ratios))]
    return Verdict("does not hold", number, f"worse at n={worst['steps']}, b={worst['bands']}")


def draw(table: Table) -> Figure:
    figure, (left, right) = plots.panels(2)
    for bands in [b for b in BANDS if table.where(bands=b)]:
        rows = table.where(bands=bands)
        curve = [(row["steps"] / row["bands"], _constant(row)) for row in rows]
        left.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=f"{bands} bands")
    left.set(xscale="log", xlabel="steps for each band", ylabel="RMSE / sqrt(n log b / b)")
    plain(left, "x", [row["steps"] / row["bands"] for row in table])
    full = sorted((row["steps"], _constant(row)) for row in table if row["steps"] == row["bands"])
    if full:
        right.plot(*zip(*full, strict=True), marker="o", markersize=4)
        right.set_xscale("log")
        plain(right, "x", [n for n, _ in full])
    right.set(xlabel="steps, and as many bands")
    for axis in (left, right):
        axis.set_ylim(0, 1.6)
    left.legend(frameon=False, ncols=2)
    left.set_title("The banded square root over its bound")
    right.set_title("As many bands as steps")
    return figure


EXPERIMENT = Experiment(
    name="bound",
    title="The theoretical bound",
    place='Appendix "Theoretical guarantees"',
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "bound",
            "The RMSE of the banded square root is of the order sqrt(n log b / b).",
            'Appendix "Theoretical guarantees", restated proposition',
            bounded,
        ),
        Claim(
            "bound-inherited",
            "An optimized Toeplitz strategy is never worse than the banded square root, so it inherits the bound.",
            'Appendix "Theoretical guarantees", second proposition',
            never_worse,
        ),
    ),
)
