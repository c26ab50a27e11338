"""Lightning and Accelerate around make_private: the weights of a plain loop, and their pages run."""

from __future__ import annotations

import lightning
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional

from bandmf import Key
from bandmf.torch import losses, make_private
from pages import run
from training import same_run, simple_plan, small_data, small_model, weights


def private_of(model, optimizer, data=None, **changes):
    with same_run():
        return make_private(
            model, optimizer, small_data() if data is None else data, simple_plan(steps=9), clip_norm=0.5,
            key=Key(bytes(32)), physical_batch_size=7, **changes,
        )  # fmt: skip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def expected():
    """The weights of a plain loop."""
    model = small_model()
    private = private_of(model, sgd(model))
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.backward(losses.classification(private.model(x), y))
        private.optimizer.step()
    assert private.finished
    return weights(model)


def test_whole_steps_are_counted_and_are_those_of_a_plain_loop(expected):
    model = small_model()
    private = private_of(model, sgd(model))
    assert len(private.step_loader) == 9
    for number, step in enumerate(private.step_loader):
        assert private.steps_taken == number
        batches = 0
        for x, y in step.batches():
            assert len(x) <= 7 or private.stepper.piece.rehearsal
            private.backward(losses.classification(model(x), y))
            batches += 1
        assert not private.optimizer.stepped
        private.optimizer.step()
        assert batches > 8 or number > 0  # the rehearsals are in the first step
    assert private.steps_taken == 9
    assert torch.equal(weights(model), expected)


def test_a_step_that_is_left_in_the_middle_is_noticed(expected):
    model = small_model()
    private = private_of(model, sgd(model), self_test=False)
    steps = iter(private.step_loader)
    for x, y in next(steps).batches():
        private.backward(losses.classification(model(x), y))
        break
    with pytest.raises(RuntimeError, match="a batch of step 0 was skipped"):
        next(steps)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = small_model()

    def configure_optimizers(self):
        self.private = private_of(self, sgd(self))
        return self.private.optimizer

    def train_dataloader(self):
        return self.private.step_loader

    def training_step(self, step, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in step.batches():
            self.private.backward(losses.classification(self.net(x), y))
        optimizer.step()


def test_lightning_trains_what_a_plain_loop_trains(expected):
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=9, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module)
    assert trainer.global_step == module.private.steps_taken == 9
    assert torch.equal(weights(module), expected)


class Automatic(lightning.LightningModule):
    """As Lightning's own pages have it: private.loader gives the batches, and Lightning counts them."""

    def __init__(self, **options):
        super().__init__()
        self.net, self.options, self.checked = small_model(), options, 0

    def configure_optimizers(self):
        plan = simple_plan(steps=6, examples=60, batch_size=20, bands=1)
        self.private = make_private(self, sgd(self), small_data(60), plan, clip_norm=0.5, **self.options)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.private.optimizer, 1.0, 0.0, plan.steps)
        return [self.private.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    def train_dataloader(self):
        return self.private.loader

    def training_step(self, batch, number):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(small_data(10), 10)

    def validation_step(self, batch, number):
        self.checked += not self.trainer.sanity_checking


def fit(module, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet, **options).fit(
        module
    )


@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_lightnings_automatic_optimization_takes_all_steps(reload):
    module = Automatic()
    fit(module, reload_dataloaders_every_n_epochs=reload)
    assert (module.private.steps_taken, module.private.finished) == (6, True)
    assert (module.schedule.last_epoch, module.schedule.get_last_lr()) == (6, [0.0])
    assert module.checked == 1 + reload  # it evaluates where it knows which batch is the last
    assert len(module.private.loader) == len(module.private.step_loader) == 3


def test_batches_in_pieces_are_not_for_lightning_to_count():
    with pytest.raises(RuntimeError, match="physical_batch_size=4: Lightning counts batches"):
        fit(Automatic(physical_batch_size=4))


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_may_prepare_before_or_after(when, expected):
    accelerator, model = Accelerator(cpu=True), small_model()
    optimizer, data = sgd(model), torch.utils.data.DataLoader(small_data(), 16, shuffle=True)
    if when == "before":
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
    private = private_of(model, optimizer, data)
    model, optimizer = private.model, private.optimizer
    if when == "after":
        model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in private.loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(x), y))
        optimizer.step()
    assert private.finished
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_accelerate_wraps_takes_no_step_of_its_own():
    accelerator, model = Accelerator(cpu=True), small_model()
    wrapped = accelerator.prepare(sgd(model))
    private = private_of(model, wrapped)
    x, y = next(iter(private.loader))
    functional.cross_entropy(model(x), y).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match="its update would have no noise"):
        wrapped.step()
    assert torch.equal(weights(model), before)


def test_a_wrapper_that_wraps_no_optimizer_is_left_alone():
    """An optimizer may have an attribute of that name for something else."""
    model = nn.Linear(8, 3)
    optimizer = sgd(model)
    optimizer.optimizer = "sgd"
    assert private_of(model, optimizer).optimizer.original is optimizer


def test_the_page_on_lightning_runs():
    assert run("docs/lightning.md")["model"].private.finished


def test_the_page_on_accelerate_runs():
    assert run("docs/accelerate.md")["private"].finished


def test_the_page_on_hugging_face_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run("docs/huggingface.md")
    assert names["trainer"].private.finished
    assert names["trainer"].state.log_history[-1]["epsilon"] <= 8
