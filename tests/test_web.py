"""`bandmf web`: its numbers are those of the library, and the page shows them, in a real browser too."""

from __future__ import annotations

import importlib.util
import io
import math
import shlex
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import bandmf
from bandmf.cli import app
from bandmf.planning import plan_file
from bandmf.planning.compare import compare
from bandmf.plots.colors import color
from bandmf.web import answers, download, sentences, server
from bandmf.web.question import Question, command, count, python_code
from web_browser import CHROMIUM, browser, enter, served, settled, slide

SMALL = Question(epsilon=4.1, delta=1e-6, examples=600, batch_size=60, epochs=8, parameters=10**6)
MODEL = Question(
    epsilon=4.0, delta=1e-4, examples=600, batch_size=60, steps=80, parameters=10**6, memory="10MB", devices=2
)


COMPARED = {"epsilon": 8.0, "delta": 1e-6, "steps": 64}


@pytest.fixture(scope="module")
def small():
    return answers.cyclic(SMALL)


@pytest.fixture(scope="module")
def compared():
    return {row.mechanism: row for row in compare(**COMPARED, epochs=2)}


# --- the question -----------------------------------------------------------------------------------------


def test_numbers_are_read_as_people_write_them():
    written = {"60000": 60_000, "60 000": 60_000, "60,000": 60_000, "60k": 60_000, "1.5M": 1_500_000}
    written |= {"7B": 7 * 10**9, "1e6": 10**6, "0.3b": 3 * 10**8, "": None, "  ": None}
    assert {text: count("examples", text) for text in written} == written
    for text in ("many", "-5", "0", "1.5", "1e99", "5x", "nan"):
        with pytest.raises(ValueError, match=f"examples='{text}': must be a whole number"):
            count("examples", text)


@pytest.mark.parametrize("question", [SMALL, MODEL])
def test_code_and_command_make_the_plan_that_is_shown(question, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = answers.cyclic(question).digest
    exec(python_code(question, answers.CYCLIC), {})
    assert bandmf.Plan.load("plan.json").digest == shown
    _, *words_of = shlex.split(command(question, answers.CYCLIC).replace("\\\n", ""))
    result = CliRunner().invoke(app, words_of, catch_exceptions=False)
    assert result.exit_code == 0
    assert bandmf.Plan.load("plan.json").digest == shown


# --- numbers ----------------------------------------------------------------------------------------------


def test_the_curve_marks_the_chosen_bands_and_what_memory_does_not_hold(small):
    points = answers.octaves(small, SMALL)
    (chosen,) = (point for point in points if point.chosen)
    assert (chosen.bands, chosen.mean_rmse) == (small.bands, pytest.approx(small.mean_rmse))
    assert {1, 2, 4, 8} <= {point.bands for point in points}
    assert all(point.mean_rmse >= chosen.mean_rmse for point in points)
    eight = bandmf.plan(**SMALL.arguments(answers.CYCLIC), bands=8).mean_rmse
    assert {point.bands: point.mean_rmse for point in points}[8] == pytest.approx(eight, rel=1e-3)
    assert [point.bands for point in points if point.unsampled] == [10]
    limited = answers.cyclic(MODEL)  # 10 MB on each of two devices are 5 vectors: 6 bands
    assert {point.fits for point in answers.octaves(limited, MODEL) if point.bands > 6} == {False}
    assert {point.fits for point in answers.octaves(limited, MODEL) if point.bands <= 6} == {True}


def test_other_mechanisms_have_the_errors_that_compare_finds(compared):
    question = Question(**COMPARED, examples=32 * 1024, batch_size=1024)
    made = answers.cyclic(question)
    ours = [*answers.of_plan(made, question), *answers.unamplified(question), *answers.in_bins(question)]
    assert {row.name for row in ours} == set(compared)
    for row in ours:
        error = row.mean_rmse * question.batch_size
        if row.estimated:  # a guess, with few samples
            assert 0.98 < error / compared[row.name].rmse < 1.1, row
        else:
            assert error == pytest.approx(compared[row.name].rmse, rel=1e-6), row
    assert {row.name for row in ours if row.estimated} == {"BLT in bins", "Banded inverse in bins"}


def test_memory_of_mechanisms_is_that_of_plans():
    rows = {row.name: row for row in answers.of_plan(answers.cyclic(MODEL), MODEL)}
    assert rows["BandMF"].memory == answers.cyclic(MODEL).memory
    assert rows["DP-SGD"].memory == 0
    rows = {row.name: row for row in answers.unamplified(MODEL)}
    assert not rows["FHU (square root)"].fits  # it keeps as many vectors as there are steps
    assert rows["BLT"].fits
    assert rows["BLT"].memory <= 10e6


def test_dp_sgd_needs_what_plans_of_its_own_confirm(small):
    needs = answers.dp_sgd_needs(small)
    alone = {"delta": SMALL.delta, "examples": 600, "steps": small.steps, "bands": 1}
    larger = bandmf.plan(**alone, epsilon=needs.epsilon, batch_size=60)
    assert larger.mean_rmse == pytest.approx(small.mean_rmse, rel=1e-3)
    wider = bandmf.plan(**alone, epsilon=small.epsilon, batch_size=needs.batch_size)
    assert wider.mean_rmse == pytest.approx(small.mean_rmse, rel=0.02)
    assert 60 < needs.batch_size < 600


def test_dp_sgd_may_have_no_batch_size_that_does(small):
    """No plan is known that full-batch DP-SGD cannot match; so one that is a hundred times better is made up."""
    wonder = SimpleNamespace(
        **{name: getattr(small, name) for name in ("steps", "workload", "batch_size", "examples", "adjacency")},
        mean_rmse=small.mean_rmse / 100,
        epsilon=small.epsilon,
        delta=small.delta,
    )
    needs = answers.dp_sgd_needs(wonder)
    assert needs == (math.inf, None)
    told = sentences.against_dp_sgd(small, needs)
    assert "an epsilon above 200" in told
    assert "no batch size would do" in told


def test_the_file_is_what_plans_save(small, tmp_path):
    found = download.plan_file(small)
    assert found.name == "plan.json"
    assert found.contents == small.save(tmp_path / "p.json").read_bytes()


def test_a_large_strategy_comes_in_an_archive_with_its_plan(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_file, "_INLINE", 2)
    found = download.plan_file(small)
    assert found.name == "plan.zip"
    zipfile.ZipFile(io.BytesIO(found.contents)).extractall(tmp_path)
    assert bandmf.Plan.load(tmp_path / "plan.json").strategy.bands == small.bands


def test_delta_that_would_permit_to_publish_an_example_is_warned_of():
    assert sentences.delta_warning(SMALL) == ""
    assert "1 / examples" in sentences.delta_warning(Question(**{**vars(SMALL), "delta": 1 / 600}))


def test_every_mechanism_of_the_page_has_its_color_of_the_pictures(compared):
    assert len({color(name) for name in compared}) == len(compared)


# --- starting ---------------------------------------------------------------------------------------------


def test_the_page_is_for_this_machine_only_and_sends_nothing_home():
    options = server.command(9000)
    assert "--server.address=127.0.0.1" in options
    assert "--browser.gatherUsageStats=false" in options
    assert "--server.port=9000" in options


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["web", "--help"])
    assert "Example: bandmf web" in result.output


def test_a_port_in_use_is_refused_and_another_found():
    with socket.socket() as taken:
        taken.bind((server.ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: is in use"):
            server.free_port(port)
    with pytest.raises(ValueError, match="port=0"):
        server.free_port(0)
    assert 8501 <= server.free_port(None) <= 8600


def test_without_streamlit_a_sentence_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "streamlit" else found(name))
    result = CliRunner().invoke(app, ["web", "--no-browser"])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).endswith("pip install 'bandmf[web]'")


# --- the page ---------------------------------------------------------------------------------------------


def shown(test):
    """{label: value} of the large numbers."""
    return {metric.label: metric.value for metric in test.metric}


def on_page(test, question):
    """The page with the inputs of a question; all but the first run are quick."""
    test.text_input(key="examples").set_value(str(question.examples))
    test.number_input(key="batch_size").set_value(question.batch_size)
    test.select_slider(key="delta").set_value(question.delta)
    test.text_input(key="parameters").set_value(str(question.parameters))
    test.text_input(key="memory").set_value("")
    return test.slider(key="epsilon").set_value(question.epsilon).run()


@pytest.fixture(scope="module")
def page():
    testing = pytest.importorskip("streamlit.testing.v1", reason="the page needs streamlit")
    test = testing.AppTest.from_file(server._PAGE, default_timeout=120).run()
    assert not test.exception
    return test


def test_the_page_shows_the_numbers_of_the_plan(page, small):
    test = on_page(page, SMALL)
    assert not test.exception
    assert not test.error
    assert shown(test)["Error"] == f"{small.mean_rmse:.3g}"
    assert shown(test)["Noise"] == f"{small.bands} bands"
    assert shown(test)["Privacy"] == "ε = 4.1"
    assert test.info[0].value == sentences.against_dp_sgd(small, answers.dp_sgd_needs(small))
    assert [code.value for code in test.code] == [
        make(SMALL, answers.CYCLIC).strip() for make in (python_code, command)
    ]
    explained = " ".join(text.value for text in test.markdown)
    assert small.explain().split("\n\n")[0].replace("_", r"\_") in explained


def test_sliding_changes_the_numbers(page):
    test = on_page(page, SMALL)
    before = shown(test)["Error"]
    test.slider(key="epsilon").set_value(5.0).run()
    made = bandmf.plan(**{**SMALL.arguments(answers.CYCLIC), "epsilon": 5.0})
    assert shown(test)["Error"] == f"{made.mean_rmse:.3g}" != before


def test_errors_of_the_library_and_warnings_are_text(page):
    test = on_page(page, SMALL)
    test.text_input(key="examples").set_value("many").run()
    assert test.error[0].value.startswith("examples='many': must be a whole number")
    assert not shown(test)
    test.text_input(key="examples").set_value("59").run()
    assert test.error[0].value.startswith("batch_size=60")
    assert not test.warning
    test.text_input(key="examples").set_value("600")
    test.text_input(key="memory").set_value("1kB")
    test.select_slider(key="delta").set_value(2e-3).run()
    assert test.warning[0].value.startswith("delta=0.002 is not below 1 / examples = 0.0017")
    assert test.error[0].value.startswith("memory=1000.0: holds 0.00025 vectors")
    assert "There is no plan" in " ".join(text.value for text in test.markdown)
    assert not test.exception


def test_the_button_certifies_the_best_plan_of_all(page, small):
    test = on_page(page, SMALL)
    test.button(key="certify").click().run()
    made = answers.certified(SMALL)  # known by now
    assert made.in_bins
    assert shown(test)["Error"] == f"{made.mean_rmse:.3g}"
    assert made.mean_rmse < small.mean_rmse
    assert f"certified by {made.certificate.samples:,} samples" in test.success[0].value
    assert 'sampling="' not in test.code[0].value
    test.slider(key="epsilon").set_value(5.0).run()  # another question, which nobody certified
    assert not test.success


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed")
@pytest.mark.skipif(importlib.util.find_spec("streamlit") is None, reason="streamlit is not installed")
def test_a_browser_loads_slides_downloads_and_certifies(tmp_path):
    with served() as here, browser() as page:
        page.goto(here.address)
        settled(page)
        enter(page, "Examples", "600")
        enter(page, "Batch size", "60")
        slide(page, "Epsilon", "ArrowRight", "4.10")
        question = Question(**{**vars(SMALL), "parameters": 25_000_000})
        made = answers.cyclic(question)
        page.get_by_text(made.digest).wait_for()
        for number in (f"{made.mean_rmse:.3g}", f"{made.bands} bands", f"{made.memory / 1e6:.0f} MB"):
            assert page.get_by_text(number, exact=True).first.is_visible(), number
        settled(page)
        assert page.locator(".vega-embed").count() == 2

        with page.expect_download() as downloading:
            page.get_by_text("Download the plan").click()
        downloading.value.save_as(tmp_path / "plan.json")
        assert bandmf.Plan.load(tmp_path / "plan.json").digest == made.digest

        page.get_by_role("button", name="Certify the best of all").click()
        page.get_by_text("The best plan of all").wait_for()
        certified = answers.certified(question)
        page.get_by_text(certified.digest).wait_for()
        assert page.get_by_text(f"{certified.mean_rmse:.3g}", exact=True).first.is_visible()

        assert _only_here(here.port)
        assert here.interrupt() == (0, "")


def _only_here(port: int) -> bool:
    """Whether all that listens on this port listens on 127.0.0.1, by the kernel's own table."""
    found = []
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found == ["0100007F"]
