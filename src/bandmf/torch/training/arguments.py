"""What Training is given, checked before anything is opened."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bandmf import _check
from bandmf.planning import Plan
from bandmf.torch.clipping.protocol import Losses
from bandmf.torch.training.ranks import Ranks
from bandmf.torch.training.step import Stepper
from bandmf.torch.training.trained import Trained

log = logging.getLogger("bandmf")

_MOST_PADDING = 1.25  # times the memory limit


def checked_model(model: Any) -> nn.Module:
    if isinstance(model, DistributedDataParallel):
        model = model.module  # the library adds up over the ranks, after clipping
    if not isinstance(model, nn.Module):
        raise _check.fail(
            "model", type(model).__name__, "must be a torch.nn.Module",
            "the order is Training(model, losses, optimizer, data, plan, ...)",
        )  # fmt: skip
    return model


def checked_function(value: Any) -> Losses:
    if not callable(value) or isinstance(value, nn.Module | torch.optim.Optimizer):
        raise _check.fail(
            "losses", type(value).__name__, "must be a function (model, batch) that gives one loss for each example",
            'such as: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")',
        )  # fmt: skip
    return value


def note_modes(model: nn.Module) -> None:
    """A pretrained model comes in eval mode, which silently turns dropout off."""
    if not model.training and any(isinstance(each, nn.Dropout) and each.p for each in model.modules()):
        log.warning(
            "model: is in eval mode, so it is trained without dropout; call model.train() before Training if that is "
            "not meant"
        )


def check_memory(plan: Plan, trained: Trained, ranks: Ranks) -> None:
    """What the plan says of the noise's memory must be true of this model and these ranks."""
    count = sum(parameter.numel() for parameter in trained.parameters.values())
    if plan.parameters is not None and plan.parameters != count:
        raise _check.fail("plan.parameters", plan.parameters, f"the model has {count} trainable parameters")
    if plan.memory_limit is not None and plan.devices > ranks.world:
        raise _check.fail(
            "plan.devices", plan.devices, f"the noise is shared by {ranks.world} ranks, so it needs more memory"
        )


def check_allocated(plan: Plan, stepper: Stepper) -> None:
    """Many tiny tensors are padded to more than they hold: that must not pass the plan's limit by much."""
    vectors = [executor.vectors for executor in stepper.noise.executors.values()]
    held = sum(each.history.nbytes + each.prepared.nbytes for each in vectors)
    if plan.memory_limit is not None and held > _MOST_PADDING * plan.memory_limit:
        raise _check.fail(
            "plan.memory_limit", plan.memory_limit,
            f"the noise of this model takes {held} bytes, as each of its many small tensors is padded",
            "plan with fewer bands, or a larger memory=",
        )  # fmt: skip
