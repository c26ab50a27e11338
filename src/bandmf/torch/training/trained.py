"""What a run trains: model, optimizers and schedules, as they are in a step and as the loop has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bandmf import _check

_WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")
Schedule = LRScheduler | Callable[[int], float]


class Stateful(Protocol):
    """What is saved beside the model: an average, a generator and its optimizer, counters of a loop."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Trained:
    """The model in the modes it had at the start, and the parameters that its optimizers hold."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        also: Mapping[str, Stateful],
    ) -> None:
        self.model, self.optimizers, self.schedules, self.also = model, optimizers, schedules, also
        self.parameters = _held(model, optimizers)
        self._modes = [(module, module.training) for module in model.modules()]

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Modes of the start; gradients for what is trained and nothing else. After it all is as the loop had it."""
        modes = [(module, module.training) for module, _ in self._modes]
        wants = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        trained = {id(parameter) for parameter in self.parameters.values()}
        for module, mode in self._modes:
            module.training = mode
        for parameter, _ in wants:
            parameter.grad = None  # a stale one of the loop's, without noise
            if parameter.requires_grad != (id(parameter) in trained):
                parameter.requires_grad_(id(parameter) in trained)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, want in wants:
                parameter.grad = None
                if parameter.requires_grad != want:
                    parameter.requires_grad_(want)

    def set_rates(self, step: int) -> None:
        """Those that functions give, before a step is released: a rate that is no rate fails here."""
        for schedule in self.schedules:
            if not isinstance(schedule, LRScheduler):
                _set_rates(self.optimizers, _check.real("scheduler's rate", float(schedule(step)), 0))

    def update(self, means: Mapping[str, Tensor]) -> None:
        """Let the optimizers take one step with these private gradients, then the schedules."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()  # what else it holds has no noise
        for name, parameter in self.parameters.items():
            parameter.grad = _like(parameter, means[name])
        for optimizer in self.optimizers:
            optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Advances the schedules by one step."""
        for schedule in self.schedules:
            if isinstance(schedule, LRScheduler):
                schedule.step()

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether all trained weights are."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters.values()]
        return all(bool(torch.isfinite(part).all()) for part in local)


def _set_rates(optimizers: Sequence[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = float(rate)


def _like(parameter: Tensor, mean: Tensor) -> Tensor:
    """A local gradient as the parameter wants it: its dtype, and a DTensor where it is one."""
    mean = mean.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(mean, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return mean


# --- what the user gives ----------------------------------------------------------------------------------


def checked_optimizers(given: Any) -> list[Optimizer]:
    """One or several optimizers of torch, without what accelerate or Lightning have wrapped around them."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    found: list[Any] = [each.optimizer if type(each).__name__ in _WRAPPERS else each for each in several]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise _check.fail(
                "optimizer", type(optimizer).__name__, "must be a torch.optim.Optimizer, or a list of them",
                "the order is Training(model, losses, optimizer, data, plan, ...)",
            )  # fmt: skip
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise _check.fail("optimizer", "SparseAdam", "needs sparse gradients, and noise is dense", "use Adam")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _check.fail(
                "optimizer", "LBFGS", "evaluates a batch several times", "use one that takes one step for a batch"
            )
    if not found:
        raise _check.fail("optimizer", given, "must be at least one optimizer")
    return found


def checked_schedules(given: Any, optimizers: Sequence[Optimizer]) -> list[Schedule]:
    """Schedulers of torch, for these optimizers, or functions from the number of steps taken to a rate."""
    several = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    found = [getattr(each, "scheduler", each) for each in several]  # accelerate wraps these, too
    for schedule in found:
        if isinstance(schedule, ReduceLROnPlateau):
            raise _check.fail(
                "scheduler", "ReduceLROnPlateau", "wants a measure of the loop's",
                "leave scheduler= out, and call its step(measure) in the loop's body",
            )  # fmt: skip
        if isinstance(schedule, LRScheduler) and schedule.optimizer not in optimizers:
            raise _check.fail("scheduler", type(schedule).__name__, "is for another optimizer", "make it from this one")
        if not isinstance(schedule, LRScheduler) and not callable(schedule):
            raise _check.fail(
                "scheduler", type(schedule).__name__,
                "must be a scheduler of torch, or a function from the number of steps taken to a learning rate",
            )  # fmt: skip
    return found


def checked_also(given: Mapping[str, Any] | None) -> dict[str, Stateful]:
    if given is not None and not isinstance(given, Mapping):
        raise _check.fail("also", type(given).__name__, "must map names to objects", 'such as {"average": average}')
    for name, value in (given or {}).items():
        if not (isinstance(name, str) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise _check.fail(
                "also", {name: type(value).__name__}, "must map names to objects with state_dict and load_state_dict"
            )
    return dict(given or {})


def _held(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters that the optimizers hold and that want gradients, by their name in the model."""
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    found = {name: p for name, p in model.named_parameters() if id(p) in held and p.requires_grad}
    known = {id(p) for p in model.parameters()}
    if any(p.requires_grad and number not in known for number, p in held.items()):
        raise ValueError(
            "optimizer: holds parameters that are not the model's, whose updates would have no noise; make it from "
            "model.parameters(), and put what belongs to the loss (weights of tasks, temperatures) into the model"
        )
    if not found:
        raise ValueError("optimizer: holds no trainable parameter of the model; make it from model.parameters()")
    return found
