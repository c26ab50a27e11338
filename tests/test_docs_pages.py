"""The pages for readers do what they say: code runs by itself, prints what the page shows, and quotes are messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import bandmf
from messages import says
from pages import ROOT, blocks, printed, run_alone, script


def test_the_quick_start_trains_a_model_in_nine_lines():
    lines = [line for line in blocks("docs/index.md")[1].splitlines() if line.strip()]
    assert len(lines) == 9
    assert "Nine lines train it privately" in (ROOT / "docs" / "index.md").read_text()
    found = re.match(r"accuracy (\d+)% after 117 steps, epsilon=8\.00\nGuarantee\. ", run_alone("docs/index.md"))
    assert found
    assert int(found[1]) > 80


@pytest.mark.parametrize("page", ["docs/concepts.md", pytest.param("docs/choosing.md", marks=pytest.mark.long)])
def test_the_code_of_a_page_prints_what_the_page_shows(page):
    assert run_alone(page) == printed(page) != ""


GIVEN = {"docs/noise.md"}  # goes on with a plan and gradients of the reader's; test_readme.py gives them
PAGES = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - GIVEN


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(page for page in PAGES if blocks(page)))
def test_every_page_runs_by_itself(page, tmp_path):
    """Other tests run most of them in a process that has imported everything, which takes less time."""
    run_alone(page, tmp_path)


def test_every_message_on_the_page_of_errors_is_one_of_the_package():
    page = (ROOT / "docs" / "supported-layers.md").read_text()
    table = re.search(r"<!-- errors -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
    quotes = re.findall(r"^\| `(.*?)` \| .+ \|$", table, re.MULTILINE)
    assert len(quotes) == len(table.splitlines()) - 2 > 5
    assert [quote for quote in quotes if not says(quote)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "steps, epochs: give precisely one of the two",
        "len(dataset)=…: must be the examples= of the plan",
        "two bands need one; memory=…: holds …",  # both are said, in the other order
        "What is promised, in a docstring only",
    ],
)
def test_a_quote_that_no_message_has_is_found(wrong):
    assert not says(wrong)


def missing_tests(page):
    """Files of tests that a page names and that are not there."""
    named = re.findall(r"`(?:tests/)?((?:attacks/)?test_\w+\.py)", page)
    assert named
    return [name for name in named if not (ROOT / "tests" / name).exists()]


def test_the_tests_that_the_guarantees_name_are_there():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert missing_tests(page) == []
    assert missing_tests(page + "`attacks/test_planted.py`") == ["attacks/test_planted.py"]


def test_all_pages_together_are_short_enough_to_be_read():
    """Words have a letter or a digit; the lines between the cells of tables do not count, and neither do proofs."""
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "balls-in-bins-proof.md"}
    words = [word for path in pages for word in path.read_text().split() if re.search(r"\w", word)]
    assert len(words) < 25_000


def long_lines(page):
    """Of 120 columns there is room for everything but a row of a table."""
    return [line for line in page.splitlines() if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_lines_of_a_page_are_short(path):
    page = path.read_text()
    assert long_lines(page) == []
    assert long_lines(page + "a word " * 20) == ["a word " * 20]


def rows_without_a_result(page):
    table = re.search(r"<!-- ports -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [row[0] for row in cells if len(row) != 3 or not all(row)]


def test_every_program_that_needed_something_has_a_result():
    page = (ROOT / "docs" / "tried.md").read_text()
    assert rows_without_a_result(page) == []
    planted = page.replace("| --- |\n", "| --- |\n| a planted program | 3 | |\n", 1)
    assert rows_without_a_result(planted) == ["a planted program"]


def drawings():
    slow = {"draw_tradeoff"}  # plans at three budgets
    return [
        pytest.param(draw, id=draw.__name__, marks=[pytest.mark.long] if draw.__name__ in slow else [])
        for draw in script("docs/site/pictures.py").DRAWINGS
    ]


@pytest.mark.parametrize("draw", drawings())
def test_the_pictures_on_the_pages_can_be_drawn_again(draw, tmp_path):
    drawn = draw(tmp_path)
    assert drawn.stat().st_size > 10_000
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert f"(images/{drawn.name})" in pages
    assert (ROOT / "docs" / "images" / drawn.name).exists()


def test_the_citation_is_valid_and_of_this_version():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited(found) == []
    assert found["version"] == bandmf.__version__
    assert found["license"] == "Apache-2.0"
    assert f"version = {{{bandmf.__version__}}}" in (ROOT / "docs" / "citation.md").read_text()


def cited(found):
    """What of a CITATION.cff is not as version 1.2.0 of the format wants it, as far as this one goes."""
    known = {"cff-version", "message", "type", "title", "abstract", "authors", "version", "license", "keywords"}
    wrong = sorted(found.keys() - known - {"references"})
    wrong += [name for name in ("cff-version", "message", "title", "version") if not isinstance(found.get(name), str)]
    references = found.get("references", [])
    wrong += [name for each in references for name in ("type", "title", "authors") if not each.get(name)]
    for author in [*found.get("authors", [{}]), *(person for each in references for person in each["authors"])]:
        if not author.keys() or not author.keys() <= {"name"} | {"family-names", "given-names"}:
            wrong.append("authors")
    return wrong + ([] if found.get("cff-version") == "1.2.0" else ["cff-version"])


@pytest.mark.parametrize("name", ["message", "authors", "title"])
def test_a_citation_without_what_it_needs_is_found(name):
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    del found[name]
    assert cited(found) != []


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not Path(ROOT / link).exists()] == []
