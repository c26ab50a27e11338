"""Notices what must not happen between the start of a batch and its step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor, nn

from bandmf.torch.clipping.refusals import refuse_mixing, suspects
from bandmf.torch.noise.shards import local


class Watch:
    """Refuses buffers and parameters that change while a batch is processed: such changes would get no noise."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.named_parameters())
        # The dictionaries themselves, as a module or a buffer may come later or be exchanged for another.
        self._children = [module._modules for module in model.modules()]
        self._modules = self._identities()
        self._buffers = [(path, module._buffers) for path, module in model.named_modules()]
        self._before: list[tuple[int, int]] = []
        self._suspects = suspects(model)
        self._values: dict[str, str] | None = None

    def begin(self, by_value: bool = False) -> None:
        """`by_value` finds changes that torch does not count, through `.data`, at the cost of reading everything."""
        self._before = self._state()
        self._values = self._sketches() if by_value else None

    def check(self) -> None:
        """Fail if anything has changed since `begin`, or mixes examples by now."""
        if self._identities() != self._modules:
            raise RuntimeError(
                "model: its modules are others than at the start of the run; make it whole before make_private"
            )
        changed = self._changed()
        if self._values is not None:
            changed += [name for name, value in self._sketches().items() if self._values.get(name) != value]
        for name in changed:
            raise RuntimeError(
                f"model: {name!r} changed between the start of a batch and its step, by data and without noise; "
                "keep it as it is while training (use nn.GroupNorm in place of running statistics), or change "
                "it after optimizer.step()"
            )
        refuse_mixing(self._suspects)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters
        for path, buffers in self._buffers:
            prefix = f"{path}." if path else ""
            yield from ((f"{prefix}{name}", buffer) for name, buffer in buffers.items() if buffer is not None)

    def _identities(self) -> list[int]:
        return [id(module) for children in self._children for module in children.values()]

    def _state(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for _, tensor in self._tensors()]

    def _changed(self) -> list[str]:
        now = self._state()
        if now == self._before:
            return []
        names = [name for name, _ in self._tensors()]
        both = zip_longest(names, self._before, now, fillvalue=None)
        return [name or "a buffer" for name, before, after in both if before != after]

    @torch.no_grad()
    def _sketches(self) -> dict[str, str]:
        """Sums, as text, in which NaN equals NaN."""
        found = {}
        for name, tensor in self._tensors():
            numbers = local(tensor)
            dtype = torch.complex128 if numbers.is_complex() else torch.float64
            found[name] = (
                f"{numbers.sum(dtype=dtype).item()} {torch.linalg.vector_norm(numbers.to(dtype)).item()}"
            )
        return found
