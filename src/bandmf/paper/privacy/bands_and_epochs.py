"""Figure 2a and its sister in the appendix: error against bands and epochs, at epsilon 1 and 8.

The error is that of mean gradients, over DP-SGD with full batches (as many epochs as steps).
"""

from __future__ import annotations

from itertools import pairwise

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bandmf import plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.privacy import grid, mechanisms
from bandmf.paper.table import Row, Table

STEPS = 16384
EPSILONS = (1.0, 8.0)
NEARLY = 1.10  # "nearly the same": within 10 percent


def points(quick: bool) -> list[Point]:
    return grid.by_bands(32 if quick else STEPS)


def compute(steps: int, bands: int) -> list[Row]:
    return grid.banded_rows(steps, bands, grid.powers_of_two(steps), EPSILONS)


def full_size(table: Table) -> bool:
    return table.values("steps") == [STEPS]


def dpsgd(table: Table, epochs: int, epsilon: float) -> float:
    return grid.over_full_batch(table, grid.independent(table, epochs, epsilon), epochs, epsilon)


def unamplified(table: Table, epochs: int, epsilon: float) -> float:
    return grid.over_full_batch(table, grid.unamplified(table, epochs, epsilon), epochs, epsilon)


def amplified(table: Table, epochs: int, epsilon: float) -> float:
    return grid.over_full_batch(table, grid.amplified(table, epochs, epsilon)["rmse"], epochs, epsilon)


def near_full_batch(table: Table, epochs: int, epsilon: float) -> Verdict:
    """ "Nearly the same": within 10 percent; up to 20 percent is a remark."""
    if not full_size(table):
        return not_judged
    ratio = dpsgd(table, epochs, epsilon)
    number = f"DP-SGD with {epochs} epochs: {ratio - 1:.1%} above full batches at epsilon {epsilon:g}"
    if ratio <= NEARLY:
        return Verdict("holds", number)
    enough = next(k for k in table.values("epochs") if dpsgd(table, k, epsilon) <= NEARLY)
    remark = f"more than 10 percent; {enough} epochs are {dpsgd(table, enough, epsilon) - 1:.1%} above"
    return Verdict("holds with a remark" if ratio <= 1.2 else "does not hold", number, remark)


def dpsgd_at_one(table: Table) -> Verdict:
    return near_full_batch(table, 32, 1)


def dpsgd_at_eight(table: Table) -> Verdict:
    return near_full_batch(table, 256, 8)


def degrades_gracefully(table: Table) -> Verdict:
    """At 32 epochs DP-SGD is better than unamplified BandMF, at one epoch worse; amplified is never behind."""
    if not full_size(table):
        return not_judged
    few, many = ((dpsgd(table, k, 1), unamplified(table, k, 1), amplified(table, k, 1)) for k in (1, 32))
    number = "DP-SGD, unamplified, amplified: " + "; ".join(
        f"{a:.2f}, {b:.2f}, {c:.2f} at {name}" for name, (a, b, c) in (("1 epoch", few), ("32 epochs", many))
    )
    right = few[1] < few[0] and many[1] > many[0]
    best = all(
        amplified(table, k, 1) <= min(dpsgd(table, k, 1), unamplified(table, k, 1)) for k in table.values("epochs")
    )
    graceful = few[2] / many[2] < few[1] / many[1] < few[0] / many[0]
    if right and best and graceful:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "the order is another one")


def two_epochs(table: Table) -> Verdict:
    return below(table, 2, 1, 2.0)


def eight_epochs(table: Table) -> Verdict:
    return below(table, 8, 1, 1.18)


def below(table: Table, epochs: int, epsilon: float, limit: float) -> Verdict:
    if not full_size(table):
        return not_judged
    ratio = amplified(table, epochs, epsilon)
    number = f"{ratio:.4f} times full-batch DP-SGD with {epochs} epochs at epsilon {epsilon:g}"
    return Verdict("holds", number) if ratio < limit else Verdict("does not hold", number, f"not below {limit:g}")


def falls_with_epochs(table: Table) -> Verdict:
    """From one power of two to the next: the best error falls, the best number of bands does not rise."""
    if not full_size(table):
        return not_judged
    broken = []
    for epsilon in EPSILONS:
        for few, many in pairwise(table.values("epochs")):
            before, after = (grid.amplified(table, k, epsilon) for k in (few, many))
            falls = amplified(table, many, epsilon) <= amplified(table, few, epsilon)
            if not falls or after["bands"] > before["bands"]:
                broken.append(f"epsilon {epsilon:g}, {few} to {many} epochs")
    number = "best bands with 1, 8 and 64 epochs: " + "; ".join(
        ", ".join(str(grid.amplified(table, k, epsilon)["bands"]) for k in (1, 8, 64)) + f" at epsilon {epsilon:g}"
        for epsilon in EPSILONS
    )
    return Verdict("does not hold", number, "; ".join(broken)) if broken else Verdict("holds", number)


def bands_at_eight(table: Table) -> Verdict:
    """128 bands are best among powers of two."""
    if not full_size(table):
        return not_judged
    best = grid.amplified(table, 8, 8)
    there = table.where(epochs=8, epsilon=8, bands=128).one("rmse")
    number = f"{best['bands']} bands are best at epsilon 8 with 8 epochs"
    if best["bands"] == 128:
        return Verdict("holds", number)
    others = [k for k in table.values("epochs") if grid.amplified(table, k, 8)["bands"] == 128]
    instead = f"; 128 are best with {', '.join(map(str, others))} epochs" if others else ""
    remark = f"128 bands have {there / best['rmse'] - 1:.1%} more RMSE{instead}"
    return Verdict("does not hold", number, remark)


def sixteen_epochs(table: Table) -> Verdict:
    """16 epochs are within a factor of two, and half as many are not."""
    if not full_size(table):
        return not_judged
    half, whole = (amplified(table, k, 8) for k in (8, 16))
    number = f"{half:.3f} times full-batch DP-SGD with 8 epochs, {whole:.3f} with 16, at epsilon 8"
    if whole > 2:
        return Verdict("does not hold", number, "not within a factor of two")
    if half > 2:
        return Verdict("holds", number)
    capped = table.where(epochs=8, epsilon=8, bands=128).one("rmse")
    remark = (
        "8 epochs are enough, with the best number of bands; with 128 bands, which the paper finds best, 8 epochs are "
        f"at {grid.over_full_batch(table, capped, 8, 8):.3f}"
    )
    return Verdict("does not hold", number, remark)


def draw(table: Table) -> Figure:
    figure, axes = plots.panels(2, width=6.0, height=4.8)
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        draw_epsilon(axis, table.where(epsilon=epsilon), epsilon)
    axes[1].legend(
        frameon=False, fontsize=9, title="epochs", bbox_to_anchor=(1.01, 1), loc="upper left", labelspacing=0.3
    )
    return figure


def draw_epsilon(axis: Axes, table: Table, epsilon: float) -> None:
    """One curve for each number of epochs, its lowest point marked."""
    epochs = [k for k in table.values("epochs") if k <= 1024]
    for place, k in enumerate(epochs):
        curve = table.where(epochs=k)
        heights = [grid.over_full_batch(table, rmse, k, epsilon) for rmse in curve.column("rmse")]
        color = colormaps["viridis"](0.95 * place / max(1, len(epochs) - 1))
        axis.plot(curve.column("bands"), heights, color=color, label=str(k), linewidth=1.6)
        lowest = heights.index(min(heights))
        axis.plot(curve.column("bands")[lowest], heights[lowest], "o", color=color, markersize=5)
    axis.axhline(1, color="#777777", linestyle="--", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="bands", ylabel="RMSE over full-batch DP-SGD's")
    axis.set_title(f"epsilon {epsilon:g} (dots: the best number of bands)")
    every_other = table.values("bands")[::2]
    mechanisms.plain_ticks(axis, every_other, [1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 30, 50])


EXPERIMENT = Experiment(
    name="bands_and_epochs",
    note=(
        "n = 16,384 steps, delta = 1e-8. Ratios are of the error of mean gradients, so that batches of "
        "different size compare; bands are powers of two. Beyond 4,096 bands columns are not normalized, "
        "which adds up to 1.5 percent at the right ends of the curves for one and two epochs."
    ),
    title="Error against bands and epochs",
    place="Figure 2a and Appendix F.3",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "dpsgd-32-epochs-near-full-batch",
            "At epsilon 1, DP-SGD with 32 epochs has nearly the error of DP-SGD with full batches.",
            "Section 4.2",
            dpsgd_at_one,
        ),
        Claim(
            "amplified-best-of-both",
            "At epsilon 1, unamplified BandMF is behind DP-SGD with many epochs and ahead with few, because its "
            "error grows more slowly as epochs get fewer; that of amplified BandMF grows most slowly of all and "
            "is never behind either.",
            "Section 4.2",
            degrades_gracefully,
        ),
        Claim(
            "amplified-2-epochs-below-2x",
            "At epsilon 1, amplified BandMF with two epochs has less than twice the error of full-batch DP-SGD.",
            "Section 4.2",
            two_epochs,
        ),
        Claim(
            "amplified-8-epochs-below-18-percent",
            "At epsilon 1, with eight epochs it has less than 18 percent more.",
            "Section 4.2",
            eight_epochs,
        ),
        Claim(
            "error-and-bands-fall-with-epochs",
            "The best error, and the number of bands that reaches it, fall as epochs grow.",
            "Appendix F.3",
            falls_with_epochs,
        ),
        Claim(
            "epsilon-8-best-bands-128",
            "At epsilon 8 with eight epochs, 128 bands are best.",
            "Appendix F.3",
            bands_at_eight,
        ),
        Claim(
            "epsilon-8-needs-16-epochs",
            "At epsilon 8, amplified BandMF needs 16 epochs to come within a factor of two of full-batch DP-SGD.",
            "Appendix F.3",
            sixteen_epochs,
        ),
        Claim(
            "epsilon-8-dpsgd-256-epochs",
            "At epsilon 8, DP-SGD needs 256 epochs to come near its error with full batches.",
            "Appendix F.3",
            dpsgd_at_eight,
        ),
    ),
)
