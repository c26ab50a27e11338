"""Notices what must not happen between the start of a batch and its step."""

from __future__ import annotations

from torch import Tensor, nn

from bandmf.torch.clipping.refusals import refuse_mixing


class Watch:
    """Refuses buffers and parameters that change while a batch is processed: such changes would get no noise."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.named_parameters())
        # The dictionaries themselves, as a buffer may be exchanged for another tensor.
        self._buffers = [(path, module._buffers) for path, module in model.named_modules() if module._buffers]
        self._before: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        self._before = self._state()

    def check(self) -> None:
        """Fail if anything has changed since `begin`, or mixes examples by now."""
        for name, state in self._state().items():
            if self._before.get(name) != state:
                raise RuntimeError(
                    f"model: {name!r} changed between the start of a batch and its step, by data and without noise; "
                    "keep it as it is while training (use nn.GroupNorm in place of running statistics), or change "
                    "it after optimizer.step()"
                )
        refuse_mixing(self._model)

    def _state(self) -> dict[str, tuple[int, int]]:
        found = {name: _version(parameter) for name, parameter in self._parameters}
        for path, buffers in self._buffers:
            prefix = f"{path}." if path else ""
            found |= {f"{prefix}{name}": _version(b) for name, b in buffers.items() if b is not None}
        return found


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version
