"""The pages for readers do what they say: code runs by itself, prints what the page shows, and quotes are messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import bandmf
from messages import says
from pages import ROOT, blocks, printed, run_alone, script

HEADING = re.compile(r"^### `(.*)`$", re.MULTILINE)


def test_the_quick_start_trains_a_model_in_nine_lines():
    lines = [line for line in blocks("docs/index.md")[1].splitlines() if line.strip()]
    assert len(lines) == 9
    assert "Nine lines train it privately" in (ROOT / "docs" / "index.md").read_text()
    found = re.match(
        r"accuracy (\d+)% after 117 steps, epsilon=8\.00\nGuarantee\. ", run_alone("docs/index.md")
    )
    assert found
    assert int(found[1]) > 80


@pytest.mark.parametrize(
    "page", ["docs/concepts.md", pytest.param("docs/choosing.md", marks=pytest.mark.long)]
)
def test_the_code_of_a_page_prints_what_the_page_shows(page):
    assert run_alone(page) == printed(page) != ""


GIVEN = {"docs/noise.md"}  # goes on with a plan and gradients of the reader's; test_readme.py gives them
PAGES = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - GIVEN


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(page for page in PAGES if blocks(page)))
def test_every_page_runs_by_itself(page, tmp_path):
    """Other tests run most of them in a process that has imported everything, which takes less time."""
    run_alone(page, tmp_path)


def test_every_heading_of_the_page_on_errors_is_a_message_of_the_package():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = HEADING.findall(page)
    assert len(headings) > 40
    assert [heading for heading in headings if not says(heading)] == []
    assert page.count("**Cause.**") == page.count("**Remedy.**") == len(headings)


@pytest.mark.parametrize(
    "wrong",
    [
        "steps, epochs: give precisely one of the two",
        "len(dataset)=…: must be the examples= of the plan",
        "two bands need one; memory=…: holds …",  # both are said, in the other order
        "What is promised, in a docstring only",
    ],
)
def test_a_heading_that_no_message_has_is_found(wrong):
    assert not says(wrong)


def test_every_table_of_what_was_tried_says_what_happens():
    rows = re.findall(
        r"^\| (?!what|---)(.*?) \| (.*) \|$", (ROOT / "docs" / "tried.md").read_text(), re.MULTILINE
    )
    outcome = re.compile(r"work|refused|has no effect|runs, and is \*not\* private")
    assert len(rows) > 40
    assert [name for name, happens in rows if not outcome.search(happens)] == []


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
    known = {
        "cff-version",
        "message",
        "type",
        "title",
        "abstract",
        "authors",
        "version",
        "license",
        "keywords",
    }
    wrong = sorted(found.keys() - known - {"references"})
    wrong += [
        name
        for name in ("cff-version", "message", "title", "version")
        if not isinstance(found.get(name), str)
    ]
    references = found.get("references", [])
    wrong += [name for each in references for name in ("type", "title", "authors") if not each.get(name)]
    for author in [
        *found.get("authors", [{}]),
        *(person for each in references for person in each["authors"]),
    ]:
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
