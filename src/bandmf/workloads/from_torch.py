"""Reads the numbers of PyTorch optimizers and schedulers, without importing PyTorch: who has one has imported it."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np

from bandmf import _check
from bandmf._types import FloatArray

_SGD = ("SGD", "SGDW")
_ADAM = re.compile(r"(Paged)?Adam(W?)(8bit|32bit)?")
_ALIKE = 1e-6  # relative, of the rates of parameter groups


class Numbers(NamedTuple):
    """Rates and momenta of every step, which all parameter groups share, and the settings of the first group."""

    rates: FloatArray
    momenta: FloatArray
    adam: bool
    coupled: float
    decoupled: float
    nesterov: bool
    dampening: float


def is_optimizer(given: object) -> bool:
    """Whether this is an optimizer of PyTorch."""
    return _has_base(given, "torch.optim.optimizer", "Optimizer")


def is_scheduler(given: object) -> bool:
    """Whether this is a scheduler of PyTorch."""
    return _has_base(given, "torch.optim.lr_scheduler", "LRScheduler")


def _has_base(given: object, module: str, name: str) -> bool:
    return any((base.__module__, base.__name__) == (module, name) for base in type(given).__mro__)


def is_known(optimizer: Any) -> bool:
    """Whether its update is known by its name."""
    name = type(optimizer).__name__
    return name in _SGD or bool(_ADAM.fullmatch(name))


def read(optimizer: Any, scheduler: Any, steps: int, every: int) -> Numbers:
    """The numbers of `steps` steps, the scheduler being stepped after every `every` of them; both stay as they are."""
    name = type(optimizer).__name__
    group, rates, momenta = _followed(optimizer, scheduler, steps, every)
    decay, adam = float(group.get("weight_decay", 0.0)), _ADAM.fullmatch(name)
    if adam:  # decay that is part of the gradient is scaled by the second moment
        decay = decay if group.get("decoupled_weight_decay", bool(adam[2])) else 0.0
        return Numbers(rates, momenta, True, 0.0, decay, False, 0.0)
    decays = (decay, 0.0) if name == "SGD" else (0.0, decay)
    nesterov, dampening = bool(group.get("nesterov")), float(group.get("dampening", 0.0))
    return Numbers(rates, momenta, False, *decays, nesterov, dampening)


def _followed(optimizer: Any, scheduler: Any, steps: int, every: int) -> tuple[dict[str, Any], FloatArray, FloatArray]:
    """The first group that is trained, and the rates and momenta of all its steps, which are those of all others."""
    copied, stepped = _copies(optimizer, scheduler)
    groups = copied.param_groups
    rates, momenta = np.empty((2, len(groups), steps))
    for i in range(steps):
        if i and stepped is None:
            rates[:, i], momenta[:, i] = rates[:, 0], momenta[:, 0]
            continue
        if i and i % every == 0:
            with warnings.catch_warnings():  # that the copied optimizer has not taken a step
                warnings.simplefilter("ignore")
                stepped.step()
        rates[:, i] = [float(group["lr"]) for group in groups]
        momenta[:, i] = [_momentum(group) for group in groups]
    trained = np.flatnonzero(rates.any(axis=1))
    if not len(trained):
        raise ValueError("optimizer: all its learning rates are zero")
    own, others = trained[0], trained[1:]
    shapes = rates[trained] / rates[trained].max(axis=1, keepdims=True)
    alike = np.abs(shapes - shapes[0]).max() <= _ALIKE and np.all(momenta[others] == momenta[own])
    if not alike:
        raise ValueError(
            "optimizer: its parameter groups differ in momentum or in the shape of their schedules, but all get the "
            "same noise; write the workload of the most important one: bandmf.workloads.momentum(steps, ...)"
        )
    return groups[own], rates[own], momenta[own]


def _momentum(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _copies(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """An optimizer of one number in each group with the same settings, and the scheduler, copied, in charge of it."""
    torch = sys.modules["torch"]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    copied = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in settings], lr=0.0)
    for group, own in zip(copied.param_groups, copy.deepcopy(settings), strict=True):
        group.update(own)
    copied.defaults = copy.deepcopy(optimizer.defaults)
    if scheduler is None:
        return copied, None
    if _has_base(scheduler, "torch.optim.lr_scheduler", "ReduceLROnPlateau"):
        raise _check.fail(
            "scheduler", type(scheduler).__name__, "follows the loss, so nobody knows its rates yet", "leave it out"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise _check.fail("scheduler", type(scheduler).__name__, "is in charge of another optimizer")
    if (taken := getattr(scheduler, "last_epoch", 0)) > 0:
        raise _check.fail("scheduler", f"after {taken} steps", "must be as it is before training")
    return copied, copy.deepcopy(scheduler, {id(optimizer): copied})
