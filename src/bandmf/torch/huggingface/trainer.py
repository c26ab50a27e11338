"""PrivateTrainer: the Trainer of transformers, whose steps are those of a plan.

Guarantees:
- one step of the Trainer is one step of the plan, whatever the physical batches: `global_step`, the learning-rate
  schedule, logging, evaluation, saving and the progress bar count plan steps; the self-test counts as none;
- the loss is one for each example, never a mean over the tokens of a batch;
- nothing that is computed from private batches without noise is logged, printed or saved: no loss, no gradient norm, no
  number of tokens or operations;
- the noise, the generators and the key are in the run folder alone, as make_private keeps them;
- training that ends before its plan does is an error, unless it was allowed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from bandmf import _check
from bandmf.planning import Plan, checked_plan
from bandmf.randomness.key import Key
from bandmf.torch.huggingface import heads, options
from bandmf.torch.huggingface.progress import Progress
from bandmf.torch.training.make_private import Private, make_private
from bandmf.torch.training.whole_steps import Step

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
    >>> trainer.private.finished, trainer.spent() <= plan.epsilon
    (True, True)

    Args:
        model: What is trained, in place. Freeze what is not to be trained before (`requires_grad_(False)`).
        args: TrainingArguments. `per_device_train_batch_size` is the physical batch: how many examples are in memory
            at once. The plan decides about batches and steps. Options that a private run cannot honor are refused.
        data_collator: As in Trainer, mapping a list of examples to a batch with one row for each.
        train_dataset: The private examples, by index: as many as the plan says.
        eval_dataset: Held-out examples; the private ones are refused.
        processing_class: The tokenizer or processor, as in Trainer.
        model_init: Is refused, as a run has one model.
        compute_loss_func: Called with outputs and labels; returns one loss for each example. By default the losses are
            those of the model's head.
        compute_metrics: As in Trainer, for evaluation.
        callbacks: As in Trainer.
        optimizers: As in Trainer: an optimizer and a scheduler, or None for those of `args`.
        plan: From `bandmf.plan`, for this many examples.
        clip_norm: The norm to which the gradient of every example is clipped.
        key: Your own secret, instead of a fresh random one.
        run_folder: Keeps key, ledger and checkpoints, written when the Trainer saves;
            `train(resume_from_checkpoint=True)` goes on from there. Must be outside `output_dir`.
        moved: What happened to a run folder that is elsewhere than it was, as in make_private.
        clipping: How gradients are clipped, as in make_private.
        per_layer: Clip each parameter tensor on its own, as in make_private.
        self_test: Begin with rehearsals, which are no steps, that find examples which depend on each other.
        may_end_early: Let training end before the plan does; otherwise that is an error.
        **others: Further arguments of Trainer.

    Attributes:
        private: What make_private returned; None before `train()`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        plan: Plan,
        clip_norm: float,
        key: Key | None = None,
        run_folder: str | Path | None = None,
        moved: str | None = None,
        clipping: str = "auto",
        per_layer: bool = False,
        self_test: bool = True,
        may_end_early: bool = False,
        **others: Any,
    ) -> None:
        plan = checked_plan(plan)
        args = options.checked(TrainingArguments("tmp_trainer") if args is None else args, plan)
        _check_model(model, model_init)
        _check_folder(run_folder, args)
        self.private: Private | None = None
        self.plan, self.may_end_early = plan, may_end_early
        self._settings: dict[str, Any] = {
            "clip_norm": clip_norm, "key": key, "run_folder": run_folder, "moved": moved, "clipping": clipping,
            "per_layer": per_layer, "self_test": self_test,
        }  # fmt: skip
        self._schedule: Any = None
        self._evaluating, self._spent, self._noticed = False, (0, 0.0), False
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_loss_func=compute_loss_func, compute_metrics=compute_metrics, callbacks=callbacks,
            optimizers=optimizers, **others,
        )  # fmt: skip
        options.check_accelerator(self.args, self.accelerator)
        if self.compute_loss_func is None:
            self._example_losses = heads.losses_of(model, args.label_smoothing_factor)
        _check_data(self.train_dataset, plan)
        _check_collator(self.data_collator, self_test)
        self._check_held_out(self.eval_dataset)

    # --- the run ------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Take all steps of the plan that are left; `resume_from_checkpoint=True` starts at the last checkpoint."""
        if trial is not None:
            raise _no_search()
        private = self._open(resume_from_checkpoint)
        if private.finished:
            return TrainOutput(private.steps_taken, math.nan, {"epsilon": self.spent()})
        try:
            output = super().train(ignore_keys_for_eval=ignore_keys_for_eval)
        except BaseException:
            if private.stepper.self_test is not None:
                private.stepper.self_test.close()  # the Trainer may keep the iterator, and so the rehearsals, alive
            raise
        if not private.finished and not self.may_end_early:
            raise RuntimeError(
                f"training ended after {private.steps_taken} of the plan's {private.plan.steps} steps (a callback has "
                "stopped it): the noise is that of the whole plan, and more than so few steps need. Go on with "
                "train(), make a plan with fewer steps, or give PrivateTrainer may_end_early=True; the model holds "
                f"the weights so far, at epsilon={self.spent():.3g}"
            )
        if private.finished:
            private.close()
        return TrainOutput(output.global_step, math.nan, self._public(output.metrics))

    def _open(self, resume: str | bool | None) -> Private:
        """The run: begun at the first call, and brought to its last checkpoint where that is asked for."""
        private = self.private
        if private is not None and private.finished:
            raise RuntimeError(
                f"train(): all {private.plan.steps} steps of the plan were taken; to train longer, make a new plan and "
                "PrivateTrainer: their privacy adds up"
            )
        if resume:
            self._check_resume(resume)
        private = private or self._begin()
        if resume:
            private.resume()  # without a checkpoint, it was killed before the first, and begins
        elif private.folder is not None and private.steps_taken < private.stepper.steps_released:
            raise _check.fail(
                "run_folder", str(private.folder),
                f"its run has released {private.stepper.steps_released} steps, and is at step {private.steps_taken}",
                "go on with train(resume_from_checkpoint=True), or begin a run in another folder: privacy adds up",
            )  # fmt: skip
        self.optimizer = private.optimizer
        return private

    def _begin(self) -> Private:
        if self.train_dataset is None:
            raise _check.fail("train_dataset", None, "must be given to train")
        prepared = super().get_train_dataloader()  # for its data and collate function, without unused columns
        model, optimizer, args = self.model, self.create_optimizer(), self.args
        assert model is not None
        self._schedule = super().create_scheduler(self.plan.steps, optimizer)
        loading = {
            "collate_fn": prepared.collate_fn,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "prefetch_factor": args.dataloader_prefetch_factor,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
        self.private = make_private(
            model,
            optimizer,
            prepared.dataset,
            self.plan,
            physical_batch_size=args.per_device_train_batch_size,
            scheduler=self._schedule,
            loader_options={name: value for name, value in loading.items() if value is not None},
            **self._settings,
        )
        self.add_callback(Progress(self.private))
        return self.private

    def _check_resume(self, resume: str | bool) -> None:
        folder = self._settings["run_folder"]
        if folder is None:
            raise _check.fail(
                "resume_from_checkpoint", resume, "only a run with a run_folder= can be resumed: the Trainer's own "
                "checkpoints hold weights, not what the run has released",
            )  # fmt: skip
        if resume is not True and Path(str(resume)).resolve() != Path(str(folder)).resolve():
            raise _check.fail(
                "resume_from_checkpoint", resume,
                f"a run goes on from its last checkpoint, in run_folder={str(folder)!r}",
                "give resume_from_checkpoint=True",
            )  # fmt: skip

    def spent(self) -> float:
        """The epsilon of all steps that were released so far, at the plan's delta."""
        if self.private is None:
            return 0.0
        if self._spent[0] != self.private.stepper.steps_released:
            self._spent = self.private.stepper.steps_released, self.private.spent()
        return self._spent[1]

    # --- what the Trainer asks for ------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The steps of the plan, once training has begun."""
        return super().get_train_dataloader() if self.private is None else self.private.step_loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the run, which its checkpoints keep."""
        if self.private is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = self._schedule
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward passes of a whole step; the zero that is returned is no loss."""
        assert self.private is not None
        assert isinstance(inputs, Step)
        model = model.module if isinstance(model, DistributedDataParallel) else model
        for batch in inputs.batches():
            model.train()
            with self.compute_loss_context_manager():
                losses = self.compute_loss(model, send_to_device(batch, self.args.device))
            self.private.backward(losses)
        return torch.zeros((), device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """One loss for each example of a private batch; in evaluation, the loss that Trainer computes."""
        if self.private is None or self.private.stepper.rows is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given = dict(inputs)
        labels: Any = given.get("labels") if heads.reads_labels(self.model) else given.pop("labels", None)
        if labels is None and self.compute_loss_func is None:
            raise _check.fail(
                "inputs", sorted(inputs), "a batch must have 'labels'", "let the data set or data_collator give them"
            )  # fmt: skip
        outputs = model(**given)
        if self.compute_loss_func is None:
            losses = self._example_losses(outputs, labels)
        else:
            losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        return (losses, outputs) if return_outputs else losses

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: with them, the sizes of private batches would be."""
        return 0

    # --- what is shown ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Of training, only what is public: learning rate, epoch and the epsilon spent."""
        super().log(logs if self._evaluating else self._public(logs), start_time)

    def _public(self, logs: Mapping[str, float]) -> dict[str, float]:
        odd = [
            name for name in logs if name not in (*_PUBLIC, *_WITHOUT_NOISE) and not name.startswith("train_")
        ]
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
        self._check_held_out(eval_dataset)
        before, self._evaluating = self._evaluating, True
        try:
            return super().evaluate(eval_dataset, *given, **named)
        finally:
            self._evaluating = before

    def _check_held_out(self, data: Any) -> None:
        found = data.values() if isinstance(data, dict) else [data]
        if self.train_dataset is not None and any(each is self.train_dataset for each in found):
            raise _check.fail(
                "eval_dataset", "train_dataset", "a loss on the private examples has no noise",
                "hold some examples out, and evaluate on them",
            )  # fmt: skip

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        raise _no_search()


def _no_search() -> RuntimeError:
    return RuntimeError(
        "a hyperparameter search trains on the private data once for every trial, and the privacy of all trials adds "
        "up; tune on public data, or make a plan and a PrivateTrainer for each trial"
    )


def _check_model(model: nn.Module, model_init: Any) -> None:
    if model is None or model_init is not None:
        raise _check.fail("model_init", "...", "a private run has one model", "give the model as model=")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise _check.fail(
            "model", type(model).__name__, "its parameters are sharded; PrivateTrainer trains replicas only",
            "use make_private with fully_shard (examples/fsdp.py)",
        )  # fmt: skip


def _check_folder(folder: str | Path | None, args: TrainingArguments) -> None:
    """The key must not lie where models are shared from."""
    shared = Path(str(args.output_dir)).resolve()
    if folder is not None and shared in (Path(folder).resolve(), *Path(folder).resolve().parents):
        raise _check.fail(
            "run_folder", str(folder), f"must not be in output_dir={args.output_dir!r}, which is shared or uploaded "
            "with the model: it holds the secret key", "give a folder beside it",
        )  # fmt: skip


def _check_data(data: Any, plan: Plan) -> None:
    if data is not None and (isinstance(data, IterableDataset) or not hasattr(data, "__len__")):
        raise _check.fail(
            "train_dataset", type(data).__name__, "must have a length and give examples by index",
            "load it as a whole, or use make_private, which takes streams of (index, example)",
        )  # fmt: skip
    if data is not None and plan.examples is not None and len(data) != plan.examples:
        raise _check.fail(
            "len(train_dataset)",
            len(data),
            f"must be the plan's examples={plan.examples}",
            "make a plan for this data",
        )


def _check_collator(collator: Any, self_test: bool) -> None:
    if self_test and isinstance(collator, DataCollatorForLanguageModeling) and collator.mlm:
        raise _check.fail(
            "data_collator", type(collator).__name__,
            "masks a whole batch at once, so the self-test cannot compare an example alone with itself in a batch",
            "mask each text in the data set, as docs/huggingface.md shows, or give self_test=False",
        )  # fmt: skip
