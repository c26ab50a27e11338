"""Pictures: one color for each mechanism, names that do not overlap, plain numbers; plans and solutions for people."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bandmf
from bandmf import optimize, plots, strategies
from bandmf.cli import noise_cases
from bandmf.paper.privacy import mechanisms as paper_mechanisms
from bandmf.planning.candidate import Candidate
from bandmf.planning.labels import COLUMNS, labeled
from bandmf.planning.search.candidates import passed_over
from bandmf.plots import planned
from bandmf.plots.style import End, spread

ROOT = Path(bandmf.__file__).parents[2]
BUDGET = {"epsilon": 8, "delta": 1e-6, "examples": 6_000, "batch_size": 60, "steps": 200}
EPSILONS = (0.5, 1, 2, 4)


@pytest.fixture(scope="module")
def plan():
    return bandmf.plan(**BUDGET, bands=16, parameters=1_000, memory=4_000 * 40, sampling="cyclic-poisson")


# --- colors -------------------------------------------------------------------------------------------


def own_colors(files):
    """{file: colors} for files with colors of their own; shades of gray are nobody's."""
    found = {}
    for name, text in files.items():
        codes = re.findall(r"[\"']#([0-9A-Fa-f]{6})[\"']", text)
        if lively := [code for code in codes if len({code[:2], code[2:4], code[4:]}) > 1]:
            found[name] = lively
    return found


def test_colors_are_in_one_table():
    folders = [ROOT / "src" / "bandmf", ROOT / "benchmarks"]
    files = {path.relative_to(ROOT): path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert set(own_colors(files)) == {Path("src/bandmf/plots/colors.py")}


def test_a_planted_color_is_caught():
    planted = {"good.py": "color='#777777'", "bad.py": 'color="#1f5fbf"'}
    assert own_colors(planted) == {"bad.py": ["1f5fbf"]}


def test_every_mechanism_has_a_color_of_its_own():
    known = json.loads((ROOT / "src/bandmf/planning/mechanisms.json").read_text())["rows"]
    named = {row["mechanism"] for row in known} | {"BandMF in bins", "BLT in bins", "Banded inverse in bins"}
    shades = {name: plots.color(name) for name in named}
    assert len(set(shades.values())) == len(shades)
    for name in (*noise_cases.CASES, *paper_mechanisms.NAMES):
        assert plots.color(name) in plots.MECHANISMS.values()
    with pytest.raises(ValueError, match="name='Magic': is not in the table of colors"):
        plots.color("Magic")


def test_a_mechanism_has_the_same_color_in_every_picture():
    compared = plots.mechanisms(EPSILONS, {"BandMF": [1, 1, 1, 1], "DP-SGD": [2, 3, 4, 5]}, "")
    remembered = plots.memory({"BandMF (cyclic Poisson)": [(0, 9.0), (3, 5.0)], "BLT in bins": [(4, 4.0)]}, "")
    learned = plots.accuracy({"DP-SGD": [((1, 2), (0.1, 0.2))], "BandMF": [((1, 2), (0.3, 0.4))]}, "")
    blue, black = plots.MECHANISMS["BandMF"], plots.MECHANISMS["DP-SGD"]
    assert [color_of(figure, width) for figure, width in ((compared, 2.8), (remembered, 2.8), (learned, 2.8))] == [
        {blue}
    ] * 3
    assert black in color_of(compared, 1.2)
    assert black in color_of(learned, 1.2)


def color_of(figure, width):
    """The colors of lines that are so wide."""
    return {line.get_color() for line in figure.axes[0].lines if line.get_linewidth() == width}


# --- names and numbers --------------------------------------------------------------------------------


def boxes(figure):
    """Where the names at the right of the first panel are."""
    figure.canvas.draw()
    return sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)


def overlaps(figure):
    return sum(lower.y1 > upper.y0 + 1 for lower, upper in pairwise(boxes(figure)))


def test_names_at_the_ends_of_lines_do_not_overlap():
    curves = {name: [1 + place / 1000] * 4 for place, name in enumerate(list(plots.MECHANISMS)[:12])}
    curves["DP-SGD"] = [2, 3, 6, 9]
    figure = plots.mechanisms(EPSILONS, curves, "all at nearly one place")
    assert len(boxes(figure)) == 12
    assert overlaps(figure) == 0


def test_names_that_overlap_would_be_noticed(monkeypatch):
    monkeypatch.setattr("bandmf.plots.style.spread", lambda heights, gap: list(heights))
    curves = {name: [1.0] * 4 for name in list(plots.MECHANISMS)[:5]} | {"DP-SGD": [2, 3, 6, 9]}
    assert overlaps(plots.mechanisms(EPSILONS, curves, "")) >= 3


def test_spread_keeps_the_order_and_the_gap():
    heights = np.random.default_rng(0).uniform(0, 1, 12).tolist()
    found = spread(heights, 0.05)
    assert np.argsort(found).tolist() == np.argsort(heights).tolist()
    assert min(np.diff(sorted(found))) >= 0.05 - 1e-12
    assert min(found) >= 0


def test_names_do_not_move_the_limits_of_the_axes():
    figure, (axis,) = plots.panels(1)
    axis.plot([0, 10], [0, 10])
    before = axis.get_xlim(), axis.get_ylim()
    plots.end_labels(axis, [End(10, 10, "a", "black"), End(10, 9.9, "b", "black")])
    figure.canvas.draw()
    assert (axis.get_xlim(), axis.get_ylim()) == before


@pytest.mark.parametrize("factor", [1.3, 4, 100, 1e5])
def test_ticks_are_plain_numbers(factor):
    curves = {"BandMF": [1.0] * 4, "DP-SGD": np.geomspace(1, factor, 4).tolist()}
    axis = plots.mechanisms(EPSILONS, curves, "").axes[0]
    for which, ending in ((axis.get_xticklabels(), ""), (axis.get_yticklabels(), "x")):
        texts = [label.get_text() for label in which]
        assert len(texts) >= 3
        assert all(re.fullmatch(rf"[0-9,]+(\.[0-9]+)?{ending}", text) for text in texts), texts


# --- the picture of a plan ----------------------------------------------------------------------------


def curve(figure):
    """Bands of the points of the bold line."""
    lines = [line for line in figure.axes[0].lines if line.get_color() == plots.MECHANISMS["BandMF"]]
    return [line.get_xdata().tolist() for line in lines if len(line.get_xdata()) > 1]


def test_a_plan_draws_its_neighbors_its_choice_and_its_memory_limit(plan):
    figure = plan.plot()
    (bands,) = curve(figure)
    assert bands == [1, 2, 4, 8, 16, 32, 64]
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"DP-SGD", "chosen: 16 bands", "memory limit: 41 bands"} <= texts


def test_no_line_is_drawn_across_what_was_not_evaluated(plan):
    far = [Candidate(bands, 1.0, 5.0 / bands, None) for bands in (1, 2, 64, 100)]
    assert curve(planned.plan(plan, far)) == [[1, 2], [64, 100]]


def test_the_points_of_the_picture_are_what_a_plan_for_them_has(plan):
    drawn = {c.bands: c for c in passed_over(plan)}
    other = bandmf.plan(**BUDGET, bands=8, sampling="cyclic-poisson")
    assert drawn[8].noise_multiplier == other.noise_multiplier
    assert drawn[8].rmse == pytest.approx(other.rmse, rel=1e-3)


def test_a_plan_in_bins_has_its_mechanisms_beside_the_curve():
    cyclic = [Candidate(bands, 1.0 + bands, 9.0 / bands, None) for bands in (1, 2)]
    bins = [
        Candidate(4, 0.9, 2.0, None, "balls-in-bins", "blt", 4),
        Candidate(16, 0.8, 2.1, None, "balls-in-bins", "banded-inverse", 0),
    ]
    made = SimpleNamespace(
        **BUDGET, rmse=2.0, amplified=True, in_bins=True, max_vectors=None, is_chosen=lambda c: c is bins[0]
    )
    for candidates, more in ((bins, set()), (cyclic + bins, {"DP-SGD"})):
        texts = {text.get_text() for text in planned.plan(made, candidates).axes[0].texts}
        assert texts == {"chosen: BLT(4) in bins", "inverse(16) in bins"} | more


def test_a_plan_without_candidates_says_so(plan):
    with pytest.raises(ValueError, match=r"candidates=\(\): there is nothing to draw"):
        planned.plan(plan, ())


# --- for people ---------------------------------------------------------------------------------------

HUGE = bandmf.strategies.BandedToeplitz([1.0, *[0.000123456789] * 1_999], steps=2_000)


class Page(HTMLParser):
    """The text of a page, its pictures, and tags that were not closed."""

    def __init__(self, content):
        super().__init__()
        self.words, self.pictures, self.open = [], [], []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.pictures.append(dict(attributes)["src"])
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def solved(strategy):
    some = optimize.banded_toeplitz(16, 4)
    return type(some)(**{**vars(some), "strategy": strategy})


def test_a_huge_strategy_is_not_printed():
    once = bandmf.participation.Single()
    huge = bandmf.plan(epsilon=8, delta=1e-6, batch_size=1, steps=2_000, strategy=HUGE, participation=once)
    assert HUGE.coefficients.size == 2_000
    for shown in (repr(huge), repr(solved(HUGE)), repr([huge])):
        assert len(shown) < 400
        assert shown.count("\n") <= 1
        assert "000123" not in shown
    for page in (huge._repr_html_(), solved(HUGE)._repr_html_()):
        assert len(re.sub(r"base64,[^']*", "", page)) < 8_000
        assert "000123" not in page


def test_a_plan_says_what_matters(plan):
    for part in ("epsilon=8", "delta=1e-06", "steps=200", "bands=16", "sampling='cyclic-poisson'", "noise_multiplier="):
        assert part in repr(plan)


def test_a_solution_says_how_good_it_is_and_how_that_is_known():
    proved, unproved = optimize.banded(32, 4), optimize.banded_toeplitz(32, 4)
    assert f"optimality_gap={proved.optimality_gap:.2g}" in repr(proved)
    assert "no proof" in repr(unproved)
    assert f"rmse={unproved.rmse:.7g}" in repr(unproved)
    assert len(unproved.plot().axes[0].lines) >= 1


def test_notebooks_show_a_table_and_a_picture(plan):
    for thing, words in ((plan, ["16 bands", "chosen", "6,000"]), (optimize.banded(32, 4), ["RMSE", "yes"])):
        page = Page(thing._repr_html_())
        assert page.open == []
        assert set(words) <= set(page.words)
        (picture,) = page.pictures
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_notebooks_and_the_command_line_name_numbers_alike(plan):
    shown = labeled(plan.summary())
    assert shown["noise memory per device"] == "92 kB"  # 15 vectors of history and 8 prepared sums
    assert shown["delta"] == "1e-6"
    assert {"DP-SGD's error, relative", "full-batch DP-SGD's, relative", "vectors of noise"} <= set(shown)
    page = Page(plan._repr_html_()).words
    assert set(shown) | set(COLUMNS) <= set(page)
    assert set(shown.values()) - {plan.digest} <= set(page)
    assert not {"dp sgd ratio", "1e-06"} & set(page)


def test_what_is_shown_in_notebooks_is_escaped():
    odd = solved(strategies.Identity(4))
    object.__setattr__(odd, "message", "<script>alert(1)</script>")
    assert "<script>" not in odd._repr_html_()


@pytest.mark.parametrize(("mechanism", "size"), [("blt", "buffers="), ("banded-inverse", "inverse_bands=")])
def test_a_plan_names_its_size_by_what_it_is(mechanism, size):
    """Once a BLT of four buffers had as many bands as steps."""
    quick = {"epsilon": 8, "delta": 1e-5, "examples": 1_000, "batch_size": 50, "steps": 40}
    shown = repr(bandmf.plan(**quick, mechanism=mechanism))
    assert f"mechanism='{mechanism}', {size}" in shown
    assert ", bands=" not in shown
