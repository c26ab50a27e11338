"""Private training of many small models at once: clip each example's gradient, add up, add correlated noise, step.

All models of a call share first weights, batches and the draw of the noise; each has its own noise multiplier and
learning rate. What tells two of them apart is then the setting, not luck.

The noise comes from torch.randn: these runs ask what noise does to learning, and make no claim of privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bandmf.paper.training.tiny_transformer import Sizes, example_gradients
from bandmf.strategies import Strategy
from bandmf.strategies.base import BufferRecurrence, OutputRecurrence

MOMENTUM = 0.9
ADAM = (0.9, 0.999, 1e-8)


class CorrelatedNoise:
    """y = C^-1 z, one step at a time; z is a row of independent normal draws."""

    def __init__(self, strategy: Strategy, size: int, device: torch.device) -> None:
        recurrence = strategy.recurrence
        if isinstance(recurrence, OutputRecurrence):
            self._next: _Ring | _Buffers = _Ring(recurrence, strategy.steps, size, device)
        elif isinstance(recurrence, BufferRecurrence):
            self._next = _Buffers(recurrence, size, device)
        else:
            raise TypeError(f"strategy={strategy!r}: its inverse is neither banded in C nor buffered")

    def step(self, z: Tensor) -> Tensor:
        return self._next(z)


class _Ring:
    """Banded C: a ring of the last bands - 1 outputs, where slot j holds that of the last step congruent to j."""

    def __init__(self, recurrence: OutputRecurrence, steps: int, size: int, device: torch.device) -> None:
        slots = recurrence.bands - 1
        weights, diagonal = np.zeros((steps, slots)), np.empty(steps)
        for i in range(steps):
            row = recurrence.row(i)
            diagonal[i] = row[0]
            if slots:
                weights[i, (i - np.arange(1, slots + 1)) % slots] = row[1:]
        self._weights = torch.tensor(weights / diagonal[:, None], dtype=torch.float32, device=device)
        self._diagonal = diagonal
        self._ring = torch.zeros(slots, size, device=device)
        self._step = 0

    def __call__(self, z: Tensor) -> Tensor:
        i, slots = self._step, len(self._ring)
        y = z / self._diagonal[i]
        if slots:
            y -= self._weights[i] @ self._ring
            self._ring[i % slots] = y
        self._step += 1
        return y


class _Buffers:
    """BLT: y = z - scales . x, then x <- decays x + y."""

    def __init__(self, recurrence: BufferRecurrence, size: int, device: torch.device) -> None:
        self._scales = torch.tensor(recurrence.scales, dtype=torch.float32, device=device)
        self._decays = torch.tensor(recurrence.decays, dtype=torch.float32, device=device)[:, None]
        self._x = torch.zeros(len(recurrence.scales), size, device=device)

    def __call__(self, z: Tensor) -> Tensor:
        y = z - self._scales @ self._x
        self._x.mul_(self._decays).add_(y)
        return y


class Momentum:
    """SGD with momentum: m <- 0.9 m + gradient."""

    def __init__(self, like: Tensor) -> None:
        self._m = torch.zeros_like(like)

    def direction(self, gradient: Tensor) -> Tensor:
        return self._m.mul_(MOMENTUM).add_(gradient)


class Adam:
    """Adam (Kingma and Ba 2015)."""

    def __init__(self, like: Tensor) -> None:
        self._m, self._v, self._steps = torch.zeros_like(like), torch.zeros_like(like), 0

    def direction(self, gradient: Tensor) -> Tensor:
        first, second, epsilon = ADAM
        self._steps += 1
        self._m.lerp_(gradient, 1 - first)
        self._v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (self._v / (1 - second**self._steps)).sqrt_().add_(epsilon)
        return (self._m / (1 - first**self._steps)).div_(root)


OPTIMIZERS: dict[str, Callable[[Tensor], Momentum | Adam]] = {"momentum": Momentum, "adam": Adam}


@dataclass(frozen=True)
class Training:
    """What all models of a call have in common."""

    sizes: Sizes
    strategy: Strategy
    optimizer: str
    batch: int
    clip_norm: float
    seed: int


def train(training: Training, numbers: Tensor, noise_scales: Tensor, rates: Tensor, steps: int | None = None) -> Tensor:
    """The parameters of all models after training on the text `numbers`, (M, parameters).

    `noise_scales` are noise multiplier times sensitivity, in clip norms; with `rates`, one for each model.
    """
    device, sizes = numbers.device, training.sizes
    steps = training.strategy.steps if steps is None else steps
    choice = torch.Generator().manual_seed(training.seed)
    flat = sizes.initial(choice).to(device).repeat(len(rates), 1)
    starts = torch.randint(len(numbers) - sizes.context, (steps, training.batch), generator=choice).to(device)
    windows = starts[..., None] + torch.arange(sizes.context + 1, device=device)
    draws = torch.Generator(device).manual_seed(training.seed + 1_000_000)
    noise = CorrelatedNoise(training.strategy, sizes.parameters, device)
    optimizer = OPTIMIZERS[training.optimizer](flat)
    scales = (noise_scales * training.clip_norm)[:, None]
    for window in windows:
        total = clipped_sums(sizes, flat, numbers[window], training.clip_norm)
        y = noise.step(torch.randn(sizes.parameters, generator=draws, device=device))
        total.addcmul_(scales, y[None]).div_(training.batch)
        flat.addcmul_(rates[:, None], optimizer.direction(total), value=-1)
    return flat


def clipped_sums(sizes: Sizes, flat: Tensor, tokens: Tensor, clip_norm: float) -> Tensor:
    """The sum over the examples of their clipped gradients, for each model, (M, parameters)."""
    found = example_gradients(sizes, flat, tokens)
    norms = torch.stack([torch.linalg.vector_norm(each, dim=-1) for each in found.values()])
    factors = (clip_norm / torch.linalg.vector_norm(norms, dim=0)).clamp(max=1.0)
    return torch.cat([torch.bmm(factors[:, None], each)[:, 0] for each in found.values()], dim=1)
