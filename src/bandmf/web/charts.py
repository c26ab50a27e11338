"""Numbers -> charts of the page. Every mechanism has one color, whatever else is shown."""

from __future__ import annotations

from typing import Any

import altair as alt

from bandmf._text import counted, readable_bytes
from bandmf.plots.colors import BANDMF, CHOSEN, MECHANISMS, ON_BOTH, TOO_LARGE, color
from bandmf.web.answers import Mechanism, Point

_LONGEST_BAR = 4.0  # times the plan's error; longer ones are cut, and say by how much they are longer


def bands(points: list[Point]) -> alt.LayerChart:
    """Error against bands on log scales: the chosen number marked, those too large for the memory in gray."""
    last = max(point.bands for point in points)
    rows = [
        {
            "bands": point.bands,
            "error": point.mean_rmse,
            "kind": "chosen" if point.chosen else "fits" if point.fits else "too large",
            "size": 260 if point.chosen else 70,
            "label": _label(point),
        }
        for point in points
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "bands:Q",
            scale=alt.Scale(type="log", nice=False, domain=[0.85, max(last, 2) * 1.3]),
            title="bands",
            axis=alt.Axis(values=[2**i for i in range(0, 24, 1 if last < 1000 else 2)], format=",d"),
        ),
        y=alt.Y(
            "error:Q",
            scale=alt.Scale(type="log", nice=False, padding=24),
            title="error of mean gradients",
            axis=alt.Axis(format="~g", tickCount=5),
        ),
        tooltip=[
            alt.Tooltip("bands:Q", title="bands"),
            alt.Tooltip("error:Q", title="error", format=".4g"),
            alt.Tooltip("kind:N", title="memory and choice"),
        ],
    )
    kinds = ["chosen", "fits", "too large"]
    scale = alt.Scale(domain=kinds, range=[CHOSEN, MECHANISMS[BANDMF], TOO_LARGE])
    dots = base.mark_point(filled=True, opacity=1).encode(
        color=alt.Color("kind:N", scale=scale, legend=None), size=alt.Size("size:Q", scale=None)
    )
    shade = alt.Color("kind:N", scale=scale, legend=None)
    inside = base.mark_text(dy=-18, fontSize=13, fontWeight="bold").encode(text="label:N", color=shade)
    first = base.mark_text(dx=12, align="left", fontSize=13, fontWeight="bold").encode(text="label:N", color=shade)
    line = base.mark_line(color=MECHANISMS[BANDMF])
    texts = inside.transform_filter("datum.bands > 1") + first.transform_filter("datum.bands == 1")
    return (line + dots + texts).properties(height=290)


def _label(point: Point) -> str:
    if point.chosen and point.bands > 1:
        return counted(point.bands, "band")
    return "DP-SGD" if point.bands == 1 else "no sampling" if point.unsampled else ""


def mechanisms(rows: list[Mechanism], plans: float | None) -> alt.LayerChart:
    """Every mechanism's error over the plan's (`plans`, or the least where there is none), best first.

    Estimates are pale.
    """
    rows = sorted(rows, key=lambda row: row.mean_rmse)
    bars = [_bar(row, plans, rows[0].mean_rmse) for row in rows]
    longest = min(max(bar["ratio"] for bar in bars), _LONGEST_BAR)
    base = alt.Chart(alt.Data(values=bars)).encode(
        y=alt.Y(
            "name:N",
            sort=[row.name for row in rows],
            title=None,
            axis=alt.Axis(labelLimit=240, labelFontSize=13, ticks=False),
        ),
        x=alt.X(
            "shown:Q",
            title=f"error, in times the {'least' if plans is None else 'error of this plan'}",
            scale=alt.Scale(domain=[0, longest * 1.45], nice=False),
            axis=alt.Axis(values=[0, 1, 2, 3, 4], format="d"),
        ),
        tooltip=[
            alt.Tooltip("name:N", title="mechanism"),
            alt.Tooltip("error:Q", title="error", format=".4g"),
            alt.Tooltip("what:N", title="how it is known"),
            alt.Tooltip("memory:N", title="noise memory"),
        ],
    )
    marks = base.mark_bar(height={"band": 0.7}, cornerRadiusEnd=3).encode(
        color=alt.Color("color:N", scale=None), opacity=alt.Opacity("opacity:Q", scale=None)
    )
    text = base.mark_text(align="left", dx=6, fontSize=12, color=ON_BOTH).encode(text="label:N")
    return (marks + text).properties(height=alt.Step(25))


def _bar(row: Mechanism, plans: float | None, least: float) -> dict[str, Any]:
    ratio = row.mean_rmse / (plans or least)
    memory = counted(row.vectors, "vector") if row.memory is None else readable_bytes(row.memory)
    own = " (this plan)" if plans is not None and abs(ratio - 1) < 1e-9 else ""
    label = f"{ratio:.2f}{own}" + (", estimate" if row.estimated else "") + ("" if row.fits else ", too large")
    return {
        "name": row.name,
        "error": row.mean_rmse,
        "ratio": ratio,
        "shown": min(ratio, _LONGEST_BAR),
        "label": label,
        "memory": memory + ("" if row.fits else ", more than there is"),
        "what": "estimate" if row.estimated else "computed exactly",
        "color": color(row.name),
        "opacity": 0.5 if row.estimated else 1.0,
    }
