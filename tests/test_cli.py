"""The command line: every command with its example, JSON that parses, one clear line for bad input."""

import importlib.util
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import bandmf
from bandmf import cli
from bandmf.cli import app, bench, noise_cases, show
from sweeps import in_turn

runner = CliRunner()
BUDGET = ["--epsilon", "8", "--delta", "1e-6", "--examples", "6000", "--batch-size", "60", "--steps", "200"]


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ["plan", "compare", "optimize", "train"])
def test_help_shows_an_example(command):
    assert "Example: bandmf" in run(command, "--help")


def test_help_names_every_kind_of_sampling():
    shown = " ".join(run("plan", "--help").split())
    assert all(name in shown for name in ("cyclic-poisson", "balls-in-bins", "b-min-sep"))


def test_optimize_prints_what_the_library_finds():
    found = json.loads(run("optimize", "--steps", "256", "--bands", "16", "--family", "banded", "--json"))
    assert found["rmse"] == pytest.approx(bandmf.optimize.banded(256, 16).rmse, rel=1e-9)
    assert found["optimality_gap"] < 1e-4


@pytest.mark.parametrize("family", ["toeplitz", "horizon", "dense", "inverse-plus-constant"])
def test_optimize_knows_every_family(family):
    found = json.loads(run("optimize", "--steps", "64", "--bands", "8", "--family", family, "--json"))
    assert 2.0 < found["rmse"] < found["independent_noise_rmse"]


def test_a_saved_strategy_is_loaded_again(tmp_path):
    file = tmp_path / "strategy.npz"
    first = json.loads(run("optimize", "--steps", "64", "--bands", "8", "--save", str(file), "--json"))
    second = json.loads(run("optimize", "--steps", "64", "--load", str(file), "--json"))
    assert second["rmse"] == pytest.approx(first["rmse"], rel=1e-12)


def test_plan_saves_and_draws(tmp_path):
    found = json.loads(
        run(
            "plan",
            *BUDGET,
            "--bands",
            "4",
            "--json",
            "--save",
            str(tmp_path / "p.json"),
            "--plot",
            str(tmp_path / "p.png"),
        )
    )
    assert bandmf.Plan.load(tmp_path / "p.json").digest == found["digest"]
    assert (tmp_path / "p.png").stat().st_size > 5_000


def test_plan_explains_itself_and_shows_its_candidates():
    assert "Guarantee." in run("plan", *BUDGET, "--bands", "4", "--explain")
    shown = run("plan", *BUDGET, "--bands", "4", "--parameters", "4000000", "--memory", "1GB")
    assert "Candidates" in shown
    assert "48 MB" in shown  # three vectors of 16 MB


def test_a_plan_counts_its_vectors_once(monkeypatch):
    monkeypatch.setattr(show.console, "width", 100)
    shown = run("plan", *BUDGET, "--bands", "32")
    assert re.search(r"vectors of noise +43\b", shown)  # 31 of history and 12 prepared sums, on CUDA
    assert "The noise keeps 43 vectors of the model's size" in " ".join(shown.split())
    assert "It keeps 43 vectors of the model's size" in " ".join(
        run("plan", *BUDGET, "--bands", "32", "--explain").split()
    )


def test_pictures_of_a_comparison_have_options_of_their_own(tmp_path, monkeypatch):
    setting = ("compare", "--steps", "8", "--epochs", "2", "--epsilon", "4", "--delta", "1e-6")
    asked = []

    def measured(epsilon, delta, steps, epochs, progress):
        asked.append((epsilon, delta, steps, epochs))
        return {"BandMF (cyclic Poisson)": [(0, 2.0), (3, 1.0)]}

    monkeypatch.setattr("bandmf.cli.compare.against_memory", measured)
    files = {option: tmp_path / f"{option}.png" for option in ("plot-memory", "plot-map")}
    run(*setting, *(part for option, file in files.items() for part in (f"--{option}", str(file))))
    assert asked == [(4.0, 1e-6, 8, 2)]
    assert all(file.stat().st_size > 5_000 for file in files.values())
    found = runner.invoke(app, ["compare", "--mechanisms", "--plot-memory", "x.png"])
    assert str(found.exception).endswith("leave --plot-memory out")
    for old in ("--memory", "--map"):  # of `plan` an amount, which a picture's name is not
        assert runner.invoke(app, [*setting, old, "x.png"]).exit_code == 2


def test_steps_of_a_momentum_plan_follow_from_the_epochs():
    budget = ["--epsilon", "8", "--delta", "1e-6", "--examples", "6000", "--batch-size", "60", "--bands", "4"]
    by_steps, by_epochs = (
        json.loads(run("plan", *budget, *length, "--momentum", "0.9", "--json"))
        for length in (["--steps", "200"], ["--epochs", "2"])
    )
    assert by_epochs["workload"] == "momentum 0.9"
    assert by_epochs["digest"] == by_steps["digest"]


def test_optimize_honors_momentum_in_every_family():
    workload = bandmf.workloads.momentum(64, 0.9)
    for family in ("toeplitz", "banded", "dense", "horizon", "inverse-plus-constant"):
        found = json.loads(run("optimize", "--steps", "64", "--family", family, "--momentum", "0.9", "--json"))
        identity = bandmf.rmse(bandmf.strategies.Identity(64), workload=workload)
        assert found["independent_noise_rmse"] == pytest.approx(identity)
        assert 10 < found["rmse"] < identity, family


@pytest.mark.parametrize("family", ["dense", "toeplitz"])
def test_optimize_measures_all_errors_under_the_same_participation(family):
    found = json.loads(run("optimize", "--steps", "64", "--family", family, "--epochs", "4", "--bands", "16", "--json"))
    assert found["rmse"] <= found["max_error"]
    identity = bandmf.rmse(bandmf.strategies.Identity(64), participation=bandmf.participation.FixedEpochs(4))
    assert found["independent_noise_rmse"] == pytest.approx(identity)


def test_compare_lists_all_mechanisms_best_first():
    found = json.loads(run("compare", "--steps", "128", "--epochs", "4", "--epsilon", "4", "--delta", "1e-6", "--json"))
    ratios = [row["ratio"] for row in found["mechanisms"]]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1.0
    names = {row["mechanism"] for row in found["mechanisms"]}
    assert {"BandMF", "DP-SGD", "BLT", "FHU (square root)", "Tree aggregation", "Stamping", "Dense MF"} <= names


def test_bench_noise_reports_time_and_memory(tmp_path, monkeypatch):
    chosen = ("independent noise", "bandmf")
    monkeypatch.setattr(noise_cases, "CASES", {case: noise_cases.CASES[case] for case in chosen})
    assert "Example: bandmf" in run("bench", "noise", "--help")
    picture = tmp_path / "noise.png"
    # One number of bands: every row takes a process of its own, and to start it is nearly all of the time.
    options = ("--parameters", "100000", "--bands", "24", "--plot", str(picture), "--json")
    rows = json.loads(run("bench", "noise", *options))["rows"]
    found = {(row["what"], row["bands"]): row for row in rows}
    assert {what for what, _ in found} == set(chosen)
    assert all(row["milliseconds"] > 0 for row in rows)
    assert picture.stat().st_size > 0
    assert found["bandmf", 24]["peak_vectors"] > 20  # 23 of history and 7 prepared


def test_bench_noise_measures_every_case_at_every_number_of_bands(monkeypatch):
    def measured(case, bands, size, device):
        return {"what": case, "bands": bands, "milliseconds": 2.0 * bands, "peak_vectors": size / 1000}

    monkeypatch.setattr(noise_cases, "run", measured)
    rows = json.loads(run("bench", "noise", "--parameters", "5000", "--bands", "1,24", "--json"))["rows"]
    others = [case for case in noise_cases.CASES if case != noise_cases.INDEPENDENT]
    assert [(row["what"], row["bands"]) for row in rows] == [
        (noise_cases.INDEPENDENT, 1),
        *((case, bands) for bands in (1, 24) for case in others),
    ]
    assert all(row["ratio"] == row["bands"] and row["peak_vectors"] == 5 for row in rows)


def test_bench_noise_runs_without_torch(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name, *more)
    )
    names = noise_cases.available("cpu")
    assert {noise_cases.INDEPENDENT, "bandmf, JAX", "bandmf, NumPy"} <= set(names)
    assert noise_cases.BANDMF not in names
    step = noise_cases.independent(1, 1000, "cpu")
    before = step().copy()
    assert 0.8 < np.std(step() - before) / noise_cases.SCALE < 1.2
    with pytest.raises(ValueError, match="on a GPU this benchmark needs it"):
        bench.noise(device="cuda")


@pytest.mark.parametrize(("bands", "case"), in_turn([1, 24], list(noise_cases.CASES)))
def test_every_case_of_the_benchmark_adds_noise_at_every_step(case, bands):
    step = noise_cases.CASES[case][0](bands, 64, "cpu")
    found = [np.zeros(64), *(np.asarray(step()).astype(float) for _ in range(3))]
    assert [each.shape for each in found] == 4 * [(64,)]
    added = np.std(np.diff(found, axis=0), axis=1)
    assert np.all((added > 0.5 * noise_cases.SCALE) & (added < 4 * noise_cases.SCALE))  # twice, if C is normalized


def test_nonsense_among_the_learning_rates_gets_one_sentence():
    for text in ("fast", "0.1,-1", "0.1,,0.2"):
        found = runner.invoke(app, ["train", "--dataset", "digits", "--learning-rates", text])
        assert found.exit_code != 0
        assert "must be numbers above zero, separated by commas" in str(found.exception) + found.output


@pytest.mark.parametrize("epochs", [pytest.param("0.5", marks=pytest.mark.long), "1"])
def test_train_compares_the_mechanisms(tmp_path, epochs):
    found = json.loads(
        run(
            *("train", "--dataset", "digits", "--epochs", epochs, "--batch-size", "64", "--seeds", "1"),
            *("--learning-rates", "0.25", "--plot", str(tmp_path / "t.png"), "--json"),
        )
    )
    names = ["DP-SGD", "BandMF", "BLT in bins"] if epochs == "1" else ["DP-SGD", "BandMF"]
    assert [row["mechanism"] for row in found["runs"]] == names
    assert (tmp_path / "t.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "--steps", "100", "--bands", "0"], "bands=0"),
        (["optimize", "--steps", "64", "--schedule", "zigzag"], "schedule='zigzag'"),
        (["plan", *BUDGET, "--epsilon", "-1"], "epsilon=-1.0"),
        (["plan", *BUDGET, "--epsilon", "inf"], "epsilon=inf"),
        (["plan", *BUDGET, "--momentum", "2"], "momentum=2.0"),
        (["plan", *BUDGET, "--epochs", "2", "--momentum", "0.9"], "--steps, --epochs: give exactly one"),
        (["optimize", "--steps", "64", "--gap", "0.1"], "gap=0.1: has no meaning for toeplitz"),
        (["optimize", "--steps", "64", "--family", "dense", "--normalize", "no"], "normalize=no"),
        (["optimize", "--steps", "64", "--family", "horizon", "--objective", "max"], "objective='max'"),
        (["optimize", "--steps", "64", "--family", "banded", "--epochs", "4"], "participation="),
        (["optimize", "--steps", "64", "--load", "x.npz", "--bands", "4"], "bands=4: has no meaning with --load"),
        (["plan", *BUDGET, "--separation", "4"], "give both or neither"),
        (["optimize", "--steps", "64", "--load", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, message, capsys):
    assert cli.run(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_the_status_of_bad_input_is_that_of_the_process():
    command = [sys.executable, "-c", "from bandmf.cli import main; main()", "optimize", "--steps", "9", "--bands", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("bandmf: --bands=0")
    assert len(result.stderr.strip().splitlines()) == 1


def test_plan_bounds_attacks_where_asked():
    given = (
        "plan --epsilon 4 --delta 1e-6 --examples 600 --batch-size 60 --steps 20 --bands 2 --sampling cyclic-poisson"
    )
    plain, asked = (json.loads(run(*given.split(), *more, "--json")) for more in ((), ("--attack-rates",)))
    rates = asked.pop("attack_rates")
    assert asked == plain
    assert 0.001 < rates["0.001"] < rates["0.01"] < rates["0.1"] < 1
