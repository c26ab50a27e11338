"""README and the pages beside it do what they say: their code and their commands run."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bandmf
from bandmf.cli import app
from pages import ROOT, blocks, run

COMMANDS = re.findall(r"^bandmf \w+ --.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
# Only training is shrunk: as it stands it takes minutes, for two mechanisms, four learning rates and five seeds.
SHRUNK = {"compare": "--steps 64", "train": "--dataset digits --epochs 0.25 --seeds 1 --learning-rates 0.25"}
TESTED_ELSEWHERE = {"docs/training.md", "docs/supported-layers.md", "docs/migrate-opacus.md", "docs/huggingface.md"}
TESTED_ELSEWHERE |= {"docs/lightning.md", "docs/accelerate.md", "docs/jax.md", "docs/migrate-jax-privacy.md"}


def test_the_ten_lines_of_the_readme_train_a_model():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 8)
    model = torch.nn.Linear(8, 2)
    names = run(
        "README.md",
        dataset=torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long()),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        evaluate=lambda model: 0.5,
    )
    assert names["training"].finished
    assert names["training"].steps_taken == names["plan"].steps == 32
    lines = [line for line in blocks("README.md")[0].splitlines() if line.strip()]
    assert len(lines) == 10


def test_the_readme_shows_every_command_for_one_run():
    assert [command.split()[1] for command in COMMANDS] == ["plan", "compare", "optimize", "train"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one draws a picture
    _, name, *options = shlex.split(command)
    result = CliRunner().invoke(app, [name, *options, *shlex.split(SHRUNK.get(name, ""))])
    assert result.exit_code == 0, result.output
    assert result.output.strip()
    assert ("--plot" in options) == bool(list(tmp_path.glob("*.png")))


def test_the_page_on_plans_runs():
    names = run("docs/plan.md")
    assert names["plan"].epsilon == 8  # the last one, for federated training


def test_the_page_on_bins_runs(capsys):
    run("docs/balls-in-bins.md")
    assert capsys.readouterr().out.startswith("balls-in-bins blt 4\nballs-in-bins, certified: ")


def test_the_page_on_strategies_runs(capsys):
    run("docs/strategies.md")
    found = float(capsys.readouterr().out)
    assert bandmf.optimize.banded(256, 16).rmse < found < bandmf.rmse(bandmf.strategies.Identity(256))


def test_the_page_on_noise_runs():
    plan = bandmf.plan(epsilon=8, delta=1e-6, examples=6_000, batch_size=60, steps=200, bands=4)
    gradients = {"layer.weight": np.zeros((20, 10), np.float32)}
    names = run("docs/noise.md", bandmf=bandmf, plan=plan, gradients=gradients, scale=0.1)
    assert names["state"].step == 1
    assert np.all(gradients["layer.weight"] != 0)


def test_every_page_with_code_is_run():
    pages = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    here = {"README.md", "docs/plan.md", "docs/strategies.md", "docs/noise.md", "docs/balls-in-bins.md"}
    alone = {"docs/index.md", "docs/concepts.md", "docs/choosing.md"}  # test_docs_pages.py
    assert {page for page in pages if blocks(page)} == here | alone | TESTED_ELSEWHERE
