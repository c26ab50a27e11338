"""`bandmf train`: rates are chosen on images neither trained on nor reported, and epsilon's reach is stated."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("opacus")
from typer.testing import CliRunner

from bandmf.cli import app
from bandmf.demo import datasets, training

COMMAND = ["train", "--dataset", "digits", "--epochs", "0.2", "--seeds", "2", "--learning-rates", "0.1,0.2"]


@pytest.fixture
def runs(monkeypatch):
    """Every run that the command makes: its images, plan, rate and seed. The second rate is the better one."""
    made = []

    def train(images, plan, rate, seed, **options):
        made.append((images, plan, rate, seed))
        return training.History((plan.steps,), (rate,))

    monkeypatch.setattr(training, "train", train)
    return made


def rows(images):
    return {row.tobytes() for row in images}


def test_rates_are_tuned_on_images_that_are_neither_trained_on_nor_reported(runs):
    found = CliRunner().invoke(app, [*COMMAND, "--json"])
    assert found.exit_code == 0, found.output
    whole = datasets.digits()
    tuning = [run for run in runs if run[3] == 0]
    final = [run for run in runs if run[3] != 0]
    assert (len(tuning), len(final)) == (4, 4)  # two mechanisms, two rates, two seeds
    assert {rate for _, _, rate, _ in final} == {0.2}
    for images, plan, _, _ in final:
        assert np.array_equal(images.test, whole.test)
        assert plan.examples == len(images.train)
    for images, plan, _, _ in tuning:
        assert len(images.test) > 200
        assert plan.examples == len(images.train)
        # A few of the 1,797 scans are alike, pixel for pixel; positions cannot be told from rows.
        for other in (final[0][0].train, whole.test):
            assert len(rows(images.test) & rows(other)) <= 5
        assert np.array_equal(images.train, final[0][0].train)


def test_held_out_images_and_the_rest_are_the_training_images():
    whole = datasets.digits()
    tuning, reporting = datasets.hold_out(whole)
    together = np.concatenate([tuning.train, tuning.test])
    order = lambda images: sorted(row.tobytes() for row in images)  # noqa: E731
    assert order(together) == order(whole.train)
    assert np.array_equal(reporting.test_labels, whole.test_labels)


def test_the_output_says_what_epsilon_covers(runs):
    plain = CliRunner().invoke(app, COMMAND)
    assert "Epsilon covers each final run on its own" in " ".join(plain.output.split())
    assert "does not cover the search over learning rates" in " ".join(plain.output.split())
    report = json.loads(CliRunner().invoke(app, [*COMMAND, "--json"]).stdout)
    assert "each final run on its own" in report["epsilon_covers"]
    assert report["images"] == {"trained_on": 1247, "tuned_on": 250, "tested_on": 300}
