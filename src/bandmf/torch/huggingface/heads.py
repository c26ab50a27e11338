"""One loss for each example, by the head of a model of transformers.

The loss that such a model returns is a mean over all tokens of a batch: with texts of different lengths an example's
share in it depends on the others. Here every example is averaged on its own, and weighs the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bandmf import _check
from bandmf.torch import losses

ExampleLosses = Callable[[Any, Tensor], Tensor]  # of the model's outputs and the labels

_CLASSES = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Audio", "Video"))
_TOKENS = ("ForMaskedLM", "ForTokenClassification")
_TEXTS = ("ForCausalLM", "ForConditionalGeneration")
_ROUNDING, _HALF = 1e-3, 5e-2  # differences of losses that rounding explains


def losses_of(model: Any, label_smoothing: float = 0.0) -> ExampleLosses:
    """The losses of single examples that belong to a model's head."""
    model = without_adapters(model)
    kind = _kind(model)
    if kind in _CLASSES:
        return partial(_classes, config=model.config, label_smoothing=label_smoothing)
    if kind in _TOKENS or (kind in _TEXTS and reads_labels(model)):  # a decoder's labels are not shifted
        return partial(_tokens, label_smoothing=label_smoothing)
    if kind in _TEXTS:
        return partial(_next_tokens, label_smoothing=label_smoothing)
    raise _check.fail(
        "model", type(model).__name__, "has no head whose loss is known for single examples",
        "give compute_loss_func=, a function of (outputs, labels, num_items_in_batch) that returns one loss for each "
        "example; for labels of another name, override losses(self, model, inputs)",
    )  # fmt: skip


@torch.no_grad()
def check_own_loss(model: Any, inputs: Any) -> None:
    """Refuse a model whose own loss of one example is not the one that its head is known for.

    Some do not shift labels, or add a penalty. Losses have no noise: the message does not name them.
    """
    was_training = model.training
    model.eval()
    try:
        outputs = model(**inputs)
        own, ours = outputs["loss"], losses_of(model)(outputs, inputs["labels"]).mean()
    except Exception:  # whatever a model says to labels: it is not asked for its own loss afterwards
        return
    finally:
        model.train(was_training)
    allowed = _HALF if outputs["logits"].dtype.itemsize < 4 else _ROUNDING
    if bool(own.isfinite() & ours.isfinite()) and bool((own - ours).abs() > allowed * own.abs().clamp(min=1)):
        raise _check.fail(
            "model", type(without_adapters(model)).__name__, "has another loss of its own than the cross-entropy or "
            "error of its head (labels that are shifted otherwise, a penalty, a loss of experts)",
            "override losses(self, model, inputs), or give compute_loss_func=, to say what is trained",
        )  # fmt: skip


def without_adapters(model: Any) -> Any:
    """The model that peft has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def reads_labels(model: Any) -> bool:
    """Whether the model needs the labels as inputs: encoder-decoders make what the decoder reads from them."""
    return bool(getattr(getattr(without_adapters(model), "config", None), "is_encoder_decoder", False))


def _kind(model: Any) -> str | None:
    """What transformers calls the loss of a head; its older names of language models are known by class."""
    name = type(model).__name__
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "ForCausalLM"
    return getattr(model, "loss_type", None)


def _logits(outputs: Any) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits.float()


def _next_tokens(outputs: Any, labels: Tensor, *, label_smoothing: float) -> Tensor:
    logits = _logits(outputs)
    labels = functional.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)  # of learned prompts
    return losses.classification(logits[:, :-1], labels[:, 1:], label_smoothing=label_smoothing)


def _tokens(outputs: Any, labels: Tensor, *, label_smoothing: float) -> Tensor:
    return losses.classification(_logits(outputs), labels, label_smoothing=label_smoothing)


def _classes(outputs: Any, labels: Tensor, *, config: Any, label_smoothing: float) -> Tensor:
    """One class, several, or numbers, as the model's configuration and its labels say."""
    logits, kind = _logits(outputs), config.problem_type
    if kind is None:
        whole = not labels.is_floating_point() and labels.dtype != torch.bool
        kind = "single_label_classification" if whole else "multi_label_classification"
        kind = "regression" if config.num_labels == 1 else kind
    if kind == "single_label_classification":
        labels = labels.reshape(logits.shape[:-1])
        return losses.classification(logits, labels, label_smoothing=label_smoothing)
    if label_smoothing:
        raise _check.fail("label_smoothing_factor", label_smoothing, f"has no meaning for {kind}", "use 0")
    targets = labels.reshape(logits.shape).to(logits.dtype)
    if kind == "regression":
        each = functional.mse_loss(logits, targets, reduction="none")
    else:
        each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.own_mean(each, torch.ones_like(each), len(each))
