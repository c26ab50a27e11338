"""Averages of the weights, as timm and torch have them: updated in the loop, evaluated, saved and restored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan, toy_images


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(128, 4)
    )


def losses(model, batch):
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


class ModelEma(nn.Module):
    """The way of timm's ModelEmaV2: a deep copy in eval mode, whose whole state follows the model's."""

    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        both = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for average, value in both:
            average.copy_(self.decay * average + (1 - self.decay) * value)


def ema_run(folder):
    data, model = toy_images(), network()
    ema = ModelEma(model, decay=0.7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    training = Training(
        model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0, folder=folder, also={"ema": ema}
    )
    return training, ema, data


def test_model_ema_follows_and_comes_back(tmp_path):
    """timm's way: updated after each step, evaluated beside the model, restored with the checkpoint."""
    training, ema, data = ema_run(tmp_path)
    before = mean_loss(ema.module, losses, data)
    assert_first_sum_is_autograds(copy.deepcopy(training.model).eval(), losses, data)
    for step in training:
        ema.update(training.model)
        if step == 5:
            training.close()
            break
    at_five = copy.deepcopy(ema.state_dict())
    training, ema, data = ema_run(tmp_path)
    assert training.steps_taken == 5
    torch.testing.assert_close(ema.state_dict(), at_five, rtol=0, atol=0)
    for _ in training:
        ema.update(training.model)
    assert training.finished
    assert not ema.module.training
    assert training.model.training
    assert mean_loss(ema.module, losses, data) < 0.9 * before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_model_of_torch(kind):
    """torch.optim.swa_utils: an exponential average, and SWA with its own schedule for the last steps."""
    data, model = toy_images(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    multi = get_ema_multi_avg_fn(0.7) if kind == "ema" else None
    averaged, start = AveragedModel(model, multi_avg_fn=multi), 1 if kind == "ema" else 7
    swa_scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=2) if kind == "swa" else None
    before = mean_loss(model, losses, data)
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0, also={"averaged": averaged})
    for step in training:
        if step >= start:
            averaged.update_parameters(model)
            if swa_scheduler is not None:
                swa_scheduler.step()
    assert training.finished
    assert int(averaged.n_averaged) == 12 - start + 1
    assert mean_loss(averaged, losses, data) < 0.9 * before
