"""The table of mechanisms and their three properties, computed.

efficient selection     a strategy for 2^20 steps, the largest number that the table is about, in ten minutes; where
                        it needs n x n matrices, extrapolated from the times at smaller sizes
sub-linear overhead     vectors kept during training grow more slowly than the steps, with 64 bands where bands
                        are to be chosen
optimal somewhere       strictly less RMSE than every other mechanism, in one of our settings or more
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from matplotlib.figure import Figure

from bandmf import optimize, plots, strategies
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.table import Row, Table
from bandmf.participation import FixedEpochs
from bandmf.planning.compare import compare
from bandmf.planning.planner import plan
from bandmf.strategies import Strategy

EPOCHS, EPSILON, DELTA, BATCH = 8, 4.0, 1e-8, 1024
MOST, LONGEST = 2**20, 600.0  # steps, seconds
SEVERAL = (1024, 16384)  # steps at which vectors are counted
DENSE = (256, 512)  # steps at which dense algebra is timed and counted
SETTINGS = ((64, 1, 4), (256, 1, 16), (256, 4, 8), (256, 16, 1), (1024, 1, 8), (4096, 1, 16), (4096, 8, 4))

# As printed; None where the paper leaves the cell empty.
PRINTED: dict[str, tuple[bool, bool, bool | None]] = {
    "Identity (DP-SGD)": (True, True, False),
    "Tree aggregation": (True, True, False),
    "FHU": (True, False, False),
    "LTI": (True, False, None),
    "Stamping": (False, False, False),
    "Multi-epoch MF": (False, False, True),
    "BLT": (True, True, False),
    "Banded square root": (True, True, False),
    "BandMF": (True, True, True),
}
COLUMNS = ("Efficient selection", "Sub-linear overhead", "Optimal in a setting")
# What `bandmf compare` calls them.
COMPARED = {
    "DP-SGD": "Identity (DP-SGD)",
    "Independent noise, unamplified": "Identity (DP-SGD)",
    "FHU (square root)": "FHU",
    "Dense MF": "Multi-epoch MF",
    "Banded square root, unamplified": "Banded square root",
    "BandMF, unamplified": "BandMF",
}


def makers(steps: int, bands: int) -> dict[str, Callable[[], Strategy]]:
    """How each mechanism selects its strategy, as it was published."""
    participation = FixedEpochs(EPOCHS)
    return {
        "Identity (DP-SGD)": lambda: strategies.Identity(steps),
        "Tree aggregation": lambda: strategies.tree_aggregation(steps),
        "FHU": lambda: strategies.square_root(steps),
        "LTI": lambda: optimize.lti(steps, participation=participation).strategy,
        "Stamping": lambda: strategies.stamping(optimize.dense(steps // EPOCHS).strategy, EPOCHS),
        "Multi-epoch MF": lambda: optimize.dense(steps, epochs=EPOCHS, gap=1e-4).strategy,
        "BLT": lambda: optimize.buffered_toeplitz(steps, 4, participation=participation).strategy,
        "Banded square root": lambda: strategies.banded_square_root(steps, bands),
        "BandMF": lambda: optimize.banded_toeplitz(steps, bands).strategy,
    }


def _sizes(mechanism: str, quick: bool) -> dict[str, tuple[int, ...]]:
    """The steps at which its selection is timed and its vectors are counted."""
    if quick:
        return {"selection": (32, 64), "vectors": (32, 64)}
    dense = tuple(n * (EPOCHS if mechanism == "Stamping" else 1) for n in DENSE)
    if mechanism in ("Stamping", "Multi-epoch MF"):
        return {"selection": dense, "vectors": dense}
    planned = {"planned": SEVERAL} if mechanism == "BandMF" else {}
    return {"selection": (MOST,), "vectors": SEVERAL, **planned}


def points(quick: bool) -> list[Point]:
    found: list[Point] = [
        {"what": what, "mechanism": mechanism, "steps": n}
        for mechanism in PRINTED
        for what, steps in _sizes(mechanism, quick).items()
        for n in steps
    ]
    settings = ((16, 1, 4),) if quick else SETTINGS
    return found + [{"what": "compare", "steps": n, "epochs": k, "epsilon": e} for n, k, e in settings]


def compute(what: str, steps: int, mechanism: str = "", epochs: int = 0, epsilon: float = 0) -> list[Row]:
    if what == "compare":
        found = compare(epsilon=epsilon, delta=DELTA, steps=steps, epochs=epochs)
        shared: Row = {"what": what, "steps": steps, "epochs": epochs, "epsilon": epsilon}
        return [shared | {"mechanism": COMPARED.get(row.mechanism, row.mechanism), "ratio": row.ratio} for row in found]
    bands = _planned_bands(steps) if what == "planned" else 64
    start = time.perf_counter()
    strategy = makers(steps, min(bands, steps))[mechanism]()
    seconds = time.perf_counter() - start
    row: Row = {"what": what, "mechanism": mechanism, "steps": steps}
    return [row | ({"seconds": seconds} if what == "selection" else {"vectors": strategy.buffers})]


def _planned_bands(steps: int) -> int:
    """As many as the planner chooses."""
    examples = steps * BATCH // EPOCHS
    cyclic = plan(
        epsilon=EPSILON, delta=DELTA, examples=examples, batch_size=BATCH, steps=steps, sampling="cyclic-poisson"
    )
    return cyclic.bands


def selection_seconds(table: Table, mechanism: str) -> float:
    """Seconds to select a strategy for 2^20 steps: measured, or by the growth between two smaller sizes."""
    rows = table.where(what="selection", mechanism=mechanism)
    if measured := rows.where(steps=MOST):
        return float(measured.one("seconds"))
    growth = _growth(rows, "seconds")
    return float(rows[-1]["seconds"] * (MOST / rows[-1]["steps"]) ** growth)


def _growth(rows: Table, column: str) -> float:
    """The exponent between the first and the last size; nothing at all grows with exponent zero."""
    first, last = rows[0], rows[-1]
    if not first[column] or not last[column]:
        return 0.0
    return math.log(last[column] / first[column]) / math.log(last["steps"] / first["steps"])


def vector_growth(table: Table, mechanism: str, what: str = "vectors") -> float:
    return _growth(table.where(what=what, mechanism=mechanism), "vectors")


def winners(table: Table) -> dict[tuple[int, int, float], list[str]]:
    """The mechanism with the least RMSE, by setting (steps, epochs, epsilon); several if they are equally good."""
    found: dict[tuple[int, int, float], list[str]] = {}
    for row in table.where(what="compare"):
        names = found.setdefault((row["steps"], row["epochs"], row["epsilon"]), [])
        if row["ratio"] <= 1 + 1e-9 and row["mechanism"] not in names:
            names.append(row["mechanism"])
    return found


def wins(table: Table, mechanism: str) -> int:
    """Settings in which it has strictly less RMSE than every other mechanism."""
    return sum(names == [mechanism] for names in winners(table).values())


def properties(table: Table) -> dict[str, tuple[bool, bool, bool]]:
    """The table, computed."""
    return {
        mechanism: (
            selection_seconds(table, mechanism) <= LONGEST,
            vector_growth(table, mechanism) <= 0.9,
            wins(table, mechanism) > 0,
        )
        for mechanism in PRINTED
    }


def _column(place: int) -> Callable[[Table], Verdict]:
    def judge(table: Table) -> Verdict:
        if not table.where(what="selection", steps=MOST):
            return not_judged
        known = {name: cells[place] for name, cells in PRINTED.items() if cells[place] is not None}
        found = properties(table)
        other = [name for name, printed in known.items() if found[name][place] != printed]
        yes = [name for name, cells in found.items() if cells[place]]
        number = f"{len(known) - len(other)} of {len(known)} marks as printed; yes: {', '.join(yes)}"
        if other:
            return Verdict("does not hold", number, f"otherwise than printed: {', '.join(other)}")
        remark = ("", _about_bands(table), _about_ties(table))[place]
        return Verdict("holds with a remark" if remark else "holds", number, remark)

    return judge


def _about_bands(table: Table) -> str:
    growth, rows = vector_growth(table, "BandMF", "planned"), table.where(what="planned")
    if growth <= 0.5:
        return ""
    return (
        f"BandMF's is constant for a given number of bands; the number that the planner chooses at epsilon {EPSILON:g} "
        f"and {EPOCHS} epochs grows as n^{growth:.2f} from {rows[0]['steps']:,} to {rows[-1]['steps']:,} steps"
    )


def _about_ties(table: Table) -> str:
    tied = {place: names for place, names in winners(table).items() if len(names) > 1}
    told = "; ".join(f"{' and '.join(names)} at n={n}, k={k}, epsilon={e:g}" for (n, k, e), names in tied.items())
    return f"strictly optimal, that is; equally good, with one band: {told}" if told else ""


def only_bandmf(table: Table) -> Verdict:
    if not table.where(what="selection", steps=MOST):
        return not_judged
    every = [name for name, cells in properties(table).items() if all(cells)]
    number = f"all three: {', '.join(every) or 'none'}"
    if every == ["BandMF"]:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "BandMF is not the only one, or is not one")


def draw(table: Table) -> Figure:
    figure, (axis,) = plots.panels(1, width=8.6, height=3.8)
    axis.set_axis_off()
    found = properties(table)
    for place, title in enumerate(("Factorization", *COLUMNS)):
        axis.text(place, 0, title, fontweight="bold", ha="left" if place == 0 else "center")
    for row, (mechanism, cells) in enumerate(found.items(), start=1):
        axis.text(0, row, mechanism)
        seconds, growth = selection_seconds(table, mechanism), vector_growth(table, mechanism)
        details = (
            _duration(seconds),
            f"n^{growth:.2f}" if growth else "constant",
            f"{wins(table, mechanism)} settings",
        )
        for place, (cell, detail) in enumerate(zip(cells, details, strict=True)):
            color = plots.COLORS[2] if cell else plots.COLORS[1]
            mark = "\N{HEAVY CHECK MARK}" if cell else "\N{HEAVY BALLOT X}"
            axis.text(place + 0.97, row, mark, color=color, ha="right", fontsize=12)
            axis.text(place + 1.03, row, detail, ha="left", fontsize=8, color="#555555", va="bottom")
    axis.set(xlim=(-0.05, 3.5), ylim=(len(found) + 0.6, -0.6))
    return figure


def _duration(seconds: float) -> str:
    """In the unit that suits."""
    if seconds < 0.01:
        return "under 0.01 s"
    if seconds < 1e5:
        return f"{seconds:.2g} s"
    return f"{seconds / 86400:,.0f} days" if seconds < 3e7 else "over a year"


EXPERIMENT = Experiment(
    version=2,
    name="mechanism_table",
    title="Mechanisms and their properties",
    place='Appendix "Qualitative comparison", its table',
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        *(
            Claim(name, statement, 'Appendix "Qualitative comparison", table', _column(place))
            for place, (name, statement) in enumerate(
                (
                    (
                        "table-selection",
                        "A strategy is efficiently selected by all mechanisms but stamping and multi-epoch MF.",
                    ),
                    (
                        "table-overhead",
                        "The overhead in training is sub-linear for Identity, tree aggregation, BLT, banded square "
                        "root and BandMF, and for no other.",
                    ),
                    (
                        "table-optimal",
                        "In at least one setting BandMF is optimal, in another multi-epoch MF, and no other mechanism "
                        "in any.",
                    ),
                )
            )
        ),
        Claim(
            "table-only-bandmf",
            "BandMF alone has all three properties.",
            'Appendix "Qualitative comparison"',
            only_bandmf,
        ),
    ),
)
