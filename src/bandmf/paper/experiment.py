"""What a figure or table of the paper consists of here: points to compute, a picture, claims to judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

from bandmf.paper.table import Row, Table, Value

Point = dict[str, Value]
Outcome = Literal["holds", "holds with a remark", "does not hold", "not judged"]


@dataclass(frozen=True)
class Verdict:
    """What our numbers say of a claim."""

    outcome: Outcome
    number: str  # what we get, with its unit
    remark: str = ""  # required unless the claim simply holds


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, its place there, and how the numbers decide it.

    `judge` sees the rows of the CSV and nothing else; at sizes too small to tell it returns `not_judged`.
    """

    name: str
    statement: str
    place: str
    judge: Callable[[Table], Verdict]

    @property
    def of_the_paper(self) -> bool:
        """Whether the paper makes it; others are findings of ours."""
        return not self.place.endswith("beyond the paper")


@dataclass(frozen=True)
class Experiment:
    """One figure or table: `compute(**point)` gives the rows of a point, for every point of `points(quick)`.

    A point holds plain values only: it is the key under which its rows are cached, and may be computed in
    another process. `alone` keeps points from running beside each other, for those that measure time.
    `recorded` names a CSV in bandmf/paper/recorded with rows measured on hardware a reader may lack.
    """

    name: str
    title: str
    place: str
    points: Callable[[bool], list[Point]]
    compute: Callable[..., list[Row]]
    draw: Callable[[Table], Figure]
    claims: tuple[Claim, ...]
    alone: bool = False
    recorded: str | None = None
    note: str = ""  # what a reader must know of the numbers
    version: int = 1  # raise it when compute gives other numbers: points cached before are then ignored


not_judged = Verdict("not judged", "", "the sizes of this run are too small")
