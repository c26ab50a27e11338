"""bandmf.torch.Training: private training in PyTorch. The library holds model, losses, optimizer, data and schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bandmf import _check
from bandmf._interrupts import Termination
from bandmf.ledger.checks import ReleasedOtherwiseError
from bandmf.ledger.training import TrainingRun
from bandmf.planning import Plan
from bandmf.randomness.key import Key
from bandmf.torch.clipping import checked_mode, make_clipping
from bandmf.torch.clipping.check import check
from bandmf.torch.clipping.check.report import Report
from bandmf.torch.clipping.protocol import Losses
from bandmf.torch.training.arguments import check_allocated, check_memory, checked_function, checked_model, note_modes
from bandmf.torch.training.checkpoint import Saved
from bandmf.torch.training.data import Batches, Collate, Examples
from bandmf.torch.training.ranks import Ranks
from bandmf.torch.training.repeatable import Repeatable
from bandmf.torch.training.step import Stepper
from bandmf.torch.training.trained import Stateful, Trained, checked_also, checked_optimizers, checked_schedules
from bandmf.torch.training.verify import verify as verify_examples
from bandmf.torch.training.verify.start import Start

log = logging.getLogger("bandmf")

_LEAST_CLIP_NORM = 1e-15  # float32 does not hold the squares of much smaller gradients


class Training(TrainingRun):
    """Private training of a model: one item for each update, until the plan ends.

    >>> import bandmf, torch
    >>> from torch import nn
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100))
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> def losses(model, batch):  # one loss for each example of the batch
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y) ** 2
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=100, batch_size=20, steps=10, bands=2)
    >>> training = Training(model, losses, torch.optim.SGD(model.parameters(), lr=0.1), data, plan, clip_norm=1.0)
    >>> for step in training:
    ...     pass  # evaluate, log, average weights: after each item the model is a released one
    >>> step, training.finished
    (10, True)

    Args:
        model: What is trained, in place, in the modes (train or eval) that its modules have now.
        losses: `losses(model, batch)` gives a vector, one loss for each example of the batch. It may do anything else:
            autocast, several passes, random draws, a frozen teacher.
        optimizer: One or a list. What they hold is trained; everything else of the model stays as it is.
        data: A data set, a DataLoader (its data set, collate function and workers are taken, its batches are not) or a
            stream: an iterable that gives (index, example) for all examples, each time it is iterated.
        plan: From `bandmf.plan`, for this many examples.
        clip_norm: The most that one example may contribute to a step: the norm to which its gradient is clipped.
        scheduler: Torch's, or a function from the number of steps taken to a learning rate; stepped once an update.
        micro_batch: How many examples are in memory at once, in each process.
        folder: Keeps key, ledger, plan and checkpoints. A folder that holds a run goes on where it was.
        save_every: Write a checkpoint every so many steps; by default after every expected epoch.
        also: More to save and restore: name -> object with state_dict and load_state_dict (an average of the weights, a
            generator and its optimizer).
        key: Your own secret, instead of a fresh random one. Each run has secrets of its own, derived from it.
        collate: Makes a batch of a list of examples.
        workers: Processes that load data.
        clipping: "bookkeeping"; "vmap" (torch.func over the whole loss, at its price in memory); "one-by-one" (plain
            autograd, one example at a time); or "auto": the first of them that can describe the model, as verify finds.
        per_layer: Clip each parameter tensor on its own, to clip_norm / sqrt(number of tensors).
        verify: Look for examples that depend on each other before the first step (`bandmf.torch.verify`).
        moved: States once what happened to a folder that has moved: "moved" (the original is gone) or "copied" (a new
            run from these weights, whose privacy is spent in addition).

    Raises:
        ValueError: A model, loss, optimizer or folder that cannot be trained privately, with the reason and a remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        optimizer: Any,
        data: Any,
        plan: Plan,
        *,
        clip_norm: float,
        scheduler: Any = None,
        micro_batch: int | None = None,
        folder: str | Path | None = None,
        save_every: int | None = None,
        also: Mapping[str, Stateful] | None = None,
        key: Key | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        clipping: str = "auto",
        per_layer: bool = False,
        verify: bool = True,
        moved: str | None = None,
    ) -> None:
        super().__init__(plan, folder, save_every)
        clip_norm = _check.real("clip_norm", clip_norm, _LEAST_CLIP_NORM)
        self.plan.deviation(clip_norm)  # refuses what float32 does not hold
        clipping, per_layer = checked_mode(clipping), bool(per_layer)
        micro_batch = None if micro_batch is None else _check.whole("micro_batch", micro_batch)
        model = checked_model(model)
        losses = checked_function(losses)
        optimizers = checked_optimizers(optimizer)
        trained = Trained(model, optimizers, checked_schedules(scheduler, optimizers), checked_also(also))
        examples = Examples(data, self.plan, collate, _check.whole("workers", workers, 0))
        ranks = Ranks(trained.parameters.values())
        self.plan = plan = ranks.same_plan(self.plan)
        ranks.same_settings({
            "clip_norm": clip_norm, "per_layer": per_layer, "clipping": clipping, "len(data)": examples.count(),
            "micro_batch": micro_batch, "save_every": self._save_every, "verify": bool(verify),
        })  # fmt: skip
        note_modes(model)
        with trained.in_a_step():
            check(model, clipping=clipping).refuse()
            check_memory(plan, trained, ranks)
            self._verified = _verified(model, losses, examples, clipping, micro_batch) if verify else None
            mode = clipping if self._verified is None else self._verified.clipping
            ranks.same_settings({"clipping": mode})
            micro_batch = 1 if mode == "one-by-one" else micro_batch
            self._clipping = make_clipping(mode, model, trained.parameters, clip_norm, per_layer)
            with Start(model):
                self._clipping.learn(losses, partial(examples.copies, trained.device))
        self._open(key, moved, ranks, examples.count())
        ranks.start_equal(model)
        stepper = Stepper(
            plan, self._opened, self._sampler, trained, losses, self._clipping, clip_norm, ranks, self._progress
        )
        check_allocated(plan, stepper)
        self._trained, self._stepper = trained, stepper
        self._batches = Batches(examples, plan, self._sampler, ranks, stepper.generators, micro_batch)
        self._repeatable = Repeatable(self.folder is not None and trained.device.type == "cuda")
        self._begin(clip_norm, per_layer)
        self._saved = None if self.folder is None else Saved(self.folder, self._opened, stepper, trained)
        try:
            restored = self._saved is not None and self._saved.restore()
        except BaseException:
            self._let_go()
            raise
        self._progress.applied(stepper.steps_taken)
        if restored:
            self._saved_at = self.steps_taken
            log.info("%s: goes on after step %d of %d", self.folder, self.steps_taken, plan.steps)

    # --- the loop -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """1, 2, ..., plan.steps: one item, one update of the model."""
        with Termination() as termination:
            while not self.finished:
                yield self.advance()
                if any(self._stepper.ranks.gather(termination.asked)):
                    termination.asked = True
                    break
            self._save_alone()

    def advance(self) -> int:
        """One update, for loops that others own; returns the step."""
        with self._progress.alone():
            return self._advance()

    def _advance(self) -> int:
        self._progress.check_usable()
        if self.finished:
            raise RuntimeError(f"all {self.plan.steps} steps of the plan were taken; a further one has no budget")
        if self.steps_taken % self._save_every == 0:
            self._save_now()
        try:
            with self._repeatable():
                self._stepper.take(self._batches)
        except ReleasedOtherwiseError:
            return self._go_past_released()
        except BaseException:
            self._batches.forget()
            raise
        self._progress.look(self._trained.is_finite)
        if self.finished:
            self._batches.forget()  # workers that nobody ends are waited for when Python ends
        return self.steps_taken

    def _go_past_released(self) -> int:
        """After a restart whose steps differ from those that were released: these are lost, and stay spent."""
        self._progress.pass_over()
        self._batches.forget()
        self._stepper.lose_released()
        return self.steps_taken if self.finished else self._advance()

    # --- what it knows ------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self._trained.model

    def non_finite_examples(self) -> int:
        """How often an example had a gradient that is not finite, and was left out, on this rank.

        The number depends on the data and has no noise: look at it, but do not publish it.
        """
        return int(self._stepper.left_out)

    def explain(self) -> str:
        """How this run clips, whether its examples were verified, and the plan."""
        if self._verified is None:
            looked = "Not verified: whether examples depend on each other."
        else:
            notes = [str(note) for note in self._verified.notes]
            looked = "\n  ".join(["Verified on a few examples: none was found to depend on others.", *notes])
        return f"Clipping: {self._clipping.explain()}.\n{looked}\n{self.plan.explain()}"

    # --- its folder ---------------------------------------------------------------------------------------

    def _write(self) -> Path:
        assert self._saved is not None
        return self._saved.save()

    def _let_go(self) -> None:
        self._batches.forget()  # workers are forks, which hold the lock of the folder as well
        super()._let_go()


def _verified(
    model: nn.Module, losses: Losses, examples: Examples, clipping: str, micro_batch: int | None
) -> Report | None:
    """Refuse what verify finds; what it could not compare."""
    some = examples.some
    if len(some) < 2:
        return None
    if micro_batch == 1 and not examples.fit_together(some):
        log.warning("not verified: the examples that were tried cannot be in one batch, and never are")
        return None
    found = verify_examples(model, losses, some, collate=examples.collate, clipping=clipping)
    found.refuse()
    for note in found.notes:
        log.warning("verify: %s", note)
    return found
