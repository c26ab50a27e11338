"""Losses beyond one pass, ported: distillation, weights of tasks, gradients to the inputs, several views."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bandmf.torch import Training, rows
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan, toy_images


def network(width=8, classes=4):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1), nn.GroupNorm(2, width), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, classes)
    )


def trained(model, losses, optimizer, data, **options):
    """An ordinary loop that logs."""
    training, log = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0, **options), []
    for step in training:
        if step % 4 == 0:
            log.append((step, mean_loss(model, losses, data)))
    assert training.finished
    assert [step for step, _ in log] == [4, 8, 12]
    return log[-1][1]


# --- distillation -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_distillation_from_a_frozen_teacher():
    """A public teacher with batch norms, in eval mode: soft targets at a temperature, and hard labels."""
    torch.manual_seed(0)
    data, temperature, alpha = toy_images(), 3.0, 0.7
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    images, labels = data.tensors
    public = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(20):
        public.zero_grad()
        functional.cross_entropy(teacher(images), labels).backward()
        public.step()
    teacher.eval().requires_grad_(False)
    student = network()

    def losses(student, batch):
        images, labels = batch
        with torch.no_grad():
            soft = functional.softmax(teacher(images) / temperature, dim=1)
        logits = student(images)
        close = functional.kl_div(functional.log_softmax(logits / temperature, 1), soft, reduction="none").sum(1)
        hard = functional.cross_entropy(logits, labels, reduction="none")
        return alpha * temperature**2 * close + (1 - alpha) * hard

    assert_first_sum_is_autograds(student, losses, data)
    before, held = mean_loss(student, losses, data), [p.clone() for p in teacher.parameters()]
    optimizer = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9)
    assert trained(student, losses, optimizer, data) < 0.9 * before
    assert all(torch.equal(a, b) for a, b in zip(held, teacher.parameters(), strict=True))


# --- several tasks ------------------------------------------------------------------------------------------------


class TwoTasks(nn.Module):
    """A body, two heads, and the logarithm of the uncertainty of each task."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.kind, self.brightness = nn.Linear(16, 4), nn.Linear(16, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        features = self.body(x)
        return self.kind(features), self.brightness(features).squeeze(1)


def test_weights_of_tasks_are_learned():
    """Kendall's: exp(-s) loss + s for each task, s a bare parameter of the model; two ways to write it."""
    torch.manual_seed(0)
    images, labels = toy_images().tensors
    data, model = TensorDataset(images, labels, images.mean((1, 2, 3))), TwoTasks()

    def stacked(model, batch):
        images, labels, brightness = batch
        kind, level = model(images)
        each = torch.stack([functional.cross_entropy(kind, labels, reduction="none"), (level - brightness) ** 2], 1)
        return (torch.exp(-model.log_vars) * each + model.log_vars).sum(1)

    def one_by_one(model, batch):
        images, labels, brightness = batch
        kind, level = model(images)
        each = functional.cross_entropy(kind, labels, reduction="none"), (level - brightness) ** 2
        return sum(torch.exp(-s) * loss + 0.5 * s for s, loss in zip(model.log_vars, each, strict=True))

    assert_first_sum_is_autograds(model, stacked, data)
    assert_first_sum_is_autograds(model, one_by_one, data)
    before = mean_loss(model, stacked, data)
    assert trained(model, stacked, torch.optim.Adam(model.parameters(), lr=1e-2), data) < 0.9 * before
    assert bool((model.log_vars != 0).all())


# --- gradients to the inputs --------------------------------------------------------------------------------------


@pytest.mark.long
def test_attacked_inputs_by_an_inner_gradient():
    """Adversarial training: the loss takes a gradient to the inputs first, which is not recorded."""
    torch.manual_seed(0)
    data, model = toy_images(), network()

    def losses(model, batch):
        images, labels = batch
        attacked = images.clone().requires_grad_(True)
        loss = functional.cross_entropy(model(attacked), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, attacked)
        worse = images + 0.05 * gradient.sign()
        return functional.cross_entropy(model(worse), labels, reduction="none")

    def evaluated(model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="none")

    assert_first_sum_is_autograds(model, losses, data)
    before = mean_loss(model, evaluated, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    training = Training(model, losses, optimizer, data, quiet_plan(data), clip_norm=1.0)
    for _ in training:
        pass
    assert training.finished
    assert mean_loss(model, evaluated, data) < 0.9 * before


def penalized(model, batch):
    """A critic whose gradient to the input has norm one, as WGAN-GP wants it of each example."""
    images, labels = batch
    given = images.clone().requires_grad_(True)
    scores = model(given).gather(1, labels[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(scores.sum(), given, create_graph=True)
    return functional.softplus(-scores) + 0.1 * (gradient.flatten(1).norm(dim=1) - 1) ** 2


def test_a_penalty_on_the_gradient_trains_one_by_one(caplog):
    """Its second derivatives bypass the recorded layers."""
    torch.manual_seed(0)
    data, model = toy_images(), network()
    before = float(penalized(model, data[:]).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in Training(model, penalized, optimizer, data, quiet_plan(data), clip_norm=1.0):
        pass
    assert float(penalized(model, data[:]).mean()) < 0.9 * before
    assert "is 'one-by-one' here" in caplog.text


@pytest.mark.long
def test_a_penalty_on_the_gradient_trains_by_vmap():
    """With torch.func's gradient to the input of one example, which vmap can differentiate again."""
    torch.manual_seed(0)
    data, model = toy_images(), network()

    def losses(model, batch):
        images, labels = batch

        def score(given):
            return model(given).gather(1, labels[:, None]).squeeze(1).sum()

        gradient = torch.func.grad(score)(images)
        scores = model(images).gather(1, labels[:, None]).squeeze(1)
        return functional.softplus(-scores) + 0.1 * (gradient.flatten(1).norm(dim=1) - 1) ** 2

    before = mean_loss(model, losses, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    assert trained(model, losses, optimizer, data, clipping="vmap") < 0.9 * before


# --- several views of an example ----------------------------------------------------------------------------------


def shifted(images, shifts):
    """Each image moved to the side by its own number of pixels, around the edge."""
    columns = (torch.arange(images.shape[3], device=images.device) - shifts[:, None]) % images.shape[3]
    return images.gather(3, columns[:, None, None].expand_as(images))


def test_augmentations_of_an_example_count_for_it():
    """Three views of each example in one pass; the loss of an example is the mean over its views."""
    torch.manual_seed(0)
    data, model, views = toy_images(), network(), 3

    def of_views(model, images, labels, shifts):
        with rows(each=views):
            logits = model(shifted(images.repeat_interleave(views, 0), shifts.flatten()))
        each = functional.cross_entropy(logits, labels.repeat_interleave(views), reduction="none")
        return each.view(-1, views).mean(1)

    def losses(model, batch):
        images, labels = batch
        return of_views(model, images, labels, torch.randint(-1, 2, (len(images), views), device=images.device))

    draws = TensorDataset(*data.tensors, torch.randint(-1, 2, (64, views)))
    assert_first_sum_is_autograds(model, lambda model, batch: of_views(model, *batch), draws)
    before = mean_loss(model, losses, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    assert trained(model, losses, optimizer, data, micro_batch=6) < 0.9 * before
