"""Which arguments of a Trainer, and which overridden methods, a private run takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from bandmf import _check
from bandmf.planning import Plan


def check_one_model(given: Mapping[str, Any]) -> None:
    if given.get("model") is None or given.get("model_init") is not None:
        raise _check.fail("model_init", "...", "a private run has one model", "give the model as model=")


def check_folder(folder: str | Path | None, args: TrainingArguments) -> None:
    """The key must not lie where models are shared from."""
    shared = Path(str(args.output_dir)).resolve()
    if folder is not None and shared in (Path(folder).resolve(), *Path(folder).resolve().parents):
        raise _check.fail(
            "folder", str(folder), f"must not be in output_dir={args.output_dir!r}, which is shared or uploaded "
            "with the model: it holds the secret key", "give a folder beside it",
        )  # fmt: skip


def check_resume(resume: str | bool | None, folder: str | Path | None) -> None:
    if not resume:
        return
    if folder is None:
        raise _check.fail(
            "resume_from_checkpoint", resume, "only a run with a folder= can be resumed: the Trainer's own "
            "checkpoints hold weights, not what the run has released",
        )  # fmt: skip
    if resume is not True and Path(str(resume)).resolve() != Path(str(folder)).resolve():
        raise _check.fail(
            "resume_from_checkpoint", resume,
            f"a run goes on from its last checkpoint, in folder={str(folder)!r}", "leave it out",
        )  # fmt: skip


def check_overrides(kind: type, ours: type) -> None:
    """A private run asks `losses`: a compute_loss that was overridden without it would not be trained."""
    places = [
        next(number for number, each in enumerate(kind.__mro__) if name in vars(each))
        for name in ("losses", "compute_loss")
    ]
    losses, loss = (kind.__mro__[place] for place in places)
    if places[0] > places[1] or (losses is ours and loss is not Trainer):
        raise _check.fail(
            "compute_loss", loss.__name__, "is for evaluation only: a private run has one loss for each example",
            "override losses(self, model, inputs), which returns them",
        )  # fmt: skip


def check_data(model: nn.Module, data: Any, plan: Plan) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise _check.fail(
            "model", type(model).__name__, "its parameters are sharded; PrivateTrainer trains replicas only",
            "use bandmf.torch.Training with fully_shard (examples/fsdp.py)",
        )  # fmt: skip
    if data is not None and (isinstance(data, IterableDataset) or not hasattr(data, "__len__")):
        raise _check.fail(
            "train_dataset", type(data).__name__, "must have a length and give examples by index",
            "load it as a whole, or use bandmf.torch.Training, which takes streams of (index, example)",
        )  # fmt: skip
    if data is not None and plan.examples is not None and len(data) != plan.examples:
        raise _check.fail(
            "len(train_dataset)", len(data), f"must be the plan's examples={plan.examples}", "make a plan for this data"
        )


def check_given(name: str, value: Any) -> None:
    if value is None:
        raise _check.fail(name, None, "must be given to train")


def check_labels(labels: Any, inputs: Mapping[str, Any]) -> None:
    if labels is None:
        raise _check.fail(
            "inputs", sorted(inputs), "a batch must have 'labels'", "let the data set or data_collator give them"
        )  # fmt: skip
