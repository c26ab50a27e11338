"""Losses of single examples, for private training: each divides by its own example's count, never by the batch's.

A mean over all tokens of a padded batch makes every example's gradient depend on the lengths of the others. These
return one loss for each example, as the `losses` that bandmf.torch.Training is given must do:

    def losses(model, batch):
        return bandmf.torch.losses.language_model(model(batch["input_ids"]).logits, batch["labels"])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

IGNORED = -100  # torch's and transformers' label of what is not scored


def classification(
    scores: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORED,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of scores (examples, ..., classes) and labels (examples, ...), one mean for each example.

    >>> import torch
    >>> classification(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, -100, -100]]))
    tensor([1.3863, 1.3863])
    """
    options: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
    flat = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    each = functional.cross_entropy(*flat, reduction="none", ignore_index=ignore_index, **options)
    return own_mean(each, labels != ignore_index, len(scores))


def language_model(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORED, shift: bool = True) -> Tensor:
    """The loss of predicting each token from those before it, averaged over a text's own scored tokens.

    Labels are the tokens themselves, as in transformers, which shifts them inside the model; `shift=False` where
    they have been shifted before.

    >>> import torch
    >>> logits, labels = torch.zeros(2, 5, 8), torch.tensor([[1, 2, 3, 4, 5], [1, 2, -100, -100, -100]])
    >>> language_model(logits, labels)  # log 8 for both, however many tokens they have
    tensor([2.0794, 2.0794])
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return classification(logits, labels, ignore_index=ignore_index)


def own_mean(losses: Tensor, scored: Tensor, rows: int) -> Tensor:
    """The mean of each example's scored losses; zero for an example without any."""
    counts = scored.reshape(rows, -1).sum(1).clamp(min=1)
    return losses.reshape(rows, -1).sum(1) / counts
