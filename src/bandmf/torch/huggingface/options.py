"""Which TrainingArguments a private run takes, which it fills in, and which it refuses.

Guarantee: an option that would choose batches, change gradients, show numbers of private batches, or keep the run from
taking each step of its plan once is refused by name; none is ignored. docs/huggingface.md has them all as a table.
"""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

from accelerate import Accelerator, DistributedType
from transformers import TrainingArguments

from bandmf import _check
from bandmf.planning import Plan


class Option(NamedTuple):
    """An option, the values that it may have, and why it may have no other."""

    name: str
    allowed: tuple[Any, ...]
    requirement: str
    remedy: str


_NOTHING: tuple[Any, ...] = (None, False, 0, "no", "", [])
_BATCHES = "the plan draws the batches"
_DEFAULT_EPOCHS, _DEFAULT_NORM = 3.0, 1.0  # of TrainingArguments: what a user has not chosen

_OPTIONS = (
    Option(
        "max_grad_norm", (*_NOTHING, _DEFAULT_NORM),
        "every example is clipped on its own; clipping their noisy sum once more only loses signal",
        "leave it out, and choose clip_norm=",
    ),
    Option(
        "gradient_accumulation_steps", (1,),
        "the batch of a step is the plan's, and is cut into micro-batches that are added up",
        "leave it out: per_device_train_batch_size= limits memory, bandmf.plan(batch_size=...) sets the batch",
    ),
    Option(
        "auto_find_batch_size", _NOTHING, "it would take released steps again",
        "choose per_device_train_batch_size=, which changes no result",
    ),
    Option("train_sampling_strategy", ("random",), _BATCHES, "leave it out"),
    Option("group_by_length", _NOTHING, _BATCHES, "leave it out"),
    Option("dataloader_drop_last", _NOTHING, f"{_BATCHES}, and drops no example", "leave it out"),
    Option("data_seed", (None,), f"{_BATCHES}, from the secret key of the run", "leave it out"),
    Option(
        "dataloader_in_order", (None, True), "each batch must arrive in its turn", "leave it out"
    ),
    Option(
        "fp16", _NOTHING, "its gradient scale would follow the data and skip steps", "use bf16=True"
    ),
    Option("fp16_full_eval", _NOTHING, "it casts the weights that are trained", "leave it out"),
    Option("bf16_full_eval", _NOTHING, "it casts the weights that are trained", "leave it out"),
    Option(
        "neftune_noise_alpha", _NOTHING,
        "its noise is scaled by the length that others make a text be padded to, so examples depend on each other",
        "leave it out",
    ),
    Option(
        "use_liger_kernel", _NOTHING, "its fused losses hide the gradients of single examples", "leave it out"
    ),
    Option(
        "deepspeed", _NOTHING, "it takes gradients and steps out of the hands of the run",
        "leave it out: processes that torchrun starts train together",
    ),
    Option(
        "fsdp", _NOTHING, "PrivateTrainer trains replicas only",
        "leave it out, or use bandmf.torch.Training with fully_shard (examples/fsdp.py)",
    ),
    Option("parallelism_config", _NOTHING, "PrivateTrainer trains replicas only", "leave it out"),
    Option(
        "include_num_input_tokens_seen", _NOTHING,
        "how many tokens the private batches have depends on the data and has no noise", "leave it out",
    ),
    Option(
        "skip_memory_metrics", (None, True), "the memory that a batch takes depends on its secret size",
        "leave it out",
    ),
    Option("debug", _NOTHING, "it prints activations of private examples", "leave it out"),
    Option(
        "restore_callback_states_from_checkpoint", _NOTHING, "callbacks are not part of a private run",
        "leave it out",
    ),
    Option(
        "enable_jit_checkpoint", _NOTHING, "it saves in the middle of a step",
        "use folder= and save_steps=: a killed run loses nothing but time",
    ),
    Option("torch_empty_cache_steps", _NOTHING, "is not supported", "leave it out"),
)  # fmt: skip
# Optimizers that update weights by themselves, or in two modes.
_OWN_STEPS = ("lomo", "layerwise", "schedule_free")


def checked(args: TrainingArguments, plan: Plan, more: tuple[Option, ...] = ()) -> TrainingArguments:
    """A copy in which the plan has filled in its steps; what it cannot honor is refused."""
    _check_options(args, (*_OPTIONS, *more))
    _check_optimizer(args)
    _check_trackers(args)
    _check_devices(args)
    _check_length(args, plan)
    args = copy.copy(args)
    args.max_steps = plan.steps
    if plan.epochs is not None:
        args.num_train_epochs = plan.epochs
    args.max_grad_norm = 0.0
    args.save_only_model = True  # the rest of a checkpoint is in the folder of the run, encrypted
    return args


def check_accelerator(args: TrainingArguments, accelerator: Accelerator) -> None:
    """The same for what `accelerate config`, its environment or `accelerator_config` have set behind the arguments."""
    _check_options(args, _OPTIONS)  # accelerator_config can change them
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise _check.fail(
            "distributed_type", str(kind), "PrivateTrainer trains replicas only", "start the script with torchrun"
        )
    if accelerator.scaler is not None:
        raise _check.fail(
            "mixed_precision", accelerator.mixed_precision, "its gradient scale would follow the data and skip steps",
            "use bf16=True",
        )  # fmt: skip


def _check_options(args: TrainingArguments, known: tuple[Option, ...]) -> None:
    for option in known:
        # One that this version does not have is not set.
        value = getattr(args, option.name, option.allowed[0])
        if value not in option.allowed:
            raise _check.fail(option.name, value, option.requirement, option.remedy)


def _check_optimizer(args: TrainingArguments) -> None:
    name = getattr(args.optim, "value", str(args.optim))
    if any(part in name for part in _OWN_STEPS):
        raise _check.fail(
            "optim", name, "must take its step when optimizer.step() is called, from gradients with noise",
            "use another one, such as adamw_torch",
        )  # fmt: skip


def _check_trackers(args: TrainingArguments) -> None:
    """Weights & Biases hooks into the backward pass, where gradients of single examples have no noise yet."""
    watched = os.environ.get("WANDB_WATCH", "false")
    if "wandb" in (args.report_to or []) and watched in ("gradients", "all"):
        raise _check.fail(
            "WANDB_WATCH", watched, "would log gradients of private examples without noise", "unset it, or use false"
        )


def _check_devices(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise _check.fail(
            "n_gpu", args.n_gpu, "nn.DataParallel hides which example is which",
            "start the script with torchrun, or let CUDA_VISIBLE_DEVICES name one device",
        )  # fmt: skip


def _check_length(args: TrainingArguments, plan: Plan) -> None:
    """The plan's steps are the length of the run: another one that was asked for is a misunderstanding."""
    if args.max_steps > 0 and args.max_steps != plan.steps:
        raise _check.fail(
            "max_steps", args.max_steps, f"the plan has {plan.steps} steps",
            "leave it out, or make a plan with as many steps",
        )  # fmt: skip
    if plan.examples is None or args.max_steps > 0 or args.num_train_epochs == _DEFAULT_EPOCHS:
        return
    if abs(args.num_train_epochs * plan.examples / plan.batch_size - plan.steps) > 1:
        raise _check.fail(
            "num_train_epochs", args.num_train_epochs,
            f"the plan has {plan.steps} steps, which are {plan.epochs:.3g} epochs",
            "leave it out, or make a plan with as many epochs",
        )  # fmt: skip
