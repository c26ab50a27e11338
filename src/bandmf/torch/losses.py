"""Losses of single examples, for private training: each divides by its own example's count, never by the batch's.

A mean over all tokens of a padded batch makes every example's gradient depend on the lengths of the others. These
return one loss for each example: give them to `private.backward`, or call `.mean()` and `.backward()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
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

    >>> classification(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, -100, -100]]))
    tensor([1.3863, 1.3863])
    """
    options: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
    flat = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    each = functional.cross_entropy(*flat, reduction="none", ignore_index=ignore_index, **options)
    return own_mean(each, labels != ignore_index, len(scores))


def language_model(
    logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORED, shift: bool = True
) -> Tensor:
    """The loss of predicting each token from those before it, averaged over a text's own scored tokens.

    Labels are the tokens themselves, as in transformers, which shifts them inside the model; `shift=False` where
    they have been shifted before.

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


class ExampleCriterion:
    """A criterion of torch that averages within each example first, then over the examples.

    `rows()` is how many examples the current batch has, None outside of training: there it is the criterion as it
    was given.
    """

    def __init__(self, criterion: Callable[..., Tensor], rows: Callable[[], int | None], mean: bool) -> None:
        self._criterion, self._rows, self._mean = criterion, rows, mean
        self._single, self._within = criterion, "mean"
        if hasattr(criterion, "reduction"):
            self._single, self._within = copy.copy(criterion), criterion.reduction
            self._single.reduction = "none"

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        rows = self._rows()
        if rows is None:
            return self._criterion(*arguments, **named)
        losses = self._losses(rows, *arguments, **named)
        return mean_or_sum(losses, self._mean)

    def _losses(self, rows: int, *arguments: Any, **named: Any) -> Tensor:
        losses = self._single(*arguments, **named)
        if losses.ndim == 0 or losses.numel() % rows or len(losses) % rows:
            raise ValueError(
                f"criterion: gave losses of shape {tuple(losses.shape)} for {rows} examples; it must not average"
                ' over them: use reduction="none"'
            )
        if self._within in ("sum", "batchmean"):
            return losses.reshape(rows, -1).sum(1)
        scored = self._scored(losses, arguments, named)
        if not _examples_first(losses, rows) and not bool(scored.all()):  # otherwise all have the same count
            raise ValueError(
                f"criterion: got scores of {rows} examples in another order than example by example (time first, say), "
                "so an example's own count is not known; transpose scores and labels before they are made one row: "
                "scores.transpose(0, 1).reshape(-1, classes)"
            )
        return own_mean(losses, scored, rows)

    def _scored(self, losses: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """Which of the losses count."""
        ignored = getattr(self._criterion, "ignore_index", None)
        target = named.get("target", arguments[1] if len(arguments) > 1 else None)
        if ignored is None or not isinstance(target, Tensor) or target.shape != losses.shape:
            return torch.ones_like(losses)
        return target != ignored


_FORWARD = 8  # operations between a loss and the scores as the model gave them


def _examples_first(losses: Tensor, rows: int) -> bool:
    """Whether the losses are ordered by example, as far as autograd knows: it tells what was made one long row of.

    In the rehearsals of the self-test batches have several sizes, of which one at least is not that of the time.
    """
    if losses.ndim > 1:
        return len(losses) == rows
    node: Any = losses.grad_fn
    for _ in range(_FORWARD):
        if node is None:
            break
        shape = tuple(getattr(node, "_saved_self_sym_sizes", ()))
        if len(shape) > 1 and shape[0] * shape[1] == len(losses) != rows and rows in shape[:2]:
            return shape[0] == rows
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return True


def mean_or_sum(losses: Tensor, mean: bool) -> Tensor:
    """What `backward` is called on, for a loop whose loss is a mean or a sum over the examples."""
    return losses.mean() if mean else losses.sum()
