"""`bandmf reproduce`: every claim is judged from its CSV, every verdict can change, interrupted runs go on."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import replace
from importlib import import_module

import joblib
import pytest
from typer.testing import CliRunner

import paper_faults_privacy
import paper_faults_strategies
import paper_faults_training
from bandmf import paper, plots
from bandmf.cli import app
from bandmf.paper import page, table
from bandmf.paper.experiment import Claim, Experiment, Verdict
from bandmf.paper.run import run
from pages import ROOT
from sweeps import some_long

RECORD = ROOT / "docs" / "reproduction"
FAULTS = paper_faults_strategies.FAULTS | paper_faults_privacy.FAULTS | paper_faults_training.FAULTS
CLAIMS = [(name, claim) for name in paper.NAMES for claim in paper.experiment(name).claims]
OUTCOMES = {"holds", "holds with a remark", "does not hold", "not judged"}


def test_every_module_with_an_experiment_is_in_the_registry_under_its_name():
    found = set()
    for room in ("strategies", "privacy", "training"):
        package = import_module(f"bandmf.paper.{room}")
        for module in pkgutil.iter_modules(package.__path__):
            one = getattr(import_module(f"{package.__name__}.{module.name}"), "EXPERIMENT", None)
            if one is not None:
                assert one.name == module.name
                found.add(one.name)
    assert found == set(paper.NAMES)


def test_claims_have_names_of_their_own_and_a_fault_each():
    names = [claim.name for _, claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert set(FAULTS) == set(names)


SLOW = (
    "learning",
    "learning_max_error",
    "noise_time",
    "mechanism_table",
    "against_steps_and_epochs",
    "federated",
    "bands_and_epochs",
)


@pytest.mark.parametrize("name", some_long(paper.NAMES, lambda name: name not in SLOW))
def test_a_quick_run_writes_numbers_and_a_picture_that_can_be_judged(name, tmp_path):
    one = paper.experiment(name)
    rows = run(one, tmp_path, quick=True, jobs=1)
    assert rows == table.read(tmp_path / f"{name}.csv")
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    for claim in one.claims:
        verdict = claim.judge(rows)
        assert verdict.outcome in OUTCOMES
        assert verdict.number or verdict.outcome == "not judged"


# --- the committed record -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "claim"), CLAIMS, ids=[claim.name for _, claim in CLAIMS])
def test_a_changed_csv_changes_the_verdict(name, claim, tmp_path):
    rows = table.read(RECORD / f"{name}.csv")
    before = claim.judge(rows)
    assert before.outcome == "holds" or before.remark, "what does not simply hold has a reason"
    table.write(FAULTS[claim.name](rows), tmp_path / "planted.csv")
    assert claim.judge(table.read(tmp_path / "planted.csv")).outcome != before.outcome


def test_the_page_says_what_its_csv_files_say():
    assert (ROOT / "docs" / "reproduction.md").read_text() == page.text(RECORD)
    assert {path.stem for path in RECORD.glob("*.png")} == set(paper.NAMES)
    made = json.loads((RECORD / "run.json").read_text())
    assert list(made) == list(paper.NAMES)
    assert not any(run["quick"] for run in made.values())


# Points of the full run that take a second or so; all other numbers come by the same code.
RECOMPUTED = {
    "example": [{}],
    "against_steps": [{"family": "Toeplitz, columns normalized", "steps": 256, "bands": 16}],
    "against_epsilon": [{"mechanism": "BandMF", "size": 32}, {"mechanism": "BLT", "size": 3}],
    "bands_and_epochs": [{"bands": 2048}],
    "best_bands": [{"bands": 1024}],
    "benefits": [{"bands": 2048}],
    "federated": [{}],
    "approximate_loss": [{"cutoff": 64}],
    "one_parameter": [{"steps": 1024, "bands": 16}],
    "bound": [{"bands": 16}],
    "memory": [{}],
}


@pytest.mark.parametrize("name", some_long(RECOMPUTED, lambda name: name not in ("benefits", "bands_and_epochs")))
def test_the_record_is_what_the_code_computes(name):
    one, rows = paper.experiment(name), table.read(RECORD / f"{name}.csv")
    for wanted in RECOMPUTED[name]:
        points = [p for p in one.points(False) if all(p.get(key) == value for key, value in wanted.items())]
        assert points, wanted
        for row in one.compute(**points[0]):
            assert any(alike(row, other) for other in rows), row


def alike(row, other):
    """To a millionth, since searches end where they end."""
    return all(
        other[key] == (pytest.approx(value, rel=1e-6, abs=1e-12) if isinstance(value, float) else value)
        for key, value in row.items()
        if value is not None
    )


def test_the_readme_counts_the_claims_as_the_page_does():
    claims = [each for each in page.judge(RECORD) if each.claim.of_the_paper]
    assert page.count(claims) in words_of(ROOT / "README.md")


# --- runs ---------------------------------------------------------------------------------------------


def counting(log, fail_at=None):
    """An experiment of four points that notes what it computes, and may fail on the way."""

    def compute(number):
        if number == fail_at:
            raise KeyboardInterrupt
        log.append(number)
        return [{"number": number, "square": number**2, "text": "a, b", "none": None}]

    claim = Claim("planted", "Squares are below ten.", "nowhere", judge)
    return Experiment(
        "planted", "Squares", "nowhere", lambda quick: [{"number": n} for n in range(2 if quick else 4)],
        compute, draw, (claim,),
    )  # fmt: skip


def draw(rows):
    return plots.panels(1)[0]


def judge(rows):
    most = max(rows.column("square"))
    return Verdict("holds" if most < 10 else "does not hold", f"{most}")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BANDMF_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    log = []
    with pytest.raises(KeyboardInterrupt):
        run(counting(log, fail_at=2), tmp_path, jobs=1)
    assert log == [0, 1]
    rows = run(counting(log), tmp_path, jobs=1)
    assert log == [0, 1, 2, 3]
    assert rows.column("square") == [0, 1, 4, 9]
    run(counting(log), tmp_path, jobs=1)
    assert log == [0, 1, 2, 3]


@pytest.mark.usefixtures("own_cache")
def test_points_are_computed_again_when_asked_for_or_when_the_version_changes(tmp_path):
    log = []
    run(counting(log), tmp_path, quick=True, jobs=1)
    run(counting(log), tmp_path, quick=True, fresh=True, jobs=1)
    run(replace(counting(log), version=2), tmp_path, quick=True, jobs=1)
    assert log == [0, 1, 0, 1, 0, 1]


def test_without_a_cache_a_run_works(tmp_path, monkeypatch):
    monkeypatch.setenv("BANDMF_CACHE", "off")
    assert len(run(counting([]), tmp_path, jobs=1)) == 4


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("backend", ["threading", "dask"])
def test_points_are_computed_in_parallel_on_any_backend(backend, tmp_path):
    one = paper.experiment("approximate_loss")
    expected = run(one, tmp_path, quick=True, jobs=1)
    if backend == "threading":
        with joblib.parallel_config(backend, n_jobs=2):
            found = run(one, tmp_path, quick=True, fresh=True, jobs=2)
    else:
        from distributed import Client

        with (
            Client(processes=False, dashboard_address=None, n_workers=1, threads_per_worker=2),
            joblib.parallel_config("dask"),
        ):
            found = run(one, tmp_path, quick=True, fresh=True, jobs=2)
    assert found == expected


def test_rows_come_back_from_a_csv_as_they_were(tmp_path):
    rows = table.Table([{"a": 1, "b": 0.1, "c": "x, y"}, {"a": None, "b": 1e-300, "d": "3 bands"}])
    table.write(rows, tmp_path / "rows.csv")
    first, second = table.read(tmp_path / "rows.csv")
    assert first == {"a": 1, "b": 0.1, "c": "x, y", "d": None}
    assert second == {"a": None, "b": 1e-300, "c": None, "d": "3 bands"}
    with pytest.raises(LookupError, match="2 rows where one was expected"):
        rows.one("a")


# --- the command --------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def words_of(path):
    """A page, however its lines are broken."""
    return " ".join(path.read_text().split())


def test_the_command_prints_verdicts_and_writes_the_page(tmp_path):
    found = json.loads(command("example", "memory", "--quick", "--out", tmp_path / "rep", "--json").stdout)
    assert {claim["experiment"] for claim in found["claims"]} == {"example", "memory"}
    assert all(claim["outcome"] in OUTCOMES for claim in found["claims"])
    assert "at small sizes" in words_of(tmp_path / "rep.md")
    assert (tmp_path / "rep" / "example.png").exists()
    shown = command("example", "--quick", "--out", tmp_path / "rep").stdout
    assert "1 claim: 1 holds" in shown


def test_the_command_without_a_name_lists_them():
    shown = command().stdout
    assert all(name in shown for name in paper.NAMES)
    listed = json.loads(command("--json").stdout)["experiments"]
    assert [one["name"] for one in listed] == list(paper.NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure-1"], "name='figure-1': no experiment has it; `bandmf reproduce` lists them"),
        (["best_band"], "name='best_band': no experiment has it; did you mean best_bands?"),
        (["all", "example"], "all: stands for every experiment; give it alone, or names"),
        (["example", "--jobs", "0"], "jobs=0: must be -1 or at least 1"),
    ],
)
def test_nonsense_gets_one_sentence(arguments, message, tmp_path):
    result = command(*arguments, "--out", tmp_path / "rep")
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not (tmp_path / "rep").exists()


def test_a_page_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "README.md").write_text("# Mine")
    result = command("example", "--out", tmp_path / "README")
    assert "README.md beside it is another page" in str(result.exception)
    assert (tmp_path / "README.md").read_text() == "# Mine"
    assert "must be a folder with a name" in str(command("example", "--out", "/").exception)


@pytest.mark.usefixtures("own_cache")
def test_the_page_knows_which_experiments_were_quick(tmp_path):
    out = tmp_path / "rep"
    command("example", "memory", "--out", out)
    assert "2 experiments, " in words_of(tmp_path / "rep.md")
    assert "small sizes" not in words_of(tmp_path / "rep.md")
    command("bound", "--quick", "--out", out)
    assert "3 experiments, 1 of them at small sizes" in words_of(tmp_path / "rep.md")


@pytest.mark.usefixtures("own_cache")
def test_an_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bandmf.cli.reproduce.run", interrupted)
    result = command("example", "--out", tmp_path / "rep")
    assert result.exit_code == 130
    assert "the same command goes on" in result.output


def test_an_experiment_that_lacks_a_package_names_it(tmp_path, monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(paper, "experiment", lacking)
    result = command("learning", "--out", tmp_path / "rep")
    assert str(result.exception) == "learning: needs torch; pip install 'bandmf[torch]'"
