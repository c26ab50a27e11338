"""Plans and solutions as HTML, for notebooks: a table and a picture, in one string without links."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from bandmf.planning.labels import candidate_table, labeled
from bandmf.plots import figures, planned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bandmf.optimize.solution import Solution
    from bandmf.planning.plan import Plan

_CELL = "style='text-align:{};padding:1px 10px 1px 0'"
_DIGEST = 16  # characters of it that are shown


def plan(made: Plan) -> str:
    """The numbers of a plan, its candidates, and their picture."""
    numbers = labeled(made.summary() | {"digest": made.digest[:_DIGEST]})
    header, rows = candidate_table(made)
    parts = ["<b>Plan</b>", _table((), list(numbers.items()))]
    if rows:
        parts += ["<b>Candidates</b>", _table(header, rows), _image(planned.plan(made, made.candidates))]
    return _joined(*parts)


def solution(found: Solution) -> str:
    """The numbers of a solution, and columns of its strategy."""
    gap = found.optimality_gap
    numbers = {
        "strategy": repr(found.strategy),
        "RMSE": f"{found.rmse:.7g}",
        "objective": f"{found.objective:.7g}",
        "optimality gap": "no proof" if gap is None else f"{gap:.2g}",
        "converged": "yes" if found.converged else "no",
        "iterations": f"{found.iterations:,}",
        "time": f"{found.seconds:.2f} s",
        "how it ended": found.message,
    }
    return _joined("<b>Solution</b>", _table((), list(numbers.items())), _image(figures.columns(found.strategy)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_row("th", header)] if header else []
    return "<table>" + "".join([*lines, *(_row("td", row) for row in rows)]) + "</table>"


def _row(kind: str, entries: Sequence[str]) -> str:
    last = len(entries) > 2  # a column of numbers is set flush right, a single value is not
    sides = ("left" if place == 0 or not last else "right" for place in range(len(entries)))
    cells = (
        f"<{kind} {_CELL.format(side)}>{escape(entry)}</{kind}>" for side, entry in zip(sides, entries, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    content = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='picture' src='data:image/png;base64,{content}'>"


def _joined(*parts: str) -> str:
    return "<div>" + "".join(parts) + "</div>"
