"""Lightning and Accelerate around Training: the weights of a plain loop, and their pages run. Opacus beside it."""

from __future__ import annotations

import logging

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from bandmf import Key
from bandmf.torch import Training
from children import run_ranks
from pages import run
from training import losses, same_run, simple_plan, small_data, small_model, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


def training_of(model, optimizer, data=None, loss=losses, **changes):
    with same_run():
        return Training(
            model, loss, optimizer, small_data() if data is None else data, simple_plan(steps=9), clip_norm=0.5,
            key=Key(bytes(32)), micro_batch=7, **changes,
        )  # fmt: skip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_bf16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return losses(model, batch)


def plain(loss=losses):
    """The weights of a plain loop."""
    model = small_model()
    train(training_of(model, sgd(model), loss=loss))
    return weights(model)


@pytest.fixture(scope="module")
def expected():
    return plain()


# --- Lightning ------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """As on the page."""

    def __init__(self, **settings):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.settings, self.evaluated_at = small_model(), settings, []

    def losses(self, batch):
        return losses(self.net, batch)

    def configure_optimizers(self):
        optimizer = sgd(self)
        self.run = training_of(self, optimizer, loss=Module.losses, **self.settings)
        return optimizer

    def train_dataloader(self):
        return range(self.run.steps_taken, self.run.plan.steps)

    def training_step(self, item, number):
        self.run.advance()
        self.optimizers().step()

    def on_train_end(self):
        self.run.close()

    def val_dataloader(self):
        return torch.utils.data.DataLoader(small_data(10), 10)

    def validation_step(self, batch, number):
        self.evaluated_at.append(self.run.steps_taken)
        self.log("held_out_loss", self.losses(batch).mean())


def fit(module, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    usual = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(**{**quiet, **usual, "val_check_interval": 3, **options})
    trainer.fit(module)
    return trainer


def test_lightning_trains_what_a_plain_loop_trains(expected):
    trainer = fit(module := Module())
    assert trainer.global_step == module.run.steps_taken == 9
    assert module.evaluated_at == [3, 6, 9]
    assert torch.equal(weights(module), expected)


def test_loggers_and_checkpoints_of_lightning_count_steps_of_the_plan(tmp_path, expected):
    best = ModelCheckpoint(tmp_path, monitor="held_out_loss", save_top_k=-1, filename="{step}")
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(Module(), logger=logger, enable_checkpointing=True, callbacks=[best], log_every_n_steps=1)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {f"step={step}.ckpt" for step in (3, 6, 9)}
    held = torch.load(tmp_path / "step=9.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(torch.cat([held[name].flatten() for name, _ in Module().named_parameters()]), expected)
    header, *lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().split()
    place = header.split(",").index("step")
    assert [line.split(",")[place] for line in lines] == ["2", "5", "8"]  # of the last update, from zero


def test_mixed_precision_of_lightning_acts_on_the_losses(expected):
    fit(module := Module(), precision="bf16-mixed")
    assert torch.equal(weights(module), plain(in_bf16))
    assert not torch.equal(weights(module), expected)


OPTIMIZERS = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Rprop", "SGD"])
def test_a_step_of_an_optimizer_without_gradients_changes_nothing(name):
    """With it Lightning counts; the gradients of a real step are there before it, and change something."""
    model = small_model()
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **decay)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = weights(model)
    optimizer.step()
    after = weights(model)
    assert not torch.equal(before, after)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weights(model), after)


def test_a_run_of_lightning_goes_on_in_its_folder(tmp_path, expected, caplog):
    with caplog.at_level(logging.WARNING, "bandmf"):
        fit(Module(folder=tmp_path / "run"), max_steps=4)
    assert "the run ended after step 4 of 9" in caplog.text
    trainer = fit(module := Module(folder=tmp_path / "run"))
    assert (trainer.global_step, module.run.steps_taken) == (5, 9)
    assert torch.equal(weights(module), expected)


class Failing(Module):
    def validation_step(self, batch, number):
        if self.run.steps_taken == 6:
            raise OSError("no space left")


def test_a_run_of_lightning_that_failed_repeats_its_steps(tmp_path, expected):
    with pytest.raises(OSError, match="no space left"):
        fit(failed := Failing(folder=tmp_path / "run", save_every=4))
    failed.run._let_go()  # as the end of its process does
    fit(module := Module(folder=tmp_path / "run"))
    assert torch.equal(weights(module), expected)


@pytest.mark.parametrize("option", [{"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}])
def test_lightning_refuses_what_acts_on_gradients(option):
    with pytest.raises(lightning.fabric.utilities.exceptions.MisconfigurationException, match="manual"):
        fit(Module(), **option)


def on_two_ranks(folder):
    fit(module := Module(), strategy="ddp", devices=2)
    torch.save(weights(module), folder / f"lightning-{module.global_rank}.pt")
    AcceleratorState._reset_state(True)  # a rank is a fork of a process that may have had one
    accelerator, model = Accelerator(cpu=True), small_model()
    optimizer = sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(training_of(model, optimizer))
    torch.save(weights(model), folder / f"accelerate-{accelerator.process_index}.pt")


def test_on_two_processes_the_weights_are_those_of_one(tmp_path, expected):
    run_ranks(2, on_two_ranks, tmp_path)
    for name in ("lightning", "accelerate"):
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_the_page_on_lightning_runs():
    assert run("docs/lightning.md")["model"].run.finished


# --- Accelerate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [True, False])
def test_accelerate_may_prepare_everything_or_nothing(prepared, expected):
    accelerator, model = Accelerator(cpu=True), small_model()
    optimizer, data = sgd(model), torch.utils.data.DataLoader(small_data(), 16, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)
    given = model, optimizer, data, schedule
    model, optimizer, data, schedule = accelerator.prepare(*given) if prepared else given
    training = train(training_of(model, optimizer, data, scheduler=schedule))
    assert training.finished
    assert schedule.get_last_lr() == [pytest.approx(0.01)]
    assert torch.equal(weights(model), expected)


@pytest.fixture
def another_accelerator():
    """Accelerate keeps one for a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_mixed_precision_of_accelerate_acts_on_the_losses(another_accelerator):
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), small_model()

    def own(model, batch):
        with accelerator.autocast():
            return losses(model, batch)

    train(training_of(model, sgd(model), loss=own))
    assert torch.equal(weights(model), plain(in_bf16))


def test_the_page_on_accelerate_runs():
    assert run("docs/accelerate.md")["training"].finished


# --- Hugging Face: test_private_trainer.py, test_trl.py -------------------------------------------------


def test_the_page_on_hugging_face_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run("docs/huggingface.md")
    assert all(names[name].training.finished for name in ("trainer", "tuned", "preferred"))
    logged = [line["epsilon"] for line in names["trainer"].state.log_history if "epsilon" in line]
    assert 0 < logged[0] < logged[-1] <= 8


# --- Opacus, a peer of the tests ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_without_correlation_and_noise_the_weights_are_those_of_opacus():
    """Of its optimizer, on the same batches."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    plan = simple_plan(steps=9, bands=1, noise_multiplier=1e-9)
    assert plan.deviation(0.5) == pytest.approx(0.5e-9)  # as in Opacus: noise multiplier times clip norm
    model, theirs, data = small_model(), GradSampleModule(small_model()), small_data()
    training = Training(model, losses, sgd(model), data, plan, clip_norm=0.5)
    optimizer = DPOptimizer(sgd(theirs), noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=plan.batch_size)
    for step in training:
        batch = [each[training._stepper.sampler.batch(step - 1)] for each in data.tensors]
        optimizer.zero_grad()
        losses(theirs, batch).mean().backward()
        optimizer.step()
        torch.testing.assert_close(weights(model), weights(theirs), rtol=1e-5, atol=1e-6)
    assert training.finished
    assert (weights(model) - weights(small_model())).norm() > 0.1
