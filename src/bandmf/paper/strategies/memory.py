"""Section 3.3: how much memory noise takes, and how many bands fit, by the planner's own account of memory.

b bands need b - 1 vectors of history. Looking ahead, which makes noise faster, takes up to 16 more where there is
room; it is left out of the verdicts, since the paper does not do it, and shown beside.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from bandmf import plots, strategies, workloads
from bandmf.noise.schedule import BYTES_PER_NUMBER
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict
from bandmf.paper.table import Row, Table
from bandmf.planning.setup import Setup
from bandmf.plots.ticks import plain

GB = 10**9
ROUGHLY = 0.1  # how the paper's "roughly" and round numbers are read
# what is trained, parameters, machines, bands
EXAMPLES = (
    ("4M, one GPU", 4 * 10**6, 1, 64),
    ("128M, 64 machines", 128 * 10**6, 64, 128),
    ("LoRA with 4M, 64 machines", 4 * 10**6, 64, 4096),
)
AMOUNTS = (
    ("1B, one machine", 10**9, 1, 256),
    ("1B, 1024 machines", 10**9, 1024, 256),
    ("BertBase, 32 accelerators", 10**8, 32, 128),
    ("100M, one machine", 10**8, 1, 100),
)


def points(quick: bool) -> list[Point]:
    """Arithmetic alone: the quick run is the full one."""
    return [
        {"case": case, "parameters": parameters, "machines": machines, "bands": bands, "limit": limit}
        for cases, limit in ((EXAMPLES, GB), (AMOUNTS, None))
        for case, parameters, machines, bands in cases
    ]


def compute(case: str, parameters: int, machines: int, bands: int, limit: int | None) -> list[Row]:
    """How many bands fit within `limit` bytes on each machine; what `bands` bands take there."""
    steps = 10**5

    def setup(memory: float | None) -> Setup:
        return Setup(
            delta=1e-8,
            batch_size=1024,
            examples=10**9,
            adjacency="add-remove",
            workload=workloads.prefix(steps),
            parameters=parameters,
            memory_limit=memory,
            devices=machines,
        )

    strategy = strategies.BandedToeplitz(1 / np.sqrt(np.arange(1, bands + 1)), steps)
    history = BYTES_PER_NUMBER * parameters * strategy.buffers / machines
    held = None if limit is None else setup(limit).max_vectors
    return [
        {
            "case": case,
            "parameters": parameters,
            "machines": machines,
            "bands": bands,
            "limit": limit,
            "bands_that_fit": None if held is None else held + 1,
            "bytes": setup(history).noise_memory(strategy),  # so little that there is no room to look ahead
            "bytes_looking_ahead": setup(None).noise_memory(strategy),
        }
    ]


def examples(table: Table) -> Verdict:
    """Roughly so many: within a tenth."""
    rows = table.where(limit=GB)
    number = ", ".join(f"{row['bands_that_fit']} bands ({row['case']})" for row in rows)
    if all(abs(row["bands_that_fit"] / row["bands"] - 1) <= ROUGHLY for row in rows):
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than a tenth off 64, 128 and 4096")


def terabyte(table: Table) -> Verdict:
    one, many = (table.where(case=case).one("bytes") for case in ("1B, one machine", "1B, 1024 machines"))
    number = f"{one / 1e12:.3f} TB on one machine, {many / 1e9:.3f} GB on each of 1024"
    if abs(one / 1e12 - 1) <= ROUGHLY and abs(many / 1e9 - 1) <= ROUGHLY:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than a tenth off 1 TB and 1 GB")


def accelerator(table: Table) -> Verdict:
    """The printed digits."""
    row = table.where(case="BertBase, 32 accelerators")[0]
    number = f"{row['bytes'] / 1e9:.2f} GB on each"
    if round(row["bytes"] / 1e9, 1) == 1.6:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "printed are 1.6 GB")


def hundreds(table: Table) -> Verdict:
    """Hundreds: at least 200 GB where the paper's range begins."""
    row = table.where(case="100M, one machine")[0]
    number = f"{row['bytes'] / 1e9:.0f} GB at 10^8 parameters and 100 bands"
    if row["bytes"] >= 200e9:
        return Verdict("holds", number)
    larger = table.where(case="1B, one machine").one("bytes")
    remark = f"where the stated range begins it is tens; {larger / 1e9:,.0f} GB at 10^9 parameters and 256 bands"
    if larger >= 200e9:
        return Verdict("holds with a remark", number, remark)
    return Verdict("does not hold", number, remark)


def overhead(table: Table) -> Verdict:
    """b times: the vectors kept for b bands are b, within a tenth; independent noise keeps none but its own."""
    kept = {row["bands"]: _vectors(row) for row in table}
    number = ", ".join(f"{vectors:g} vectors for {bands} bands" for bands, vectors in sorted(kept.items()))
    if all(abs(vectors / bands - 1) <= ROUGHLY for bands, vectors in kept.items()):
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than a tenth off")


def _vectors(row: Row) -> float:
    return row["bytes"] * row["machines"] / (BYTES_PER_NUMBER * row["parameters"])


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=8.4, height=3.6)
    rows = list(reversed(table))
    for color, column, label in zip(
        plots.COLORS, ("bytes", "bytes_looking_ahead"), ("history", "history and look-ahead"), strict=False
    ):
        axis.plot([row[column] / 1e9 for row in rows], range(len(rows)), "o", color=color, label=label)
    axis.axvline(1, color="#777777", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [f"{row['case']}: {row['bands']} bands" for row in rows])
    axis.set(xscale="log", xlabel="GB on each machine", title="Memory of the noise")
    plain(axis, "x", (1, 1000))
    axis.legend(frameon=False)
    return figure


EXPERIMENT = Experiment(
    name="memory",
    title="Memory of the noise",
    place="Section 3.3, its examples",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "memory-examples",
            "With 1 GB on each machine, 4 million parameters on one GPU allow roughly 64 bands, 128 million on 64 "
            "machines 128, and 4 million on 64 machines 4096.",
            "Section 3.3, three examples",
            examples,
        ),
        Claim(
            "memory-terabyte",
            "256 bands for a billion parameters take one terabyte, and one gigabyte on each of 1024 machines.",
            "Section 3.3",
            terabyte,
        ),
        Claim(
            "memory-accelerator",
            "128 bands for a model of 100 million parameters take 1.6 GB on each of 32 accelerators.",
            "Section 4.2",
            accelerator,
        ),
        Claim(
            "memory-hundreds",
            "From 100 million parameters and 100 bands on, noise can take hundreds of gigabytes.",
            "Section 2.1, remark",
            hundreds,
        ),
        Claim(
            "memory-overhead",
            "The noise of b bands keeps about b vectors of the model's size.",
            "Section 2.1, remark",
            overhead,
        ),
    ),
)
