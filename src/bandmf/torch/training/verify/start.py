"""The start that every pass has, and that verify leaves behind: weights, buffers, modes, gradients, generators."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Start:
    """A context; within it, `changes` says what a pass has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = {name: (each, each.detach().clone()) for name, each in _tensors(model).items()}
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
        now = _tensors(self._model)
        changed: dict[str, Tensor | None] = dict.fromkeys(self._tensors.keys() - now.keys())
        for name, found in now.items():
            if name not in self._tensors or not same_bits(found, self._tensors[name][1]):
                changed[name] = found.detach().clone()
        return changed

    @torch.no_grad()
    def put_back(self) -> None:
        """Not right after a pass, but before the next one: its graph may hold what has changed."""
        now = _tensors(self._model)
        for name in self._tensors.keys() | now.keys():
            tensor, before = self._tensors.get(name, (None, None))
            if now.get(name) is not tensor:
                path, _, own = name.rpartition(".")
                setattr(self._model.get_submodule(path), own, tensor)
            if tensor is not None and before is not None and not same_bits(tensor, before):
                tensor.copy_(before)
        for module, training in self._modes:
            module.training = training


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """NaN is NaN here."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
