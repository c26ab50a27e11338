"""Book-keeping clipping: one backward pass, then norms and the clipped sum from what it recorded.

Guarantees:
- what one example adds to the sums has norm at most clip_norm, whatever model and losses do, up to the rounding of
  the last digit: the same recorded tensors give its norm and its part of the sum;
- an example whose gradient is not finite adds nothing;
- nothing else reaches the sums: a gradient that bypasses the recorded layers is an error that names the parameter;
- after a pass, and after one that failed, the model is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bandmf.torch.clipping.adding import Adder, count_places, pack
from bandmf.torch.clipping.containers import differentiable
from bandmf.torch.clipping.contributions import Contribution, Outer, Pack, Rows, join, write_out_thin
from bandmf.torch.clipping.contributions.totals import Totals
from bandmf.torch.clipping.norms import Terms
from bandmf.torch.clipping.passes import backward, wanted_gradients
from bandmf.torch.clipping.products import widened
from bandmf.torch.clipping.protocol import Copies, Losses, Parameters, checked_losses
from bandmf.torch.clipping.recording.layers import frozen_words, layers_of
from bandmf.torch.clipping.recording.recorder import Recorder
from bandmf.torch.clipping.recording.shared import Shared, rows_of
from bandmf.torch.clipping.refusals import unrecorded
from bandmf.torch.noise.precision import plain_arithmetic


class Bookkeeping:
    """The clipping of a model whose layers can be described."""

    def __init__(self, model: nn.Module, parameters: Parameters, clip_norm: float, per_layer: bool) -> None:
        self._model, self._parameters = model, parameters
        self._adder = Adder(parameters, clip_norm, per_layer)
        self.layers, self._bare = layers_of(model, {id(p): name for name, p in parameters.items()})
        self._recorded = [*self.layers, *frozen_words(model, self.layers, self._bare)]
        self._recorder = Recorder()
        self.is_slow = False  # whether, for each example, all of them are computed again

    def explain(self) -> str:
        by_function = [layer.path for layer in self.layers if layer.by_function]
        rest = f"; parameters of {len(self._bare)} modules followed through operations" if self._bare else ""
        rest += f"; by torch.func, at more cost: {', '.join(by_function)}" if by_function else ""
        return f"book-keeping, {len(self.layers) - len(by_function)} layers by rules{rest}"

    def learn(self, losses: Losses, batches: Callable[[], Sequence[tuple[Copies, Copies]]]) -> None:
        """See, from batches of copies, what has a row for each example."""

        def run(several: tuple[Copies, Copies]) -> None:
            for batch, examples in several:
                with self._recorder.of(self._recorded, (), examples):
                    losses(self._model, batch)

        device = next(iter(self._parameters.values())).device
        with wanted_gradients(self._model, self._parameters):
            for pair in batches():
                self._recorder.calls.look(partial(run, pair), device)

    def add_to(self, sums: dict[str, Tensor], losses: Losses, batch: Any, examples: int, valid: int) -> Tensor:
        """Add the clipped gradients of the first `valid` examples; how many of them were not finite."""
        recorder = self._recorder
        with wanted_gradients(self._model, self._parameters), recorder.of(self._recorded, self._bare, examples):
            given = differentiable(batch) if self._bare else batch
            found = losses(self._model, given)
            self.is_slow = isinstance(found, Shared)
            each = checked_losses(rows_of(found), examples)
            recorder.listen()
            backward(each, () if self._adder.sharded else self._parameters.values())
            with plain_arithmetic():
                return self._adder.add(sums, *self._terms(examples), valid)

    def _terms(self, examples: int) -> tuple[list[Pack], Terms]:
        """What was recorded, by parameter: small gradients in packs, one for each device, and the rest."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise unrecorded(name)
        terms: Terms = {}
        for described in self._recorder.settle():
            for name, contribution in described.items():
                assert not isinstance(contribution, Totals)  # all are settled
                self._check_shape(name, contribution, examples)
                # Sums of half-precision tensors would be rounded as a whole, by what all examples are.
                wider = widened(contribution) if isinstance(contribution, Tensor) else contribution
                terms.setdefault(name, []).append(wider)
        if not terms:
            raise ValueError(
                "losses: must depend on the parameters that are trained, and none of them was used; activation "
                "checkpointing needs use_reentrant=False"
            )
        joined = {name: join(several) for name, several in sorted(terms.items())}
        written = write_out_thin(joined)
        count_places(written)
        return pack(written)

    def _check_shape(self, name: str, contribution: Contribution, examples: int) -> None:
        """For rules of the user's own."""
        shape = self._parameters[name].shape
        if not _fits(contribution, examples, shape):
            raise ValueError(
                f"rule: that of {name!r} does not give one gradient of shape {tuple(shape)} for each example: add up "
                "over an example's places with bandmf.torch.clipping.total"
            )


def _fits(given: Contribution, examples: int, shape: torch.Size) -> bool:
    """Whether it describes the gradients of so many examples, of a parameter of this shape."""
    if isinstance(given, Tensor):
        return given.ndim > 0 and len(given) == examples and given.numel() == examples * shape.numel()
    if isinstance(given, Outer):
        both = given.left.shape[:2] == given.right.shape[:2] and given.examples == examples
        return both and given.left.shape[2] * given.right.shape[2] == shape.numel()
    if isinstance(given, Rows):
        same = given.values.ndim == 3 and given.indices.shape == given.values.shape[:2]
        return same and given.examples == examples and given.values.shape[2:] == shape[1:]
    return len(given.input) == len(given.gradient) == examples and given.gradient.shape[1] == shape[0]
