"""For every claim about strategies, rows moved so far that the verdict on it must be another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bandmf.paper.table import Table

Fault = Callable[[Table], Table]


def scaled(column: str, factor: float, /, **wanted: Any) -> Fault:
    """The column of the rows with these values, times a factor."""
    return moved(column, lambda value: value * factor, **wanted)


def moved(column: str, move: Callable[[Any], Any], /, **wanted: Any) -> Fault:
    """The column of the rows with these values, moved; a row without it, or none at all, is an error."""

    def fault(table: Table) -> Table:
        chosen = [all(row.get(name) == value for name, value in wanted.items()) for row in table]
        assert any(chosen), f"no row with {wanted}"
        return Table(
            {**row, column: move(row[column])} if hit else dict(row) for row, hit in zip(table, chosen, strict=True)
        )

    return fault


def _gpu_as_fast(table: Table) -> Table:
    """Rows of a GPU that is as fast as the CPU; those recorded are left out."""
    rows = table.where(family="Toeplitz", machine="CPU")
    return Table([*(row for row in table if row["machine"] != "H200"), *({**row, "machine": "H200"} for row in rows)])


def _slower_gradient(table: Table) -> Table:
    """A gradient that falls behind by a factor of three with 250 times as many steps."""
    rows = [dict(row) for row in table]
    for row in Table(rows).where(family="general banded"):
        row["both_seconds"] *= (row["steps"] / 1024) ** 0.2
    return Table(rows)


def _blt_best(table: Table) -> Table:
    """BLT and the best mechanism of a setting exchanged."""
    rows = [dict(row) for row in table]
    setting = {"what": "compare", "steps": 1024}
    for row in Table(rows).where(**setting):
        if row["ratio"] == 1:
            row["mechanism"] = "BLT"
        elif row["mechanism"] == "BLT":
            row["mechanism"] = "Multi-epoch MF"
    return Table(rows)


FAULTS: dict[str, Fault] = {
    # the example
    "example-digits": scaled("entry", 1.002, row=1, column=1),
    # against the steps
    "explicit-same": scaled("rmse", 1.0002, family="explicit (prior work)", steps=256),
    "root-worse": scaled("rmse", 0.9, family="banded square root", steps=256, bands=4),
    "root-quarter": scaled("rmse", 1.01, family="banded square root", steps=10**7, bands=16),
    "toeplitz-near": scaled("rmse", 1.01, family="Toeplitz, columns normalized", steps=256, bands=64),
    "toeplitz-trend": scaled("rmse", 1.005, family="Toeplitz, columns normalized", steps=16384, bands=8),
    "toeplitz-quarter-percent": scaled("rmse", 0.9998, family="Toeplitz, columns normalized", steps=16384, bands=32),
    # time
    "time-explicit": scaled("both_seconds", 30, family="explicit"),
    "time-banded": scaled("both_seconds", 1000, family="general banded"),
    "time-toeplitz": scaled("both_seconds", 100, family="Toeplitz", machine="CPU"),
    "time-gradient": _slower_gradient,
    "time-gpu": _gpu_as_fast,
    # costs of operators
    "operators-time": scaled("operations", 3, kind="any pair of operators", steps=8192),
    "operators-memory": scaled("bytes", 3, kind="any pair of operators", steps=8192),
    "toeplitz-costs": scaled("bytes", 2, kind="Toeplitz, loss and gradient", bands=128),
    # the cut-off loss
    "cutoff-example": scaled("ratio", 1.001, steps=2**16, cutoff=64),
    "cutoff-square": scaled("ratio", 1.001, steps=2**16, cutoff=4096),
    # one parameter
    "one-parameter": scaled("ratio", 1.01, steps=4**10, bands=256),
    "one-parameter-steps": scaled("ratio", 1.01, steps=4**10, bands=16),
    # the bound
    "bound": scaled("root", 1.5, steps=16 * 1024, bands=1024),
    "bound-inherited": scaled("optimized", 1.3, steps=1024, bands=64),
    # the table of mechanisms
    "table-selection": scaled("seconds", 10**5, what="selection", mechanism="BLT"),
    "table-overhead": scaled("vectors", 16, what="vectors", mechanism="Tree aggregation", steps=16384),
    "table-optimal": _blt_best,
    "table-only-bandmf": _blt_best,
    # memory
    "memory-examples": scaled("bands_that_fit", 0.8, bands=128, machines=64),
    "memory-terabyte": scaled("bytes", 2, machines=1024),
    "memory-accelerator": scaled("bytes", 1.1, machines=32),
    "memory-hundreds": scaled("bytes", 6, bands=100),
    "memory-overhead": scaled("bytes", 1.2, bands=64),
    # momentum
    "momentum-fine": scaled("for_running_sums", 1.06, steps=4096, bands=64),
    "cooldown-alone": scaled("for_running_sums", 1.002, steps=1024, bands=16, momentum=0),
    # beyond the paper
    "general-million": scaled("general_gap", 10, part="general", steps=10**6),
    "horizon-million": scaled("horizon_gap", 10, part="general", steps=10**6),
    "normalize-improves": scaled("after", 1.02, part="normalized", steps=256, bands=4),
    "normalize-small": scaled("plain", 1.002, part="normalized", steps=16384, bands=16),
    "normalize-direct": scaled("direct", 1.002, part="normalized", steps=256, bands=4),
    "normalize-cost": moved("direct_seconds", lambda value: 10 * value + 60, part="normalized", steps=10**6),
    "normalize-gradient-free": scaled("one_parameter", 1.02, part="normalized", steps=16384, bands=16),
}
