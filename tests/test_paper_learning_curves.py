"""Curves of the learning experiment: rates are tuned on validation, losses compared at equal error."""

from __future__ import annotations

import numpy as np
import pytest

from bandmf.paper import run
from bandmf.paper.experiment import not_judged
from bandmf.paper.table import Table, read
from bandmf.paper.training import learning, learning_curves, learning_max_error, machines, noise_time
from sweeps import some_long

BANDS = {"1 band": 1, "8 bands": 8, "64 bands": 64, "512 bands": 512, "BLT": 2048}


def table(loss, *, rates=(0.1, 0.2, 0.4), seeds=(0, 1), stretch=1.0, **common):
    """Rows with the evaluation loss `loss(optimizer, bands, level)`, best on validation at the middle rate."""
    return Table(
        {
            "setting": "full",
            "strategy": name,
            "bands": bands,
            "optimizer": optimizer,
            "seed": seed,
            "rmse": level,
            "max_error": level * stretch,
            "learning_rate": rate,
            "validation_loss": loss(optimizer, bands, level) + (rate - rates[1]) ** 2,
            "evaluation_loss": loss(optimizer, bands, level) - (rate - rates[1]) ** 2 + 0.001 * seed,
            **common,
        }
        for name, bands in BANDS.items()
        for optimizer in learning_curves.OPTIMIZERS
        for seed in seeds
        for level in (1.0, 10.0, 100.0)
        for rate in rates
    )


def as_in_the_paper(optimizer, bands, level):
    worse = np.log10(bands) / 20 if optimizer == "adam" else 0.3 * (bands == 2048)
    return 2 + np.log10(level) + worse


def test_rates_are_tuned_on_validation_alone():
    rows = table(as_in_the_paper).where(optimizer="adam", strategy="8 bands")
    chosen, at_end = learning_curves.tuned(rows, [0, 1])
    assert chosen.values("learning_rate") == [0.2]  # evaluation would choose another
    assert at_end == 0
    assert chosen.column("seed") == [0, 1] * 3


def test_a_best_rate_at_the_end_of_the_grid_is_said():
    without = Table(row for row in table(as_in_the_paper) if row["learning_rate"] != 0.4)
    assert "the first or last tried in 15 of 15" in learning.adaptive_order(without).remark
    assert "first or last" not in learning.adaptive_order(table(as_in_the_paper)).remark


def test_rates_and_seeds_that_some_lack_do_not_count():
    rows = table(as_in_the_paper)
    more = table(as_in_the_paper, seeds=(2,)).where(strategy="1 band")
    more += table(lambda *_: 0.0, rates=(0.7, 0.8, 0.9), seeds=(0,))
    for optimizer in learning_curves.OPTIMIZERS:
        expected = learning_curves.curves_of(rows, optimizer, "rmse").losses
        found = learning_curves.curves_of(Table([*rows, *more]), optimizer, "rmse").losses
        for name in BANDS:
            np.testing.assert_array_equal(found[name], expected[name])


def test_losses_at_equal_max_error_are_interpolated():
    rows = table(as_in_the_paper)
    for row in rows:
        row["max_error"] = row["rmse"] * (2.0 if row["strategy"] == "1 band" else 1.0)
    curves = learning_curves.curves_of(rows, "momentum", "max_error")
    np.testing.assert_allclose(curves.errors, [2, 20])  # 200 is beyond the others
    np.testing.assert_allclose(curves.mean("1 band"), [2.0005, 3.0005])
    np.testing.assert_allclose(curves.mean("8 bands"), [2.0005 + np.log10(2), 3.0005 + np.log10(2)])


def test_lines_like_the_papers_hold():
    rows = table(as_in_the_paper)
    for claim in (*learning.EXPERIMENT.claims, *learning_max_error.EXPERIMENT.claims):
        assert claim.judge(rows).outcome == "holds with a remark", claim.name


def test_equal_lines_leave_only_lining_up():
    outcomes = [
        claim.judge(table(lambda optimizer, bands, level: 2 + np.log10(level))).outcome
        for claim in learning.EXPERIMENT.claims
    ]
    assert outcomes == ["does not hold", "holds with a remark", "does not hold"]


@pytest.mark.parametrize("lacking", [{"setting": "tiny"}, {"strategy": "64 bands"}, {"seed": 0}])
def test_less_than_the_whole_is_not_judged(lacking):
    rows = table(as_in_the_paper)
    (name, value), *_ = lacking.items()
    fewer = table(as_in_the_paper, **lacking) if name == "setting" else Table(r for r in rows if r[name] != value)
    for claim in (*learning.EXPERIMENT.claims, *learning_max_error.EXPERIMENT.claims):
        assert claim.judge(fewer) == not_judged
        assert claim.judge(Table()) == not_judged


def test_rows_of_this_run_go_before_recorded_ones():
    rows = Table([{"setting": "full", "date": "2026-01-01", "x": 1}, {"setting": "full", "date": None, "x": 2}])
    assert machines.rows_of(rows, "full").column("x") == [2]
    assert machines.rows_of(Table(rows[:1]), "full").column("x") == [1]
    assert machines.rows_of(rows, "tiny") == []


def test_the_remark_states_the_sizes_of_the_setting():
    learning_runs = pytest.importorskip("bandmf.paper.training.learning_runs")
    setting = learning_runs.SETTINGS["full"]
    parameters = setting.sizes("x" * 65).parameters
    for stated in (
        f"{parameters:,} parameters",
        f"{setting.steps:,} steps of {setting.batch} examples",
        f"a BLT of {learning_runs.BLT_BUFFERS} buffers",
    ):
        assert stated in learning.SETUP


def test_what_is_recorded_is_the_whole_setting():
    learning_runs = pytest.importorskip("bandmf.paper.training.learning_runs")
    rows, setting = read(run.RECORDED / "learning.csv"), learning_runs.SETTINGS["full"]
    for point in learning_runs.points_of("full"):
        found = rows.where(
            optimizer=point["optimizer"], seed=point["seed"], strategy=learning_runs.name_of(point["bands"])
        )
        expected = [(level, rate) for level in setting.levels for rate in setting.rates[point["optimizer"]]]
        assert sorted(zip(found.column("rmse"), found.column("learning_rate"), strict=True)) == sorted(expected)


@pytest.mark.parametrize(
    "module", some_long([learning, learning_max_error, noise_time], lambda module: module is learning)
)
def test_a_quick_run_needs_nothing_recorded(module, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(run, "RECORDED", tmp_path / "nothing")
    rows = run.run(module.EXPERIMENT, tmp_path, quick=True, jobs=1)
    assert {claim.judge(rows) for claim in module.EXPERIMENT.claims} == {not_judged}
    assert (tmp_path / f"{module.EXPERIMENT.name}.png").exists()


def timings(noise, clipping):
    """Rows of BERT-base: milliseconds by bands, and by batch size."""
    common = {"setting": "BERT-base", "machine": "some GPU", "date": None}
    return Table(
        [{**common, "part": "noise", "bands": k, "batch": None, "milliseconds": v} for k, v in noise.items()]
        + [{**common, "part": "clipping", "bands": None, "batch": k, "milliseconds": v} for k, v in clipping.items()]
    )


@pytest.mark.parametrize(
    ("slowest", "outcomes"),
    [
        (1.0, ["holds with a remark", "holds with a remark"]),
        (1.5, ["holds with a remark", "does not hold"]),
        (0.3, ["holds with a remark", "does not hold"]),
        (12.0, ["does not hold", "does not hold"]),
    ],
)
def test_noise_is_judged_against_clipping(slowest, outcomes):
    rows = timings({1: 0.5, 128: slowest}, {16: 0.1, 32: 11.0, 64: 400.0})
    assert [claim.judge(rows).outcome for claim in noise_time.EXPERIMENT.claims] == outcomes
    without = Table(row for row in rows if row["bands"] != 128)
    assert [claim.judge(without) for claim in noise_time.EXPERIMENT.claims] == [not_judged] * 2


@pytest.mark.parametrize("module", [learning, noise_time])
def test_an_experiment_leaves_the_settings_of_torch_as_they_were(module, tmp_path):
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision(), torch.get_rng_state()
    module.EXPERIMENT.compute(**module.EXPERIMENT.points(True)[0])
    assert torch.get_float32_matmul_precision() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
