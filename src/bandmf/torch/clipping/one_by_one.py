"""clipping="one-by-one": plain autograd, one example at a time, for whatever a program does.

Guarantees:
- what one example adds to the sums has norm at most clip_norm; one that is not finite adds nothing;
- examples are independent by construction: a batch is one example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bandmf import _check
from bandmf.torch.clipping.adding import Adder
from bandmf.torch.clipping.contributions import Pack
from bandmf.torch.clipping.passes import wanted_gradients
from bandmf.torch.clipping.products import widened
from bandmf.torch.clipping.protocol import Copies, Losses, Parameters, checked_losses
from bandmf.torch.noise.precision import plain_arithmetic


class OneByOne:
    """The clipping of any model, in batches of one."""

    is_slow = False

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool) -> None:
        self._model, self._parameters = model, parameters
        self._adder = Adder(parameters, clip_norm, per_layer)
        if self._adder.sharded:
            raise _check.fail("clipping", "one-by-one", "with FSDP2 must be 'auto'")

    def learn(self, losses: Losses, batches: Callable[[], Sequence[tuple[Copies, Copies]]]) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        return "plain autograd, one example at a time"

    def add_to(self, sums: dict[str, Tensor], losses: Losses, batch: Any, examples: int, valid: int) -> Tensor:
        if examples != 1:
            raise _check.fail("clipping", "one-by-one", "needs batches of one example", "give micro_batch=1")
        with wanted_gradients(self._model, self._parameters):
            loss = checked_losses(losses(self._model, batch), 1)[0]
            # To these alone: others' tensors may want gradients, and those have no noise.
            found = torch.autograd.grad(
                loss, list(self._parameters.values()), allow_unused=True, materialize_grads=True
            )
        each = zip(self._parameters, found, strict=True)
        packs = [Pack.of({name: widened(gradient.to_dense()[None])}) for name, gradient in each]
        with torch.no_grad(), plain_arithmetic():
            return self._adder.add(sums, packs, {}, valid)
