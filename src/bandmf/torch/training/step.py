"""One private step: load, losses, clip, ledger, noise, optimizer, schedule.

Guarantees:
- every step of the plan releases (sum of clipped gradients + scale * noise) / batch_size, for an empty batch too, with
  scale = clip_norm * plan.noise_scale and the plan's constant batch_size;
- noise is added exactly once per step, and only after the ledger has the step on the disk;
- only batches of the plan's sampler are used, each exactly once;
- what `losses` draws from the global generators is secret, and a function of key, rank, step and micro-batch;
- Ctrl-C waits until a step that is on the ledger has reached the weights;
- a released step is repeated bit for bit or not at all: where it cannot be, it is lost, and the run goes on after it.
"""

from __future__ import annotations

import torch

from bandmf._interrupts import uninterrupted
from bandmf.ledger.progress import Progress
from bandmf.ledger.run_folder import Opened
from bandmf.planning import Plan
from bandmf.sampling import Sampler
from bandmf.torch.clipping.containers import to_device
from bandmf.torch.clipping.protocol import Clipping, Losses
from bandmf.torch.noise.engine import Engine
from bandmf.torch.noise.precision import plain_arithmetic
from bandmf.torch.training.data import Batches
from bandmf.torch.training.generators import Generators
from bandmf.torch.training.ranks import Ranks
from bandmf.torch.training.sums import Sums
from bandmf.torch.training.trained import Trained


class Stepper:
    """The state of a run on this rank, and how it takes a step."""

    def __init__(
        self,
        plan: Plan,
        opened: Opened,
        sampler: Sampler,
        trained: Trained,
        losses: Losses,
        clipping: Clipping,
        clip_norm: float,
        ranks: Ranks,
        progress: Progress,
    ) -> None:
        self.plan, self.sampler, self.ranks, self._progress = plan, sampler, ranks, progress
        self._opened, key = opened, opened.run_key
        self._trained, self._losses, self._clipping = trained, losses, clipping
        self.generators = Generators(key, ranks.rank)
        self.scale = plan.deviation(clip_norm)
        self.engine = Engine(
            plan.strategy,
            key,
            group=ranks.group,
            check_finite=False,
            max_vectors=plan.max_vectors,
            kept_inputs=plan.kept_inputs,
        )
        self.noise = self.engine.init(trained.parameters)
        self.sums = Sums(trained.parameters, key.derive("sums").secret)
        self.left_out = torch.zeros((), dtype=torch.int64)  # examples whose gradient was not finite

    @property
    def steps_taken(self) -> int:
        """How many steps were released; the next one has this number."""
        return self.noise.step

    def take(self, batches: Batches) -> None:
        """One step of the plan, one update of the model."""
        step = self.steps_taken
        with self._trained.in_a_step():
            self.sums.clear()
            for micro, data in batches.of_step(step):
                with self.generators.lent("model", step, micro.number):
                    own = to_device(data, self._trained.device)
                    count = self._clipping.add_to(self.sums.views, self._losses, own, len(micro.indices), micro.valid)
                    self.left_out = self.left_out.to(count.device) + count
            self._trained.set_rates(step)
            with plain_arithmetic(), uninterrupted():
                add_noise = self.engine.ready(self.noise, self.sums.views, self.scale)
                self._record(step)
                self._progress.release(step)
                self.noise = add_noise()
                self.ranks.sum(self.sums.flats)
                self.sums.divide(self.plan.batch_size)
                self._trained.update(self.sums.views)
                self._progress.applied(step + 1)

    @torch.no_grad()
    def lose_released(self) -> None:
        """Go past the steps that were released before a restart and cannot be repeated: they update nothing.

        What they released is a part of what the plan has paid for, and is not used; their noise must still be drawn, as
        later noise is correlated with it.
        """
        while self.steps_taken < self._progress.released:
            self.sums.clear()
            self.noise = self.engine.add(self.noise, self.sums.views, self.scale)
            self._trained.skip()
        self._progress.applied(self.steps_taken)

    def _record(self, step: int) -> None:
        """Put the digest of the sum on the disk; fails where a sum is not finite, or was released otherwise before."""
        found = self.ranks.gather(self.sums.examine())
        if not all(finite for finite, _ in found):
            raise ValueError(
                f"step={step}: a sum of gradients is not finite; nothing was released: look for an overflow in the loss"
            )
        batch, total = self.sampler.batch(step).tobytes(), b"".join(digest for _, digest in found)
        total += self.noise.provenance.dumps().encode()  # names and shapes decide the noise, too
        self._opened.on_ledger(lambda ledger: ledger.release(step, batch, total))
