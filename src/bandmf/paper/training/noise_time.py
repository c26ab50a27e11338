"""Figure 3a: time of correlated noise against bands, and of clipping example by example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from bandmf import plots
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.paper.training import machines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JUDGED = "BERT-base"
MOST_BANDS = 128
CORES = 32  # of the paper's machine; a batch has at least one example for each


def points(quick: bool) -> list[Point]:
    """BERT-base where there is a GPU, a scaled-down encoder elsewhere."""
    if not machines.has_torch():
        return []
    from bandmf.paper.training import noise_time_runs

    return noise_time_runs.points_of("tiny" if quick else JUDGED if machines.has_gpu() else "small")


def compute(setting: str, part: str, amount: int) -> list[Row]:
    from bandmf.paper.training import noise_time_runs

    return noise_time_runs.compute(setting, part, amount)


def noise(rows: Table) -> dict[int, float]:
    """Milliseconds of noise, by bands."""
    found = rows.where(part="noise")
    return dict(zip(found.column("bands"), found.column("milliseconds"), strict=True))


def clipping(rows: Table) -> dict[int, float]:
    """Milliseconds of clipping, by batch size."""
    found = rows.where(part="clipping")
    return dict(zip(found.column("batch"), found.column("milliseconds"), strict=True))


def measured(table: Table) -> tuple[str, dict[int, float], dict[int, float]] | None:
    """The machine, and milliseconds of noise and of clipping that the paper speaks of: at most 128 bands, a batch
    for 32 cores; None if they are not in the table.
    """
    rows = machines.rows_of(table, JUDGED)
    times = {bands: time for bands, time in noise(rows).items() if bands <= MOST_BANDS}
    costs = {batch: cost for batch, cost in clipping(rows).items() if batch >= CORES}
    return (str(rows[0]["machine"]), times, costs) if MOST_BANDS in times and len(costs) > 1 else None


def never_the_bottleneck(table: Table) -> Verdict:
    """With no number of bands up to 128 does noise take longer than clipping, at any batch size."""
    found = measured(table)
    if found is None:
        return not_judged
    machine, times, costs = found
    slowest = max(times, key=times.__getitem__)
    number = (
        f"{machine}: noise {min(times.values()):.2f} to {times[slowest]:.2f} ms (at {slowest} bands; "
        f"{times[MOST_BANDS]:.2f} at {MOST_BANDS}), clipping {costs[min(costs)]:.3g} ms (batch {min(costs)}) to "
        f"{costs[max(costs)]:.4g} ms (batch {max(costs)})"
    )
    slower = [batch for batch, cost in costs.items() if cost <= times[slowest]]
    if slower:
        return Verdict("does not hold", number, f"noise takes longer than clipping up to batch {max(slower)}; {SETUP}")
    return Verdict("holds with a remark", number, SETUP + on_cpu(table))


def orders_of_magnitude(table: Table) -> Verdict:
    """Over the noise of 128 bands, clipping takes 10 to 1000 times as long, and for the largest batch nearer to 1000
    than to 100, as orders of magnitude are counted (316 times).
    """
    found = measured(table)
    if found is None:
        return not_judged
    _, times, costs = found
    ends = min(costs), max(costs)
    number = "clipping over noise: " + "; ".join(
        f"{bands} bands, " + " to ".join(f"{costs[batch] / times[bands]:.3g} times (batch {batch})" for batch in ends)
        for bands in (MOST_BANDS, 16)
        if bands in times
    )
    ratios = [cost / times[MOST_BANDS] for cost in costs.values()]
    if min(ratios) >= 10 and 10**2.5 <= max(ratios) <= 1000:
        return Verdict("holds with a remark", number, SETUP + on_cpu(table))
    why = f"not from 10 to 316 or more and at most 1000 times, over batches of {ends[0]} to {ends[1]}"
    return Verdict("does not hold", number, f"{why}; {SETUP}")


SETUP = (
    "one GPU instead of 32 TPU cores, which draws all of the noise and clips the whole batch, where each of the 32 "
    "would do a 32nd part of both; sentences of 128 words, clipped by book-keeping"
)


def on_cpu(table: Table) -> str:
    """What the CPU of this run gives, in words."""
    rows = table.where(setting="small")
    times, costs = noise(rows), clipping(rows)
    if MOST_BANDS not in times or not costs:
        return ""
    ratios = [costs[batch] / times[MOST_BANDS] for batch in (min(costs), max(costs))]
    return (
        f"; on {rows[0]['machine']}, {rows[0]['parameters']:,} parameters, {MOST_BANDS} bands: {ratios[0]:.2g} times "
        f"(batch {min(costs)}) to {ratios[1]:.2g} times (batch {max(costs)})"
    )


def draw(table: Table) -> Figure:
    """A panel for each machine and model: noise rises with the bands, each batch size is a level line."""
    kinds = [setting for setting in (JUDGED, "small", "tiny") if table.where(setting=setting)]
    figure, axes = plots.panels(max(len(kinds), 1))
    for axis, setting in zip(axes, kinds, strict=False):
        _draw(axis, machines.rows_of(table, setting))
    return figure


def _draw(axis: Axes, rows: Table) -> None:
    times, costs = noise(rows), clipping(rows)
    for batch, cost in costs.items():
        axis.axhline(cost, color=plots.COLORS[1], linewidth=1)
        axis.annotate(
            f"batch {batch}",
            (1.01, cost),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=plots.COLORS[1],
        )
    axis.plot(list(times), list(times.values()), marker="o", markersize=4, color=plots.COLORS[0])
    axis.set(xscale="log", yscale="log", xlabel="bands", ylabel="milliseconds per step")
    axis.set_xticks(list(times), [str(bands) for bands in times])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:,.10g}")
    axis.yaxis.set_minor_formatter("")
    axis.legend(
        handles=[
            axis.plot([], [], color=plots.COLORS[1], linewidth=1, label="clipping")[0],
            axis.plot([], [], color=plots.COLORS[0], marker="o", markersize=4, label="correlated noise")[0],
        ],
        frameon=False,
        fontsize=9,
        ncols=2,
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    first = rows[0]
    recorded = f", recorded {first['date']}" if first.get("date") else ""
    axis.set_title(f"{first['parameters']:,} parameters, {first['machine']}{recorded}", pad=24, fontsize=11)


EXPERIMENT = Experiment(
    name="noise_time",
    note=(
        "Times of noise are means over whole look-ahead periods: one pass over the history serves "
        "several steps, at the cost of more memory, which is why many bands need not take longer than "
        "few."
    ),
    title="Time of noise and of clipping",
    place="Figure 3a",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "noise-time-bottleneck",
            "With up to 128 bands, drawing correlated noise takes less time than clipping each example's gradient.",
            'Section "Optimal number of bands", finding on Figure 3a',
            never_the_bottleneck,
        ),
        Claim(
            "noise-time-orders",
            "Clipping takes one to three orders of magnitude longer than noise, depending on the batch size.",
            'Section "Optimal number of bands", finding on Figure 3a',
            orders_of_magnitude,
        ),
    ),
    alone=True,
    recorded="noise_time.csv",
)
