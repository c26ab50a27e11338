"""The seam between engine and kernels: who takes a step of the schedule, and on which memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from bandmf.noise.normals import GROUP
from bandmf.noise.region import Region
from bandmf.noise.schedule import Step


@dataclass(frozen=True)
class Slice:
    """This rank's part of one tensor: the coordinates in `region`, and their columns of the two matrices."""

    tensor: int
    region: Region
    history: torch.Tensor
    prepared: torch.Tensor

    @property
    def first_group(self) -> int:
        return self.region.start // GROUP

    @property
    def last_group(self) -> int:
        """The first group that has nothing of the slice any more."""
        return -(-(self.region.start + self.region.size) // GROUP)


@dataclass(frozen=True, eq=False)
class Vectors:
    """All slices of one device, side by side in two matrices, so that one pass, or one launch, serves them all."""

    slices: list[Slice]
    history: torch.Tensor
    prepared: torch.Tensor


class Executor(Protocol):
    """Takes the steps of the slices it was made for: in torch operations, or in fused Triton kernels."""

    vectors: Vectors

    def ready(self, step: Step, gradients: list[torch.Tensor], scale: float) -> Callable[[], None]:
        """What takes one step of all slices, whose flat gradients are given in the same order, when it is called.

        All that the host has to work out is done before.
        """

    def prepare(self, matrix: np.ndarray) -> None:
        """prepared = matrix @ history: the look-ahead pass."""

    def all_finite(self, gradient: torch.Tensor) -> torch.Tensor:
        """Whether every entry is finite, as a tensor on the gradient's device."""
