"""The state of any torch optimizer by parameter name, for checkpoints.

torch's own `get_state_dict` takes a step with zero gradients where the optimizer has no state yet: that advances Adam's
counter, so that saving would change training. Nothing here takes a step. A template to load into is made from what the
checkpoint says it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bandmf import _check


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """`optimizer.state_dict()` with names for numbers; tensors of its state share its memory.

    Settings of the groups are in a tuple, which torch.distributed.checkpoint keeps as one object.
    """
    packed, parameters = optimizer.state_dict(), list(named(optimizer, model).items())
    state, rest = {}, {}
    for number, values in packed["state"].items():
        if isinstance(number, int) and number < len(parameters):
            name, parameter = parameters[number]
            state[name] = {key: _writable(value, parameter) for key, value in values.items()}
        else:
            rest[number] = values
    others = {name: value for name, value in packed.items() if name not in ("state", "param_groups")}
    return {"state": state, "settings": (packed["param_groups"], rest, others)}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any], settings: bool = True
) -> None:
    """Bring an optimizer to where `optimizer_state` was taken; without `settings`, keep those of its groups."""
    groups, rest, others = saved["settings"]
    kind, added = type(optimizer).__name__, {"params", "initial_lr"}  # the latter by schedules
    for mine, theirs in zip(optimizer.param_groups, groups, strict=False):
        if different := (mine.keys() ^ theirs.keys()) - added:
            raise _check.fail(
                "optimizer", kind, f"is not what the run began with: {', '.join(sorted(different))} differ",
                "construct it as it was, with the scheduler that it had, or begin a new run in another folder",
            )  # fmt: skip
    state: dict[Any, Any] = dict(rest)
    for number, (name, parameter) in enumerate(named(optimizer, model).items()):
        if name in saved["state"]:
            state[number] = {key: _usable(value, parameter) for key, value in saved["state"][name].items()}
    if not settings:
        groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups, **others})


def template(like: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor for a value of a parameter's state to be loaded into, spread over ranks as the parameter is."""
    if isinstance(like, DTensor) and size == like.shape:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(size, dtype=dtype)


def named(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's parameters by name, in its order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names.get(id(p), f"parameter {number}"): p for number, p in enumerate(ordered)}


def _writable(value: Any, parameter: Tensor) -> Any:
    """Values of other shapes than the parameter's (factored moments) are small, and written whole."""
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        return value.full_tensor()
    return value


def _usable(value: Any, parameter: Tensor) -> Any:
    """The counterpart of `_writable`; counters are plain tensors with every kind of parameter."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        whole = value.to(parameter.device)
        return DTensor.from_local(whole, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return value
