"""What a Trainer sees of the run's optimizer and schedule: everything, but its own calls of `step` do nothing."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class OptimizerView:
    """The optimizer of a run, which takes its steps. It is none of torch's, so that nothing wraps it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._real = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The real ones: a learning rate that is set here is that of the next update."""
        return self._real.param_groups

    @property
    def state(self) -> Any:
        return self._real.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self._real.defaults

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def step(self, closure: Any = None) -> None:
        """The run has taken the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The run leaves no gradients behind."""


class ScheduleView:
    """The schedule of a run, which steps it; its rates are those of the last update, as a Trainer logs them."""

    def __init__(self, schedule: LRScheduler) -> None:
        self._real = schedule
        self.note()

    def note(self) -> None:
        """Remember the rates with which the next update is made."""
        self._rates = self._real.get_last_lr()

    def get_last_lr(self) -> list[Any]:
        return self._rates

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def step(self, *_: Any) -> None:
        """The run has stepped it."""
