"""make_private: an existing training loop becomes private in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bandmf import _check
from bandmf._deprecated import warn
from bandmf.ledger import Ledger
from bandmf.ledger.run_folder import Opened, provenance
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key
from bandmf.sampling import sampler_of
from bandmf.torch.clipping import checked_mode, make_clipping
from bandmf.torch.clipping.check import check
from bandmf.torch.losses import ExampleCriterion
from bandmf.torch.training import checkpoint
from bandmf.torch.training.loader import Loader, from_loader
from bandmf.torch.training.optimizer import PrivateOptimizer, PrivateScheduler, ZeroGrad
from bandmf.torch.training.ranks import Ranks
from bandmf.torch.training.schedules import average_steps
from bandmf.torch.training.self_test import SelfTest, end_earlier
from bandmf.torch.training.step import Stepper
from bandmf.torch.training.whole_steps import StepLoader

_MOST_PADDING = 1.25  # times the memory limit
_LEAST_CLIP_NORM = 1e-15  # float32 does not hold the squares of much smaller gradients


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    clip_norm: float,
    key: Key | None = None,
    physical_batch_size: int | None = None,
    clipping: str = "auto",
    per_layer: bool = False,
    loss_reduction: str = "mean",
    criterion: Callable[..., Any] | None = None,
    scheduler: Any = None,
    epoch_steps: int | None = None,
    loader_options: Mapping[str, Any] | None = None,
    run_folder: str | Path | None = None,
    save_every: int | None = None,
    moved: str | None = None,
    self_test: bool = True,
) -> Private:
    """Drop-in model, optimizer and loader for a training loop whose result is private as the plan says.

    >>> import bandmf
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=100, batch_size=20, steps=10, bands=2)
    >>> private = make_private(model, optimizer, data, plan, clip_norm=1.0)
    >>> model, optimizer, loader = private.model, private.optimizer, private.loader
    >>> for epoch in range(2):
    ...     for x, y in loader:
    ...         optimizer.zero_grad()
    ...         loss = nn.functional.mse_loss(model(x), y)
    ...         loss.backward()
    ...         optimizer.step()
    >>> private.steps_taken, private.finished
    (10, True)

    Every run has secrets of its own, derived from the key and a random id: two runs with the same
    `key=` have different noise and batches.

    Args:
        model: What is trained, in place. Freeze with `requires_grad_(False)`, before this call, what is not to be
            trained.
        optimizer: Any optimizer of torch that takes one step for a batch, made from the model's trainable parameters.
        dataset: A data set, a DataLoader (its data set, collate function and workers are taken, its batches are not) or
            a stream: an iterable that gives (index, example) for all examples, each time it is iterated.
        plan: From `bandmf.plan`, for this many examples.
        clip_norm: The most that one example may contribute to a step: the norm to which its gradient is clipped.
        key: Your own secret, instead of a fresh random one.
        physical_batch_size: How many examples are in memory at once, in each process. `optimizer.step()` then adds up,
            and only the call for the last piece of a batch updates the weights.
        clipping: "auto" (book-keeping, and Opacus's hooks where a layer cannot be described), "bookkeeping", "hooks" or
            "functorch".
        per_layer: Clip each parameter tensor on its own, to clip_norm / sqrt(number of tensors).
        loss_reduction: Whether `loss` in your loop is the "mean" over the examples of a batch, or their "sum".
        criterion: A loss module of torch; returns as `private.criterion`, which averages within each example first.
        scheduler: A learning-rate scheduler; returns as `private.scheduler`, which counts logical steps only.
        epoch_steps: How many steps a pass over the loader takes; an expected epoch unless given.
        loader_options: Options of torch's DataLoader, such as `num_workers`; those that draw batches are refused.
        run_folder: Keeps key, ledger, plan and checkpoints; `private.resume()` continues from there.
        save_every: Write a checkpoint before every step that is a multiple of this, and after the last.
        moved: States once what happened to a run folder that is elsewhere than it was: "moved" (the original is gone)
            or "copied" (a new run from these weights, whose privacy is spent in addition).
        self_test: Let the loader begin with a few rehearsals, on which `optimizer.step()` takes no step: they find
            losses and models by which examples depend on each other.

    Returns:
        Drop-in `model`, `optimizer` and `loader`, and the state of the run.

    Raises:
        ValueError: A model, loss, optimizer or folder that cannot be trained privately, with the reason and a remedy.
    """
    plan = checked_plan(plan)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    clip_norm = _check.real("clip_norm", clip_norm, _LEAST_CLIP_NORM)
    plan.deviation(clip_norm)  # refuses what float32 does not hold
    _check.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    clipping = checked_mode(clipping)
    end_earlier(model)
    check(model, clipping=clipping).refuse()
    optimizer = _unwrapped(optimizer)
    parameters = _protected(model, optimizer)
    data, options = from_loader(dataset, plan)
    examples = len(data) if hasattr(data, "__len__") else None
    ranks = Ranks(parameters.values())
    plan = ranks.same_plan(plan)
    ranks.same_settings({
        "clip_norm": clip_norm, "per_layer": bool(per_layer), "loss_reduction": loss_reduction, "clipping": clipping,
        "len(dataset)": examples, "physical_batch_size": physical_batch_size, "epoch_steps": epoch_steps,
        "save_every": save_every, "self_test": bool(self_test),
    })  # fmt: skip
    _check_memory(plan, parameters, ranks)
    folder = None if run_folder is None else Path(run_folder)
    opened = Opened(folder, key, moved, ranks)
    key = opened.run_key
    ranks.start_equal(model)
    batches = sampler_of(plan, key, examples)
    clip = make_clipping(clipping, model, parameters, clip_norm, per_layer)
    mean_loss = loss_reduction == "mean"
    stepper = Stepper(plan, key, batches, parameters, clip_norm, clip, mean_loss, model, ranks)
    stepper.self_test = SelfTest(model, stepper, optimizer) if self_test else None
    _check_allocated(plan, stepper)
    begun = provenance(plan, key, batches, clip_norm=clip_norm, per_layer=bool(per_layer))
    stepper.steps_released = opened.begin(begun, plan)
    stepper.ledger = opened.ledger
    loader = Loader(stepper, data, physical_batch_size, epoch_steps, {**options, **(loader_options or {})})
    private = Private(model, optimizer, loader, stepper, criterion, scheduler, folder, opened)
    if save_every is not None:
        private.save_every(save_every)
    return private


class Private:
    """What make_private returns: the counterparts for the loop, and the state of the run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        stepper: Stepper,
        criterion: Callable[..., Any] | None,
        scheduler: Any,
        folder: Path | None,
        opened: Opened,
    ) -> None:
        self.model, self.loader, self.plan, self.stepper = model, loader, stepper.plan, stepper
        self.optimizer = PrivateOptimizer(optimizer, stepper, loader.physical_batch_size is not None)
        self._zero_grad = ZeroGrad(model, stepper)
        self._end_averages = average_steps(model, self.optimizer)
        self.scheduler = None if scheduler is None else PrivateScheduler(scheduler, self.optimizer)
        self.warned_of_schedulers = False
        self._criterion = None
        if criterion is not None:
            self._criterion = ExampleCriterion(criterion, lambda: stepper.rows, stepper.mean_loss)
        self.folder, self.run_id, self._opened = folder, opened.run_id, opened

    def __repr__(self) -> str:
        plan, folder = self.plan, None if self.folder is None else str(self.folder)
        kinds = f"{type(self.model).__name__}, {type(self.optimizer.original).__name__}"
        return (
            f"Private({kinds}: step {self.steps_taken} of {plan.steps}, epsilon={plan.epsilon:g} at "
            f"delta={plan.delta:g}, run_folder={folder!r})"
        )

    @property
    def criterion(self) -> ExampleCriterion:
        """The criterion that was given, averaging within each example first."""
        if self._criterion is None:
            raise ValueError("criterion=None: give make_private a criterion to have private.criterion")
        return self._criterion

    @property
    def step_loader(self) -> StepLoader:
        """For loops that count: one item for each step, whose `batches()` are its physical batches."""
        return StepLoader(self)

    @property
    def steps_taken(self) -> int:
        """How many logical steps were taken."""
        return self.stepper.steps_taken

    @property
    def step(self) -> int:
        """The old name of `steps_taken`."""
        warn("private.step", "private.steps_taken")
        return self.steps_taken

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan were taken."""
        return self.steps_taken >= self.plan.steps

    @property
    def ledger(self) -> Ledger | None:
        """The record of released steps (on rank 0)."""
        return self.stepper.ledger

    def spent(self) -> float:
        """The epsilon of all steps that the run has released, in this process or before, at the plan's delta.

        A run that goes on from a copy (`moved="copied"`) adds what its ancestors had released when they were copied;
        the deltas add up as well. What an original releases after that is in its own report, and comes on top.
        """
        return self._opened.spent(self.plan, self.stepper.steps_released)

    def backward(self, losses: Tensor) -> None:
        """The backward pass for one loss per example, such as those of bandmf.torch.losses.

        A batch has its gradients either from here or from `backward()` of losses that are means or sums themselves.
        """
        rows = len(self.stepper.piece.indices)
        if losses.ndim != 1 or len(losses) != rows:
            raise _check.fail(
                "losses.shape", tuple(losses.shape), f"must be ({rows},): one loss for each example"
            )
        # Their sum, whatever the loop's own losses are: a mean divides by the number of examples, and in low precision
        # gradients that are rounded after that depend on it.
        self.stepper.summed = True
        losses.sum().backward()

    def explain(self) -> str:
        """How this run clips and whether that is tested, and the plan."""
        test, what = self.stepper.self_test, "that an example has the same gradient alone as in a batch"
        tested = f"The self-test is off: nothing checks {what}."
        if test is not None:
            tested = f"The first batches test {what}."
            if test.passed and not test.compared:
                tested = f"The first batches had no gradients to compare: nothing has checked {what}."
        return f"Clipping: {self.stepper.clipping.explain()}.\n{tested}\n{self.plan.explain()}"

    def non_finite_examples(self) -> int:
        """How often an example had a gradient that is not finite, and counted nothing, on this rank.

        The number depends on the data and has no noise: look at it, but do not publish it.
        """
        return int(self.stepper.left_out)

    def state_dict(self) -> dict[str, Any]:
        """All that a restart needs, the key excepted."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was saved; the ledger decides what may follow."""
        checkpoint.load_state_dict(self, state)

    def save(self) -> Path:
        """Write a checkpoint into the run folder, all of it or nothing."""
        return checkpoint.save(self, self._folder())

    def save_every(self, steps: int) -> None:
        """Let the loader save before every step that is a multiple of `steps` (0 too), and after the last."""
        steps, folder = _check.whole("save_every", steps), self._folder()

        def before_step(step: int) -> None:
            if step % steps == 0 or self.finished:
                checkpoint.save(self, folder)

        self.loader.before_step = before_step

    def resume(self) -> bool:
        """Go on from the last checkpoint in the run folder; False if there is none."""
        return checkpoint.resume(self, self._folder())

    def _folder(self) -> Path:
        if self.folder is None:
            raise ValueError("run_folder=None: give make_private a run_folder to save and resume")
        return self.folder

    def close(self) -> None:
        """Take the hooks off model and optimizer, and let go of the ledger."""
        if self.stepper.self_test is not None:
            self.stepper.self_test.close()
        self.stepper.clipping.remove()
        self.optimizer.close()
        self._zero_grad.remove()
        self._end_averages()
        if self.stepper.ledger is not None:
            self.stepper.ledger.close()


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that accelerate or Lightning has wrapped, or the one that is given."""
    inner = getattr(optimizer, "optimizer", None)
    found = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise _check.fail(
            "optimizer",
            type(found).__name__,
            "must be a torch.optim.Optimizer",
            "make one from model.parameters()",
        )
    return found


def _protected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name: those of the model and those of the optimizer must be the same."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = {id(p) for p in named.values()}
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if optimized - known:
        raise ValueError(
            "optimizer: holds trainable parameters that are not the model's; make it from the model"
        )
    if missing := [name for name, p in named.items() if id(p) not in optimized]:
        raise ValueError(
            f"model: {missing[0]!r} is trainable but not in the optimizer; add it, or freeze it with "
            "requires_grad_(False)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer: LBFGS evaluates a batch several times; use one that takes a step for a batch"
        )
    if isinstance(optimizer, PrivateOptimizer) or PrivateOptimizer.guards(optimizer):
        raise ValueError(
            "optimizer: belongs to another private run; call close() of that run, or make a new one"
        )
    return named


def _check_memory(plan: Plan, parameters: dict[str, nn.Parameter], ranks: Ranks) -> None:
    """What the plan says of the noise's memory must be true of this model and these ranks."""
    count = sum(parameter.numel() for parameter in parameters.values())
    if plan.parameters is not None and plan.parameters != count:
        raise _check.fail("plan.parameters", plan.parameters, f"the model has {count} trainable parameters")
    if plan.memory_limit is not None and plan.devices > ranks.world:
        raise _check.fail(
            "plan.devices",
            plan.devices,
            f"the noise is shared by {ranks.world} ranks, so it needs more memory",
        )


def _check_allocated(plan: Plan, stepper: Stepper) -> None:
    """Many tiny tensors are padded to more than they hold: that must not pass the plan's limit by much."""
    vectors = [executor.vectors for executor in stepper.noise.executors.values()]
    held = sum(each.history.nbytes + each.prepared.nbytes for each in vectors)
    if plan.memory_limit is not None and held > _MOST_PADDING * plan.memory_limit:
        raise _check.fail(
            "plan.memory_limit",
            plan.memory_limit,
            f"the noise of this model takes {held} bytes, as each of its many small tensors is padded",
            "plan with fewer bands, or a larger memory=",
        )
