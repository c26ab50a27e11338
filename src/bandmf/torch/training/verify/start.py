"""The start that every pass has, and that verify leaves behind: weights, buffers, numbers, modes, generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_SMALL = 0.05  # a standard deviation of weights


class Start:
    """A context; within it, `changes` says what a pass has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = {name: (each, each.detach().clone()) for name, each in _tensors(model).items()}
        self._numbers = _numbers(model)
        self._modes = [(module, module.training) for module in model.modules()]
        self._wants = [(p, p.requires_grad, p.grad) for p in model.parameters()]

    def __enter__(self) -> Start:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._torch = torch.get_rng_state(), cuda
        self._others: tuple[Any, Any] = random.getstate(), np.random.get_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.put_back()
        for parameter, wants, gradient in self._wants:
            parameter.requires_grad_(wants)
            parameter.grad = gradient
        torch.set_rng_state(self._torch[0])
        if self._torch[1]:
            torch.cuda.set_rng_state_all(self._torch[1])
        self.seed()

    def seed(self) -> None:
        """Python's and NumPy's generators as they were."""
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])

    def drew_elsewhere(self) -> bool:
        now: Any = np.random.get_state()
        same = all(np.array_equal(a, b) for a, b in zip(self._others[1], now, strict=True))
        return random.getstate() != self._others[0] or not same

    def changes(self) -> dict[str, Tensor | None]:
        """What parameters and buffers are that have changed; None: there is none any more."""
        _reshard(self._model)
        now = _tensors(self._model)
        changed: dict[str, Tensor | None] = dict.fromkeys(self._tensors.keys() - now.keys())
        kept = {name: (found, self._tensors[name][1]) for name, found in now.items() if name in self._tensors}
        for name in (now.keys() - kept.keys()) | _unlike(kept):
            changed[name] = now[name].detach().clone()
        before = self._numbers
        for key, value in _numbers(self._model).items():
            if isinstance(value, float) and value != before.get(key):  # whole numbers are lengths and counts
                changed[".".join(filter(None, key))] = torch.tensor(value)
        return changed

    @contextmanager
    def away_from_zero(self) -> Iterator[None]:
        """Where weights begin as zeros, gates are closed, and nothing of what lies behind them shows."""
        before, dice = dict(self._tensors), torch.Generator().manual_seed(0)
        for name, parameter in self._model.named_parameters():
            is_plain = parameter.requires_grad and parameter.is_floating_point() and not isinstance(parameter, DTensor)
            if is_plain and not bool(parameter.any()):
                other = _SMALL * torch.randn(parameter.shape, generator=dice)
                self._tensors[name] = parameter, other.to(parameter)
        try:
            yield
        finally:
            self._tensors = before

    def after(self, changes: dict[str, Tensor | None], name: str) -> Tensor | None:
        """What a parameter or buffer was after a pass with these changes."""
        if name in changes or name not in self._tensors:
            return changes.get(name)
        return self._tensors[name][1]

    @torch.no_grad()
    def put_back(self) -> None:
        """Not right after a pass, but before the next one: its graph may hold what has changed."""
        _reshard(self._model)
        now = _tensors(self._model)
        for name in self._tensors.keys() | now.keys():
            tensor = self._tensors[name][0] if name in self._tensors else None
            if now.get(name) is not tensor:
                path, _, own = name.rpartition(".")
                setattr(self._model.get_submodule(path), own, tensor)
        for name in _unlike(self._tensors):
            tensor, before = self._tensors[name]
            tensor.copy_(before)
        for path, own in _numbers(self._model).keys() - self._numbers.keys():
            delattr(self._model.get_submodule(path), own)
        for (path, own), value in self._numbers.items():
            setattr(self._model.get_submodule(path), own, value)
        for module, training in self._modes:
            module.training = training


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """NaN is NaN here."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _unlike(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> set[str]:
    """Those whose bits differ, with one wait for a GPU where none do."""
    alike = {name: pair for name, pair in pairs.items() if _is_plain(*pair)}
    flags: dict[torch.device, list[Tensor]] = {}
    for one, other in alike.values():
        flags.setdefault(one.device, []).append((one != other).any())
    if not any(bool(torch.stack(several).any()) for several in flags.values()):
        pairs = {name: pair for name, pair in pairs.items() if name not in alike}
    return {name for name, pair in pairs.items() if not same_bits(*pair)}


def _is_plain(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and not isinstance(one, DTensor) and not one.is_cpu


def _reshard(model: nn.Module) -> None:
    """A pass without a backward pass leaves the outermost layers of FSDP2 gathered: other tensors, for a while."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _numbers(model: nn.Module) -> dict[tuple[str, str], int | float | None]:
    """Those that modules keep as attributes, such as a count of passes; None may become one."""
    modules = model.named_modules()
    return {
        (path, own): value
        for path, module in modules
        for own, value in vars(module).items()
        if type(value) in (int, float, type(None))
    }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
