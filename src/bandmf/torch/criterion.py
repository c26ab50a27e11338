"""Losses for ghost clipping, whose backward takes two passes and needs one loss per example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bandmf.torch.ghost import Ghost
from bandmf.torch.run import Run


class GhostLoss:
    """Looks like the mean loss of the batch; `backward` clips."""

    def __init__(self, losses: Tensor, run: Run) -> None:
        self.losses, self._run = losses, run

    def backward(self) -> None:
        assert isinstance(self._run.clipping, Ghost)
        piece = self._run.piece
        self._run.clipping.backward(self.losses, len(piece.indices), piece.valid)

    def detach(self) -> Tensor:
        return self.losses.detach().mean()

    def item(self) -> float:
        return self.detach().item()

    def __float__(self) -> float:
        return self.item()


class GhostCriterion:
    """A criterion that gives one loss per example: that of `criterion` with reduction "none", averaged within."""

    def __init__(self, criterion: Callable[..., Tensor], run: Run) -> None:
        if hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
        self._criterion, self._run = criterion, run

    def __call__(self, *arguments: Any, **named: Any) -> GhostLoss:
        losses = self._criterion(*arguments, **named)
        rows = len(self._run.piece.indices)
        if losses.ndim == 0 or losses.numel() % rows or len(losses) % rows:
            raise ValueError(
                f"criterion: gave losses of shape {tuple(losses.shape)} for {rows} examples; it must not average"
                ' over them: use reduction="none"'
            )
        return GhostLoss(losses.reshape(rows, -1).mean(1), self._run)
