"""PrivateTrainer: the Trainer of transformers, whose steps are those of a plan.

Guarantees:
- one step of the Trainer is one update of bandmf.torch.Training: `global_step`, the learning-rate schedule, logging,
  evaluation, saving and the progress bar count steps of the plan; the Trainer's own calls of optimizer and schedule do
  nothing;
- the loss is one for each example, never a mean over the tokens of a batch;
- nothing that is computed from private batches without noise is logged, printed or saved: no loss, no gradient norm, no
  number of tokens or operations;
- the noise, the generators and the key are in the run's folder alone;
- training that ends before its plan does is an error, unless it was allowed.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer_utils import TrainOutput

from bandmf.planning import Plan, checked_plan
from bandmf.randomness import generators
from bandmf.randomness.key import Key
from bandmf.torch.huggingface import arguments, heads, options
from bandmf.torch.huggingface.facades import OptimizerView, ScheduleView
from bandmf.torch.huggingface.held_out import HeldOut
from bandmf.torch.huggingface.progress import History, Progress, Steps
from bandmf.torch.training.training import Training

_PUBLIC = ("learning_rate", "epoch", "epsilon", "train_runtime")  # what may be logged of training
_WITHOUT_NOISE = ("loss", "grad_norm", "train_loss", "total_flos")  # what the Trainer logs beside that


class PrivateTrainer(Trainer):
    """transformers.Trainer for private training: a plan and a clip norm in, everything else as in Trainer.

    >>> import tempfile
    >>> import bandmf
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> texts = [{"input_ids": torch.tensor([1, 2, k % 3]), "labels": torch.tensor([1, 2, k % 3])} for k in range(40)]
    >>> config = GPT2Config(vocab_size=3, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    >>> plan = bandmf.plan(epsilon=8, delta=1e-5, examples=40, batch_size=8, steps=5, bands=2)
    >>> folder = tempfile.TemporaryDirectory()
    >>> args = TrainingArguments(folder.name, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    >>> model = GPT2LMHeadModel(config)
    >>> trainer = PrivateTrainer(model, args, train_dataset=texts, plan=plan, clip_norm=1.0)
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {'train_runtime': ..., 'epsilon': ..., 'epoch': ...}
    5
    >>> trainer.training.finished, trainer.spent() <= plan.epsilon
    (True, True)

    It also goes in front of another Trainer, `class Mine(PrivateTrainer, TheirTrainer)`, if Mine has a method `losses`
    that gives TheirTrainer's loss for each example: bandmf.torch.huggingface.trl has two of these.

    All other arguments are as in Trainer, with these differences. What is trained is `model`; freeze the rest before
    (`requires_grad_(False)`). `args.per_device_train_batch_size` is how many examples are in memory at once; the plan
    decides about batches and steps, and options that a private run cannot honor are refused. `train_dataset` has as
    many examples as the plan, `eval_dataset` none of them. `compute_loss_func(outputs, labels, num_items_in_batch)`
    returns one loss for each example; by default the losses are those of the model's head.

    Args:
        plan: From `bandmf.plan`, for this many examples.
        clip_norm: The norm to which the gradient of every example is clipped.
        folder: Keeps key, ledger and checkpoints, written when the Trainer saves, too. A folder that holds a run goes
            on where it was. Must be outside `output_dir`.
        key: As in bandmf.torch.Training, like the four that follow.
        moved: A folder that was moved or copied.
        clipping: How gradients are clipped.
        per_layer: Clip each parameter tensor on its own.
        verify: Look for examples that depend on each other before the first step.
        may_end_early: Let training end before the plan does; otherwise that is an error.

    Attributes:
        training: The bandmf.torch.Training that `train()` has begun; None before.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    more_options: ClassVar[tuple[options.Option, ...]] = ()  # of that class, that not every value is taken of

    def __init__(
        self,
        *given: Any,
        plan: Plan,
        clip_norm: float,
        folder: str | Path | None = None,
        key: Key | None = None,
        moved: str | None = None,
        clipping: str = "auto",
        per_layer: bool = False,
        verify: bool = True,
        may_end_early: bool = False,
        **named: Any,
    ) -> None:
        plan = checked_plan(plan)
        bound = inspect.signature(super().__init__).bind(*given, **named)
        arguments.check_one_model(bound.arguments)
        args = bound.arguments.get("args")
        args = self.arguments_class("tmp_trainer") if args is None else args
        bound.arguments["args"] = options.checked(args, plan, self.more_options)
        arguments.check_folder(folder, args)
        arguments.check_overrides(type(self), PrivateTrainer)
        self.training: Training | None = None
        self.plan, self.folder, self.may_end_early = plan, folder, may_end_early
        self._settings: dict[str, Any] = {
            "clip_norm": clip_norm, "key": key, "folder": folder, "moved": moved, "clipping": clipping,
            "per_layer": per_layer, "verify": verify,
        }  # fmt: skip
        self._evaluating, self._spent, self._noticed = False, (-1, 0.0), False
        super().__init__(*bound.args, **bound.kwargs)
        options.check_accelerator(self.args, self.accelerator)
        arguments.check_data(self.model, self.train_dataset, plan)
        if self._has_known_head():
            self._head()
        self._held_out = HeldOut(self.train_dataset)
        self._check_held_out("eval_dataset", self.eval_dataset)

    # --- the run ------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Take all steps of the plan that are left: a folder that holds a run goes on, as `True` says too."""
        if trial is not None:
            raise _no_search()
        arguments.check_resume(resume_from_checkpoint, self.folder)
        if self.training is not None and self.training.finished:
            raise RuntimeError(
                f"train(): all {self.plan.steps} steps of the plan were taken; to train longer, make a new plan and "
                "PrivateTrainer: their privacy adds up"
            )
        training = self.training or self._begin()
        if training.finished:
            training.close()
            return TrainOutput(training.steps_taken, math.nan, {"epsilon": self.spent()})
        output = super().train(ignore_keys_for_eval=ignore_keys_for_eval)
        if not training.finished and not self.may_end_early:
            raise RuntimeError(
                f"training ended after {training.steps_taken} of the plan's {self.plan.steps} steps (a callback has "
                "stopped it): the noise is that of the whole plan, and more than so few steps need. Go on with "
                "train(), make a plan with fewer steps, or give PrivateTrainer may_end_early=True; the model holds "
                f"the weights so far, at epsilon={self.spent():.3g}"
            )
        if training.finished:
            training.close()
        return TrainOutput(output.global_step, math.nan, self._public(output.metrics))

    def _begin(self) -> Training:
        """The run, at its start or where its folder has it."""
        arguments.check_given("train_dataset", self.train_dataset)
        prepared = super().get_train_dataloader()  # for its data and collate function, without unused columns
        if self._has_known_head():
            self._check_own_loss(prepared)
        model, optimizer, history = self.model, self.create_optimizer(), History()
        assert model is not None
        schedule = super().create_scheduler(self.plan.steps, optimizer)
        also: dict[str, Any] = {"trainer": history}
        by_measures = isinstance(schedule, ReduceLROnPlateau | GreedyLR)
        if by_measures:  # of held-out data, which the Trainer gives it
            also["schedule"] = schedule
        model.train()
        training = Training(
            model,
            self._losses_of_batch,
            optimizer,
            _loader(prepared, self.args),
            self.plan,
            scheduler=None if by_measures else schedule,
            micro_batch=self.args.per_device_train_batch_size,
            save_every=None if self.folder is None or self.args.save_strategy == "no" else self.plan.steps,
            also=also,
            **self._settings,
        )
        self.optimizer, self._schedule = OptimizerView(optimizer), schedule
        if not by_measures:
            self._schedule = ScheduleView(schedule)
        self._steps = Steps(training, prepared.dataset)
        self.add_callback(Progress(training, self._steps, history))
        self.training = training
        return training

    def spent(self) -> float:
        """The epsilon of all steps that were released so far, at the plan's delta."""
        if self.training is None:
            return 0.0
        if self._spent[0] != self.training.steps_taken:
            self._spent = self.training.steps_taken, self.training.spent()
        return self._spent[1]

    # --- what the Trainer asks for ------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """One empty item for each step of the plan, once training has begun."""
        return super().get_train_dataloader() if self.training is None else self._steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the run, which its checkpoints keep."""
        if self.training is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = self._schedule
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One update of the run; the zero that is returned is no loss."""
        assert self.training is not None
        model.train()
        if isinstance(self._schedule, ScheduleView):
            self._schedule.note()
        self.state.global_step = self.training.advance() - 1  # the Trainer counts it next
        return torch.zeros((), device=self.args.device)

    def losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss for each example of a private batch; override it for a loss of your own."""
        given = dict(inputs)
        labels: Any = given.get("labels") if heads.reads_labels(model) else given.pop("labels", None)
        if self.compute_loss_func is None:
            arguments.check_labels(labels, inputs)
            return self._head()(model(**given), labels)
        return self.compute_loss_func(model(**given), labels, num_items_in_batch=None)

    def _has_known_head(self) -> bool:
        return self.compute_loss_func is None and type(self).losses is PrivateTrainer.losses

    def _check_own_loss(self, prepared: Any) -> None:
        if hasattr(prepared.dataset, "__getitem__"):
            with generators.lent(), torch.random.fork_rng():  # a collate function may draw
                inputs = self._prepare_inputs(prepared.collate_fn([prepared.dataset[0]]))
            heads.check_own_loss(self.model, inputs)

    def _head(self) -> heads.ExampleLosses:
        return heads.losses_of(self.model, self.args.label_smoothing_factor)

    def _losses_of_batch(self, model: nn.Module, batch: Any) -> Tensor:
        with self.accelerator.autocast(), self.compute_loss_context_manager():
            return self.losses(model, batch)

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: with them, the sizes of private batches would be."""
        return 0

    # --- what is shown ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Of training, only what is public: learning rate, epoch and the epsilon spent."""
        super().log(logs if self._evaluating else self._public(logs), start_time)

    def _public(self, logs: Mapping[str, float]) -> dict[str, float]:
        odd = [name for name in logs if name not in (*_PUBLIC, *_WITHOUT_NOISE) and not name.startswith("train_")]
        if odd and not self._noticed:
            self._noticed = True
            warnings.warn(
                f"not logged: {', '.join(odd)}. Numbers of training may depend on private batches and have no noise; "
                "evaluate on held-out data instead",
                stacklevel=3,
            )
        return {name: logs[name] for name in _PUBLIC if name in logs} | {"epsilon": self.spent()}

    def evaluate(self, eval_dataset: Any = None, *given: Any, **named: Any) -> dict[str, float]:
        """As in Trainer, on data that the run does not train on."""
        before, self._evaluating = self._evaluating, True
        try:
            return super().evaluate(eval_dataset, *given, **named)
        finally:
            self._evaluating = before

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As in Trainer, of data that the run does not train on."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        self._check_held_out("eval_dataset", chosen)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As in Trainer, of data that the run does not train on."""
        self._check_held_out("test_dataset", test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _check_held_out(self, name: str, data: Any) -> None:
        for each in data.values() if isinstance(data, dict) else [data]:
            self._held_out.check(name, each)

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        raise _no_search()


def _no_search() -> RuntimeError:
    return RuntimeError(
        "a hyperparameter search trains on the private data once for every trial, and the privacy of all trials adds "
        "up; tune on public data, or make a plan and a PrivateTrainer for each trial"
    )


def _loader(prepared: Any, args: TrainingArguments) -> DataLoader[Any]:
    """Data and workers of the Trainer's loader, whose batches the plan draws."""
    workers = args.dataloader_num_workers
    return DataLoader(
        prepared.dataset,
        collate_fn=prepared.collate_fn,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        multiprocessing_context=args.dataloader_multiprocessing_context if workers else None,
    )
