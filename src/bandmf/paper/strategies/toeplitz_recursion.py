"""The Toeplitz loss and its gradient by the recursion itself, one step after another, timed on any torch device.

    w_i = (1 - sum_{0 < j < b} theta_j w_{i-j}) / theta_0,      loss = |theta|^2 / n sum_i (n - i) w_i^2.

The gradient is the same recursion run backward over the weighted response, and b dot products. Nothing in the
recursion can be done in parallel but the sum over b terms. `benchmarks/paper_gpu.py` times it on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Recursion = Callable[["Tensor", "Tensor"], "Tensor"]


class Timed(NamedTuple):
    """The loss, its gradient, and the seconds that the loss, and both together, take."""

    loss: float
    gradient: list[float]
    loss_seconds: float
    both_seconds: float


def one_by_one(theta: Tensor, sequence: Tensor) -> Tensor:
    """theta(x)^-1 applied to a sequence of numbers, each step an operation of its own."""
    import torch

    count, reach = len(sequence), len(theta) - 1
    back, scaled = (-theta[1:] / theta[0]).flip(0), sequence / theta[0]
    result = torch.zeros(count + reach, dtype=theta.dtype, device=theta.device)
    for i in range(count):
        result[i + reach] = scaled[i] + back @ result[i : i + reach]
    return result[reach:]


def by_filter(theta: Tensor, sequence: Tensor) -> Tensor:
    """The same in one call of compiled code, on the CPU."""
    import torch
    from scipy.signal import lfilter

    return torch.from_numpy(np.ascontiguousarray(lfilter([1.0], theta.numpy(), sequence.numpy())))


def time_recursion(theta: list[float], steps: int, device: str, recursion: Recursion = by_filter) -> Timed:
    """Loss and gradient at these coefficients; the first call of each is not counted.

    >>> round(time_recursion([1.0, 0.5], 3, "cpu").loss, 6)
    1.692708
    """
    import torch

    coefficients = torch.tensor(theta, dtype=torch.float64, device=device)
    left = torch.arange(steps, 0, -1, dtype=torch.float64, device=device)
    square = coefficients @ coefficients

    def loss() -> tuple[Tensor, Tensor]:
        response = recursion(coefficients, torch.ones_like(left))
        return response, left @ response**2 / steps

    def gradient() -> Tensor:
        response, error = loss()
        adjoint = recursion(coefficients, (2 * left / steps * response).flip(0)).flip(0)
        slope = [-(adjoint[j:] @ response[: steps - j]) for j in range(len(theta))]
        return square * torch.stack(slope) + 2 * coefficients * error

    error, slope = loss()[1], gradient()
    return Timed(float(square * error), slope.tolist(), _seconds(loss, coefficients), _seconds(gradient, coefficients))


def _seconds(work: Callable[[], object], where: Tensor) -> float:
    import torch

    if where.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if where.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
