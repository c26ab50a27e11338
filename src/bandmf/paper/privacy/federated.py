"""Appendix H: strategies for a minimum separation that is not known in advance, n = 2000, k = 5.

No amplification and hence no privacy accounting: RMSE includes the sensitivity, not the noise multiplier.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bandmf import optimize, plots, rmse
from bandmf.paper.experiment import Claim, Experiment, Point, Verdict, not_judged
from bandmf.paper.privacy import mechanisms
from bandmf.paper.table import Row, Table
from bandmf.participation import MinSeparation
from bandmf.strategies import Strategy

STEPS, PARTICIPATIONS, SMALLEST, LARGEST = 2000, 5, 200, 400
PLAIN, HEURISTIC, AVERAGED = "BandToep", "BandToep + heuristic", "BandToep, averaged objective"
BUFFERS = (2, 3, 4, 5)


def blt(buffers: int, separation: int) -> str:
    """The name of the BLT with so many buffers, made for a separation."""
    return f"BLT({buffers}) for {separation}"


def points(quick: bool) -> list[Point]:
    scale = 10 if quick else 1
    sizes: Point = {"steps": STEPS // scale, "smallest": SMALLEST // scale, "largest": LARGEST // scale}
    banded: list[Point] = [{"strategy": name, **sizes} for name in (PLAIN, HEURISTIC, AVERAGED)]
    made_for = (SMALLEST // scale, (SMALLEST + LARGEST) // 2 // scale, LARGEST // scale)
    buffered: list[Point] = [
        {"strategy": blt(buffers, separation), "buffers": buffers, "made_for": separation, **sizes}
        for buffers in BUFFERS
        for separation in made_for
    ]
    return banded + buffered


def compute(strategy: str, steps: int, smallest: int, largest: int, buffers: int = 0, made_for: int = 0) -> list[Row]:
    made = make(strategy, steps, smallest, largest, buffers, made_for)
    coefficients = made.columns(0, 1)[0][:largest]
    kind: Row = {"strategy": strategy, "buffers": buffers or None, "made_for": made_for or None}
    rows: list[Row] = [
        {**kind, "separation": separation, "rmse": rmse(made, participation=MinSeparation(PARTICIPATIONS, separation))}
        for separation in range(smallest // 2, 2 * largest + 1, max(1, smallest // 20))
    ]
    for lag, value in enumerate(coefficients):
        rows.append({**kind, "lag": lag, "coefficient": float(value / coefficients[0])})
    return rows


def make(strategy: str, steps: int, smallest: int, largest: int, buffers: int, made_for: int) -> Strategy:
    if buffers:
        participation = MinSeparation(PARTICIPATIONS, made_for)
        return optimize.buffered_toeplitz(steps, buffers, participation=participation).strategy
    if strategy == HEURISTIC:
        return optimize.robust_banded_toeplitz(steps, smallest, largest, PARTICIPATIONS).strategy
    if strategy == AVERAGED:
        separations = range(smallest, largest + 1)
        return optimize.averaged_banded_toeplitz(steps, separations, PARTICIPATIONS).strategy
    return optimize.banded_toeplitz(steps, largest, normalize_columns=False).strategy


def full_size(table: Table) -> bool:
    return LARGEST in table.values("made_for")


def curve(table: Table, strategy: str) -> dict[int, float]:
    """RMSE by separation."""
    rows = [row for row in table.where(strategy=strategy) if row["separation"] is not None]
    return dict(zip(Table(rows).column("separation"), Table(rows).column("rmse"), strict=True))


def spans(separations: list[int], step: int = 10) -> str:
    """Neighbors joined: 100 to 150, 300."""
    parts: list[list[int]] = []
    for separation in separations:
        if parts and separation - parts[-1][-1] == step:
            parts[-1].append(separation)
        else:
            parts.append([separation])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def within(separation: int) -> bool:
    return SMALLEST <= separation <= LARGEST


def exceptions(table: Table, rival: str) -> list[int]:
    """Separations at which the heuristic is not below a BLT."""
    ours, theirs = curve(table, HEURISTIC), curve(table, rival)
    return [separation for separation in ours if ours[separation] >= theirs[separation]]


def below_blt(table: Table) -> Verdict:
    """Below the BLT made for 400 at all separations from 100 to 800; at those it is made for: a remark."""
    if not full_size(table):
        return not_judged
    main = [blt(buffers, LARGEST) for buffers in BUFFERS]
    behind = {rival: exceptions(table, rival) for rival in main}
    ours, theirs = curve(table, HEURISTIC), curve(table, main[-1])
    number = f"below {main[-1]} by " + ", ".join(f"{1 - ours[s] / theirs[s]:.1%} at {s}" for s in (200, 300, 400))
    inside = {rival: [s for s in found if within(s)] for rival, found in behind.items()}
    if any(inside.values()):
        where = "; ".join(f"{rival}: {spans(found)}" for rival, found in inside.items() if found)
        return Verdict("does not hold", number, f"not below {where}")
    others = [blt(b, made_for) for b in BUFFERS for made_for in (SMALLEST, (SMALLEST + LARGEST) // 2)]
    remarks = [f"outside 200 to 400 the BLT is better at {spans(behind[main[-1]])}"] if behind[main[-1]] else []
    better: dict[str, list[str]] = {}
    for rival in others:
        if found := [s for s in exceptions(table, rival) if within(s)]:
            better.setdefault(spans(found), []).append(rival)
    remarks += [f"at {where} better are {', '.join(rivals)}" for where, rivals in better.items()]
    return Verdict("holds with a remark", number, "; ".join(remarks)) if remarks else Verdict("holds", number)


def loses_near_largest(table: Table) -> Verdict:
    """Above the plain strategy at 400, and below it at 300 and 200."""
    if not full_size(table):
        return not_judged
    ours, plain = curve(table, HEURISTIC), curve(table, PLAIN)
    behind = [s for s in ours if within(s) and ours[s] > plain[s]]
    number = (
        f"{ours[400] / plain[400] - 1:.1%} above the plain strategy at 400, "
        f"{1 - ours[300] / plain[300]:.1%} below at 300; behind at {spans(behind)}"
    )
    if LARGEST in behind and min(behind) > (SMALLEST + LARGEST) // 2:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "the order is another one")


def blt_when_wrong(table: Table) -> Verdict:
    """The plain strategy is best at 400; at half and at twice that, and beyond, a BLT made for 400 is better."""
    if not full_size(table):
        return not_judged
    plain = curve(table, PLAIN)
    curves = [curve(table, blt(buffers, LARGEST)) for buffers in BUFFERS]
    theirs = {s: min(each[s] for each in curves) for s in plain}
    rest = [name for name in dict.fromkeys(table.column("strategy")) if name != PLAIN]
    best = plain[LARGEST] < min(curve(table, name)[LARGEST] for name in rest)
    behind = [s for s in plain if theirs[s] < plain[s]]
    number = (
        f"at 400 BLT is {theirs[400] / plain[400] - 1:.1%} above the plain strategy, at 200 "
        f"{1 - theirs[200] / plain[200]:.1%} and at 800 {1 - theirs[800] / plain[800]:.1%} below"
    )
    far = [s for s in plain if 2 * s < LARGEST or s > 2 * LARGEST - 1]
    if best and all(s in behind for s in far):
        near = [s for s in behind if s not in far]
        return (
            Verdict("holds with a remark", number, f"a BLT is better at {spans(near)}, too")
            if near
            else Verdict("holds", number)
        )
    return Verdict("does not hold", number, "BLT is not better where the separation is wrong by 2x")


def blt_decays(table: Table) -> Verdict:
    """From 200 steps on the BLT's coefficients, over the first, fall by a larger factor than the plain ones."""
    if not full_size(table):
        return not_judged
    ends = {}
    for name in (PLAIN, HEURISTIC, blt(BUFFERS[-1], LARGEST)):
        first, last = (table.where(strategy=name, lag=lag).one("coefficient") for lag in (200, 399 - 1))
        ends[name] = last / first
    plain, faded, buffered = ends.values()
    number = f"from lag 200 to 398 the plain coefficients fall to {plain:.2f}, BLT's to {buffered:.2f}"
    number += f", the heuristic's to {faded:.3f} of their value"
    return Verdict("holds", number) if buffered < plain else Verdict("does not hold", number, "BLT's fall less there")


def small_differences(table: Table) -> Verdict:
    """Between 200 and 400 the three are within 10 percent of each other."""
    if not full_size(table):
        return not_judged
    curves = [curve(table, name) for name in (PLAIN, HEURISTIC, blt(BUFFERS[-1], LARGEST))]
    spread = {s: max(c[s] for c in curves) / min(c[s] for c in curves) - 1 for s in curves[0] if within(s)}
    worst = max(spread, key=spread.__getitem__)
    number = f"at most {spread[worst]:.1%} apart, at {worst}"
    if spread[worst] <= 0.10:
        return Verdict("holds", number)
    return Verdict("does not hold", number, "more than 10 percent")


def draw(table: Table) -> Figure:
    figure, (left, right) = plots.panels(2, width=6.2, height=4.4)
    largest = max(table.values("made_for"))
    buffered = blt(BUFFERS[-1], largest)
    colors = {buffered: plots.color("BLT"), PLAIN: plots.color("BandMF"), HEURISTIC: plots.COLORS[2]}
    for name, color in colors.items():
        rows = Table(row for row in table.where(strategy=name) if row["lag"] is not None)
        left.plot([lag + 1 for lag in rows.column("lag")], rows.column("coefficient"), color=color, label=name)
    left.set(xscale="log", yscale="log", xlabel="index", ylabel="coefficient, over the first", title="Coefficients")
    decades = [place for place in (1, 10, 100) if place < largest]
    mechanisms.plain_ticks(left, [*decades, largest], [0.0001, 0.001, 0.01, 0.1, 1])
    left.legend(frameon=False, fontsize=9, loc="lower left")
    draw_ratios(right, table, colors | {AVERAGED: plots.COLORS[3]}, buffered)
    return figure


def draw_ratios(axis: Axes, table: Table, colors: dict[str, str], reference: str) -> None:
    """RMSE over that of the BLT: the curves themselves differ too little to be told apart."""
    base = curve(table, reference)
    for name, color in colors.items():
        values = curve(table, name)
        axis.plot(list(values), [values[s] / base[s] for s in values], color=color, label=name)
    low, high = min(table.values("made_for")), max(table.values("made_for"))
    axis.axvspan(low, high, color="#999999", alpha=0.12, linewidth=0)
    axis.set(xlabel="minimum separation (shaded: made for)", ylabel=f"RMSE over that of {reference}")
    axis.set_title(f"{high * STEPS // LARGEST:,} steps, at most {PARTICIPATIONS} participations")
    axis.legend(frameon=False, fontsize=9, bbox_to_anchor=(1.01, 1), loc="upper left")


EXPERIMENT = Experiment(
    name="federated",
    note=(
        "n = 2,000 steps, at most 5 participations. BandToep is a banded Toeplitz strategy with 400 "
        "bands, BLT(5) a BLT with five buffers, each made for the separation named."
    ),
    title="When the minimum separation is not known",
    place="Appendix H",
    points=points,
    compute=compute,
    draw=draw,
    claims=(
        Claim(
            "heuristic-below-blt",
            "The fading heuristic has less error than BLT at all separations.",
            "Appendix H",
            below_blt,
        ),
        Claim(
            "heuristic-loses-near-400",
            "It has somewhat more error than the plain banded strategy when the separation is close to 400.",
            "Appendix H",
            loses_near_largest,
        ),
        Claim(
            "blt-better-when-separation-is-wrong",
            "With the right separation the plain banded strategy is best; where it is wrong by more than a factor "
            "of two, BLT can be better.",
            "Appendix H",
            blt_when_wrong,
        ),
        Claim(
            "blt-coefficients-decay-faster",
            "The coefficients of BLT decay faster than those of the banded strategy.",
            "Appendix H",
            blt_decays,
        ),
        Claim("federated-differences-small", "The three differ little.", "Appendix H", small_differences),
    ),
)
