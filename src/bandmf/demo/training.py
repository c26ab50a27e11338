"""The demo's experiment: one private training run on images, with its accuracy along the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bandmf.demo.datasets import Images
from bandmf.planning import Plan
from bandmf.torch.training.training import Training

GLANCE = 2000  # test images for the accuracy along the way; at the end all of them are judged
# (step, accuracy on the test images where it was measured). The test images are not protected.
Listener = Callable[[int, float | None], None]


@dataclass(frozen=True)
class History:
    """Test accuracy after some of the steps: on some of the images, and after the last on all."""

    steps: tuple[int, ...]
    accuracies: tuple[float, ...]

    @property
    def final(self) -> float:
        return self.accuracies[-1]


def classifier(images: Images) -> nn.Module:
    """A small network for these images: convolutions for large ones, one hidden layer for small ones."""
    height = images.train.shape[1]
    if height < 16:
        return nn.Sequential(nn.Flatten(1), nn.Linear(height * height, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(1),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def train(
    images: Images,
    plan: Plan,
    learning_rate: float,
    seed: int,
    *,
    momentum: float = 0.9,
    clip_norm: float = 1.0,
    evaluations: int = 10,
    device: str = "cpu",
    listen: Listener | None = None,
) -> History:
    """Train a classifier as the plan says. The seed fixes the first weights, never noise or batches."""
    torch.manual_seed(seed)
    if images.train.shape[1] < 16:
        torch.set_num_threads(1)  # on a network this small threads only wait for each other
    model = classifier(images).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    data = torch.utils.data.TensorDataset(_pixels(images.train), torch.from_numpy(images.train_labels))
    training = Training(model, _losses, optimizer, data, plan, clip_norm=clip_norm)
    measure = np.unique(np.linspace(plan.steps / evaluations, plan.steps, evaluations).astype(int))
    steps, accuracies = [], []
    for step in training:
        accuracy = None
        if step in measure:
            accuracy = _accuracy(model, images, None if training.finished else GLANCE)
            steps.append(step)
            accuracies.append(accuracy)
        if listen is not None:
            listen(step, accuracy)
    return History(tuple(steps), tuple(accuracies))


def _losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def _pixels(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images)[:, None].float() - 0.5


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images, count: int | None) -> float:
    """On the first so many test images, or on all."""
    device = next(model.parameters()).device
    test, labels = images.test[:count], torch.from_numpy(images.test_labels[:count])
    right = 0
    for start in range(0, len(test), 1000):
        guesses = model(_pixels(test[start : start + 1000]).to(device)).argmax(1).cpu()
        right += int((guesses == labels[start : start + 1000]).sum())
    return right / len(test)
