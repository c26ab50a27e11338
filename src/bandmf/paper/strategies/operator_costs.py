"""Appendix "Streaming linear operators": what evaluating the error of a pair of operators costs.

Time is measured; operations are counted from the operators' own state-space matrices, and memory from what is
allocated. The Toeplitz loss with its gradient stands beside it: O(n b) time and O(n) memory, says the paper.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
from matplotlib.figure import Figure

from bandmf import plots, strategies, workloads
from bandmf.error.toeplitz import ToeplitzError, mean_weights
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.strategies.timing import least_seconds, streamed_errors
from bandmf.paper.table import Row, Table
from bandmf.plots.ticks import plain
from bandmf.streaming import StreamingOperator

GENERIC, TOEPLITZ = "any pair of operators", "Toeplitz, loss and gradient"
MIDDLE = {GENERIC: (4096, 32), TOEPLITZ: (2**20, 32)}  # (steps, bands) about which each is varied
STEPS = {GENERIC: (1024, 2048, 4096, 8192), TOEPLITZ: tuple(2**k for k in (16, 18, 20, 22))}
BANDS = (8, 16, 32, 64, 128)
MOMENTUM = 0.9  # a workload with two buffers


def points(quick: bool) -> list[Point]:
    found: list[Point] = []
    for kind, (n, b) in MIDDLE.items():
        steps, bands, n = ((32, 64), (2, 4), 64) if quick else (STEPS[kind], BANDS, n)
        pairs = dict.fromkeys([(m, min(b, bands[-1])) for m in steps] + [(n, c) for c in bands])
        found += [{"kind": kind, "steps": m, "bands": c} for m, c in pairs]
    return found


def compute(kind: str, steps: int, bands: int) -> list[Row]:
    strategy = strategies.banded_square_root(steps, bands)
    workload = workloads.momentum(steps, MOMENTUM)
    counted = buffers = None
    if kind == GENERIC:
        counted = _operations(strategy.inverse(), steps) + _operations(workload.operator, steps)
        buffers = strategy.buffers + workload.operator.buffers

    def work() -> None:
        if kind == GENERIC:
            for _ in streamed_errors(strategy, workload):
                pass
        else:
            error = ToeplitzError(strategy.coefficients, workload, False, steps)
            error.gradient(*mean_weights(error), np.zeros(0))

    seconds = least_seconds(work)
    tracemalloc.start()
    try:
        work()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return [
        {
            "kind": kind,
            "steps": steps,
            "bands": bands,
            "buffers": buffers,
            "operations": counted,
            "seconds": seconds,
            "bytes": peak,
        }
    ]


def _operations(operator: StreamingOperator, steps: int) -> int:
    """Multiplications for all rows of length n: the entries other than 0 and 1 of every step's (F, G, H, D)."""
    assert operator.matrices is not None
    found = 0
    for i in range(steps):
        found += sum(int(np.sum((part != 0) & (part != 1))) for part in operator.matrices(i)[1:])
        F = operator.matrices(i).transition
        found += int(np.sum((F != 0) & (F != 1)))
    return found * steps


def exponent(table: Table, kind: str, column: str, along: str) -> float:
    """The slope of log(column) against log(along), through the points about the middle one."""
    n, b = MIDDLE[kind]
    rows = table.where(kind=kind, bands=b) if along == "steps" else table.where(kind=kind, steps=n)
    size = "steps" if along == "steps" else "buffers" if kind == GENERIC else "bands"
    logs = np.log([[row[size], row[column]] for row in rows])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def _complete(table: Table) -> bool:
    return all(
        table.where(kind=kind, steps=n, bands=b)
        for kind, (middle, _) in MIDDLE.items()
        for n, b in [(middle, c) for c in BANDS] + [(m, MIDDLE[kind][1]) for m in STEPS[kind]]
    )


def _verdict(parts: dict[str, tuple[float, int]]) -> Verdict:
    """Exponents against what is claimed, an upper bound.

    A tenth is allowed for what is counted, and a quarter for times: caches bend them.
    """
    number = "exponents: " + ", ".join(f"{name} {value:.2f}" for name, (value, _) in parts.items())
    over = [
        f"{name} above {claimed}"
        for name, (value, claimed) in parts.items()
        if value > claimed + (0.25 if name.startswith("time") else 0.1)
    ]
    return Verdict("does not hold", number, ", ".join(over)) if over else Verdict("holds", number)


def generic_time(table: Table) -> Verdict:
    """O(n^2 (b1 + b2)). Times at few steps are not proportional to the work, which only lowers the exponent."""
    if not _complete(table):
        return not_judged
    return _verdict(
        {
            "operations in n": (exponent(table, GENERIC, "operations", "steps"), 2),
            "operations in the buffers": (exponent(table, GENERIC, "operations", "bands"), 1),
            "time in n": (exponent(table, GENERIC, "seconds", "steps"), 2),
            "time in the buffers": (exponent(table, GENERIC, "seconds", "bands"), 1),
        }
    )


def generic_memory(table: Table) -> Verdict:
    if not _complete(table):
        return not_judged
    parts = {"memory in n": "steps", "memory in the buffers": "bands"}
    return _verdict({name: (exponent(table, GENERIC, "bytes", along), 1) for name, along in parts.items()})


def toeplitz_costs(table: Table) -> Verdict:
    if not _complete(table):
        return not_judged
    return _verdict(
        {
            "time in n": (exponent(table, TOEPLITZ, "seconds", "steps"), 1),
            "time in b": (exponent(table, TOEPLITZ, "seconds", "bands"), 1),
            "memory in n": (exponent(table, TOEPLITZ, "bytes", "steps"), 1),
            "memory in b": (exponent(table, TOEPLITZ, "bytes", "bands"), 0),
        }
    )


def draw(table: Table) -> Figure:
    figure, axes = plots.panels(2)
    for axis, column, label in zip(axes, ("seconds", "bytes"), ("seconds", "peak memory, MB"), strict=True):
        for kind in table.values("kind"):
            rows = table.where(kind=kind)
            bands = MIDDLE[kind][1] if rows.where(bands=MIDDLE[kind][1]) else rows[0]["bands"]
            curve = [(row["steps"], row[column]) for row in rows.where(bands=bands)]
            scale = 1e6 if column == "bytes" else 1
            curve = sorted((n, value / scale) for n, value in curve)
            axis.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=kind)
        axis.set(xscale="log", yscale="log", xlabel="steps", ylabel=label)
        plain(axis, "x", table.column("steps"))
        plain(axis, "y", [row[column] / (1e6 if column == "bytes" else 1) for row in table])
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_title("Cost of an evaluation, 32 bands")
    return figure


EXPERIMENT = Experiment(
    name="operator_costs",
    title="Costs of the streaming evaluations",
    place='Appendix "Generalizations"',
    points=points,
    compute=compute,
    draw=draw,
    alone=True,
    version=2,
    claims=(
        Claim(
            "operators-time",
            "The error of a pair of operators with b1 and b2 buffers takes time of the order n^2 (b1 + b2).",
            'Appendix "Efficiently optimizing parameterized strategies"',
            generic_time,
        ),
        Claim(
            "operators-memory",
            "It takes memory of the order n (b1 + b2).",
            'Appendix "Efficiently optimizing parameterized strategies"',
            generic_memory,
        ),
        Claim(
            "toeplitz-costs",
            "The Toeplitz loss and its gradient take time of the order n b and memory of the order n.",
            "Section 3.2; appendix on gradients",
            toeplitz_costs,
        ),
    ),
)
