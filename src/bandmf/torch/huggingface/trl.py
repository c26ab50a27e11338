"""PrivateSFTTrainer and PrivateDPOTrainer: trl's trainers with the steps, the losses and the logs of PrivateTrainer.

Guarantees: beside those of PrivateTrainer, the loss of a text is averaged over its own scored tokens, and a pair of
texts is one example: both of its texts together contribute at most the clip norm. Options that mix examples, or whose
loss is not written out for single examples, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ProcessorMixin
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from bandmf import _check
from bandmf.torch.clipping.rows import rows
from bandmf.torch.huggingface.options import Option
from bandmf.torch.huggingface.trainer import PrivateTrainer
from bandmf.torch.losses import IGNORED, own_mean

_SHARED = (
    Option("padding_free", (False,), "puts all texts of a batch into one row", "leave it out"),
    Option(
        "activation_offloading", (False,),
        "wraps trl's own forward pass, which a private run does not make", "leave it out",
    ),
)  # fmt: skip
_SFT = (
    *_SHARED,
    Option("packing", (False,), "puts parts of several texts into one example", "leave it out"),
    Option(
        "eval_packing", (None, False), "hides whether texts to evaluate on are training texts", "leave it out"
    ),
    Option("loss_type", ("nll", "dft"), "has no loss for single examples here", "use 'nll' or 'dft'"),
)  # fmt: skip
_DPO = (
    *_SHARED,
    Option(
        "loss_type", (["sigmoid"], ["hinge"], ["ipo"]), "has no loss for single pairs here",
        "use 'sigmoid', 'hinge' or 'ipo'",
    ),
    Option("loss_weights", (None, [1.0]), "scales a loss whose gradients are clipped", "leave it out"),
    Option("f_divergence_type", ("reverse_kl",), "is not supported", "use 'reverse_kl'"),
    Option("ld_alpha", (None,), "is not supported", "leave it out"),
    Option("use_weighting", (False,), "is not supported", "leave it out"),
    Option(
        "sync_ref_model", (False,),
        "changes the reference model, which checkpoints of the run do not hold", "leave it out",
    ),
)  # fmt: skip


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """trl.SFTTrainer for private training: `plan`, `clip_norm` and `folder` as in PrivateTrainer, the rest as there.

    Args and attributes are those of PrivateTrainer. Data with several texts packed into one example, padding-free
    batches, images and the balancing losses of experts are refused.
    """

    arguments_class = SFTConfig
    more_options = _SFT

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        _check_inputs(self)

    def losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Of each text, averaged over its own scored tokens."""
        inputs = {**inputs, "use_cache": False}
        if self.args.loss_type != "dft" or self.compute_loss_func is not None:
            return super().losses(model, inputs)
        labels = inputs.pop("labels")
        scores = _token_scores(model(**inputs).logits, labels)
        return own_mean(-scores * scores.exp().detach(), labels[:, 1:] != IGNORED, len(labels))


class PrivateDPOTrainer(PrivateTrainer, DPOTrainer):
    """trl.DPOTrainer for private training: `plan`, `clip_norm` and `folder` as in PrivateTrainer, the rest as there.

    Args and attributes are those of PrivateTrainer. One example is one pair of texts. The losses are "sigmoid", "hinge"
    and "ipo"; others, padding-free batches, images and a reference model that follows are refused.
    """

    arguments_class = DPOConfig
    more_options = _DPO

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        _check_inputs(self)

    def losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Of each pair, from one pass: first all texts that were chosen, then all that were rejected."""
        mask = inputs["completion_mask"]
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with rows(parts=2):
            logits = model(**given, use_cache=False).logits
        labels = inputs["input_ids"].masked_fill(mask == 0, IGNORED)
        chosen, rejected = _token_scores(logits, labels).sum(1).chunk(2)
        ref_chosen, ref_rejected = self._reference(inputs)
        return _pair_losses(
            self.args.loss_type[0], self.args.beta, chosen - ref_chosen, rejected - ref_rejected, mask.sum(1)
        )

    def _reference(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if "ref_chosen_logps" in inputs:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        reference = self.model if self.ref_model is None else self.ref_model
        with rows(parts=2):
            return self.compute_ref_log_probs(reference, inputs)


def _token_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each token given those before it; zero where none is scored."""
    flat = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    each = functional.cross_entropy(*flat, reduction="none", ignore_index=IGNORED)
    return -each.view(len(labels), -1)


def _pair_losses(kind: str, beta: float, chosen: Tensor, rejected: Tensor, lengths: Tensor) -> Tensor:
    """Of the log-ratios of chosen and rejected texts to the reference."""
    if kind == "ipo":
        counts = lengths.clamp(min=1).chunk(2)
        return (chosen / counts[0] - rejected / counts[1] - 1 / (2 * beta)) ** 2
    margin = beta * (chosen - rejected)
    return -functional.logsigmoid(margin) if kind == "sigmoid" else torch.relu(1 - margin)


def _check_inputs(trainer: Any) -> None:
    if isinstance(trainer.processing_class, ProcessorMixin):
        raise _check.fail(
            "processing_class", type(trainer.processing_class).__name__, "images beside texts are not supported",
            "give a tokenizer, or use bandmf.torch.Training",
        )  # fmt: skip
    if trainer.aux_loss_enabled:
        raise _check.fail(
            "router_aux_loss_coef", trainer.router_aux_loss_coef,
            "balances the experts over all examples of a batch", "use 0.0",
        )  # fmt: skip
