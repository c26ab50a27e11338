"""One private step: sum, ledger, noise, division.

Guarantees:
- every step of the plan releases (sum of clipped gradients + scale * noise) / batch_size, for an empty batch
  too, with scale = clip_norm * plan.noise_scale and the plan's constant batch_size;
- noise is added exactly once per step, and only after the ledger has the step on the disk;
- only batches of the plan's sampler are used, each exactly once; skipping one (which would depend on the data)
  is an error;
- a parameter that was frozen at the start and gets a gradient later is refused, and so is one that is frozen later;
- what the model draws from torch's generators is secret, and a function of key, rank, step and piece (generators.py);
- nothing of the model changes between the start of a batch and its step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bandmf.ledger import Ledger
from bandmf.planning import Plan
from bandmf.randomness.key import Key
from bandmf.randomness.stream import Indices
from bandmf.sampling import Sampler
from bandmf.torch.clipping.protocol import Clipping
from bandmf.torch.clipping.refusals import frozen_later
from bandmf.torch.clipping.watch import Watch
from bandmf.torch.noise.engine import Engine
from bandmf.torch.noise.precision import plain_arithmetic
from bandmf.torch.training.generators import Generators
from bandmf.torch.training.ranks import Ranks
from bandmf.torch.training.self_test import Rehearsal, SelfTest
from bandmf.torch.training.self_test.half import HalfPrecision
from bandmf.torch.training.sums import Sums


@dataclass(frozen=True)
class Piece:
    """One physical batch on this rank: `indices` to load, of which the first `valid` count; the rest pads."""

    step: int
    indices: tuple[int, ...]
    valid: int
    first: bool
    last: bool
    batch: Indices  # all examples of the step, on all ranks
    number: int = 0  # of the physical batches of its step
    rehearsal: Rehearsal | None = None  # a batch of the self-test, of which nothing is kept


class Stepper:
    """The state of a run on this rank, and what happens to a batch after its backward pass."""

    def __init__(
        self,
        plan: Plan,
        key: Key,
        sampler: Sampler,
        parameters: dict[str, nn.Parameter],
        clip_norm: float,
        clipping: Clipping,
        mean_loss: bool,
        model: nn.Module,
        ranks: Ranks,
    ) -> None:
        self.plan, self.sampler, self.ranks, self.clipping = plan, sampler, ranks, clipping
        self.parameters, self.mean_loss = parameters, mean_loss
        self.watch, self.half = Watch(model), HalfPrecision(model)
        self.in_lightning = hasattr(
            model, "automatic_optimization"
        )  # a LightningModule, without importing it
        self.generators = Generators(key, ranks.rank)
        self.self_test: SelfTest | None = None
        self.left_out = torch.zeros((), dtype=torch.int64)  # examples whose gradient was not finite
        self.scale = plan.deviation(clip_norm)
        self.engine = Engine(
            plan.strategy,
            key,
            group=ranks.group,
            check_finite=False,
            max_vectors=plan.max_vectors,
            kept_inputs=plan.kept_inputs,
        )
        self.noise = self.engine.init(parameters)
        self.sums = Sums(parameters, key.derive("sums").secret)
        self.ledger: Ledger | None = None  # on rank 0
        self.steps_released = 0  # by this run, in whatever process: what was spent
        self.summed = False  # whether the gradients of the batch at hand are those of a sum, not of a mean
        self.stepped = False  # whether the last call of `consume` completed a step
        self.on_leave: Callable[[], None] = lambda: None  # when a pass over the loader ends, wherever it is
        self._between = False  # the last batch of this pass over the loader has not completed a step
        self._piece: Piece | None = None
        self._failed = False  # the last call of `consume` did not come to its end
        self._warned = False  # of a mean loss in half precision
        self._partial = False  # some batches of a step are added up, more are to come

    @property
    def steps_taken(self) -> int:
        """How many steps were released; the next one has this number."""
        return self.noise.step

    @property
    def recorded(self) -> Ledger:
        """The ledger, which only rank 0 has."""
        assert self.ledger is not None
        return self.ledger

    @property
    def piece(self) -> Piece:
        """The physical batch that was drawn and not yet stepped on."""
        if self._failed:
            raise RuntimeError(
                "the last optimizer.step() failed before it released anything; iterate private.loader anew to take the "
                "step again"
            )
        if self._piece is None:
            raise RuntimeError(
                "there is no batch: draw batches from private.loader, and call private.optimizer.step() once for each"
            )
        return self._piece

    @property
    def rows(self) -> int | None:
        """The examples of the batch at hand; None between batches."""
        return None if self._piece is None else len(self._piece.indices)

    @property
    def half_precision(self) -> set[torch.dtype]:
        """The types of less than float32 that gradients of the batch at hand passed through, or may have."""
        return self.clipping.half_precision | self.half.passed

    def begin(self, piece: Piece) -> None:
        """Take the next physical batch from the loader."""
        self.check_consumed()
        if self._failed:
            raise RuntimeError(
                "the last optimizer.step() failed; iterate private.loader anew to take the step again"
            )
        if piece.step != self.steps_taken:
            raise RuntimeError(
                f"the loader is at step {piece.step}, the run at {self.steps_taken}; iterate the loader anew"
            )
        if piece.first or piece.rehearsal:
            self.watch.begin(by_value=piece.rehearsal is not None)
        self.clipping.clear()
        self.generators.lend("rehearse" if piece.rehearsal else "model", piece.step, piece.number)
        if piece.rehearsal is None:
            self.clipping.record(len(piece.indices))
        else:
            assert self.self_test is not None
            self.self_test.begin(piece.rehearsal)
        self._piece, self.summed = piece, not self.mean_loss

    def check_consumed(self) -> None:
        """Fail if the last batch was skipped."""
        if self._piece is not None:
            raise RuntimeError(
                f"a batch of step {self._piece.step} was skipped: call optimizer.step() for every batch, as a "
                "choice that depends on the data is not private"
            )

    @property
    def unfinished(self) -> bool:
        """Whether a step was begun and not completed."""
        return self._piece is not None or self._partial

    @property
    def partial(self) -> bool:
        """Whether some pieces of a step are added up, and more are to come."""
        return self._partial

    def between_steps(self) -> bool:
        """Whether the last batch was a rehearsal, a piece that did not complete its step, or one that failed.

        Not any more when the loop has left the loader: what comes then may have nothing to do with the run.
        """
        return self._between

    def attempt(self) -> None:
        """A batch is about to be consumed: until that has succeeded, no step is complete."""
        self.stepped, self._between = False, self._between or self._piece is not None

    def leave(self) -> None:
        """A pass over the loader ends, wherever it is."""
        self._between = False
        self.on_leave()

    def abandon(self) -> None:
        """Forget an accumulation that was not finished; nothing of it was released."""
        if self.self_test is not None:
            self.self_test.close()
        self.leave()
        self._piece, self._partial, self._failed = None, False, False
        self.generators.give_back()
        self.clipping.record(None)
        self.clipping.clear()

    def consume(self, loss_scale: float = 1.0) -> bool:
        """Clip and add up the batch; when its step is complete, release it into the `.grad`s and return True.

        `loss_scale` is what the loss was multiplied by before its backward pass.
        """
        piece = self.piece
        self._piece, self._failed = None, True  # until the end: what was added once must not be added again
        try:
            self._refuse_frozen()
            self.watch.check()
            self.generators.check()
            with plain_arithmetic():  # a loop may call it where autocast is on
                self._add_up(piece, loss_scale)
        except BaseException:
            if self.self_test is not None:
                self.self_test.close()
            raise
        finally:
            self.generators.give_back()
        self.clipping.record(None)
        if piece.last:
            with plain_arithmetic():
                self._release(piece)
        else:
            self.clipping.clear()  # gradients without noise, which a pickled model would hold
        self.stepped, self._between = piece.last, not piece.last
        self._failed, self._partial = False, not piece.last and piece.rehearsal is None
        return piece.last

    def _refuse_frozen(self) -> None:
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                raise RuntimeError(frozen_later(name))

    def forget_gradients(self) -> None:
        """Of the backward passes since the batch began."""
        self.clipping.clear()
        if self.self_test is not None:
            self.self_test.forget()

    def _add_up(self, piece: Piece, loss_scale: float) -> None:
        if piece.first:
            self.sums.clear()
        rows = len(piece.indices)
        scale = (1 if self.summed else rows) / loss_scale
        if piece.rehearsal is not None:
            assert self.self_test is not None
            self.self_test.bears_halves()
        if not self.summed and rows > 1 and self.half_precision:
            self._mean_in_half_precision(rows)
        if piece.rehearsal is not None:
            assert self.self_test is not None
            self.self_test.observe(piece.rehearsal, scale)
        else:
            left_out = self.clipping.add_to(self.sums.views, rows, piece.valid, scale)
            self.left_out = self.left_out.to(left_out.device) + left_out

    def _mean_in_half_precision(self, rows: int) -> None:
        """A mean divides by the number of examples before gradients are rounded: one more can round them all anew.

        In float16, it can also take all of them out of the range of its numbers, or into it.
        """
        remedy = "use private.backward(losses), with one loss for each example, or loss_reduction='sum'"
        if torch.float16 in self.half_precision:
            raise ValueError(
                f"loss: a mean in float16 divides gradients by {rows}, so the number of examples decides which of "
                f"them leave the range of float16; {remedy}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a mean loss in half precision: one example more can round the gradients of all others anew; {remedy}",
                stacklevel=4,
            )

    def _release(self, piece: Piece) -> None:
        add_noise = self.engine.ready(self.noise, self.sums.views, self.scale)
        self._record(piece)
        self.noise = add_noise()
        self.ranks.sum(self.sums.flats)
        self.sums.divide(self.plan.batch_size)
        self.clipping.clear()
        for name, parameter in self.parameters.items():
            parameter.grad = _like(parameter, self.sums.views[name])

    def _record(self, piece: Piece) -> None:
        found = self.ranks.gather(self.sums.examine())
        if not all(finite for finite, _ in found):
            raise ValueError(
                f"step={piece.step}: a gradient is not finite; nothing was released: look for an overflow in the loss"
            )
        total = b"".join(digest for _, digest in found)
        self.ranks.on_first(lambda: self.recorded.release(piece.step, piece.batch.tobytes(), total))
        self.steps_released = max(self.steps_released, piece.step + 1)


def _like(parameter: Tensor, mean: Tensor) -> Tensor:
    """A local gradient as the parameter wants it: its dtype, and a DTensor where it is one."""
    mean = mean.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            mean,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return mean
