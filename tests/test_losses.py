"""bandmf.torch.losses: one loss for each example, which no other example can change."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from bandmf.torch import losses

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(4, 7, 5, generator=GENERATOR)
LABELS = torch.randint(0, 5, (4, 7), generator=GENERATOR)
LABELS[0, 3:] = -100
LABELS[2, 1:] = -100
LABELS[3] = -100  # nothing to be scored


def alone(criterion, scores=SCORES, labels=LABELS):
    """What torch's mean says of each example by itself."""
    return torch.stack([criterion(s, y) for s, y in zip(scores, labels, strict=True)]).nan_to_num()


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}],
    ids=["plain", "label smoothing", "another label ignored"],
)
def test_classification_is_torchs_mean_of_each_example_alone(options):
    labels = LABELS.where(LABELS != -100, 2) if options.get("ignore_index") == 2 else LABELS
    expected = alone(nn.CrossEntropyLoss(**options), labels=labels)
    torch.testing.assert_close(losses.classification(SCORES, labels, **options), expected)


def test_classification_of_single_labels():
    expected = functional.cross_entropy(SCORES[:, 0], LABELS[:, 0].clamp(min=0), reduction="none")
    torch.testing.assert_close(losses.classification(SCORES[:, 0], LABELS[:, 0].clamp(min=0)), expected)


def test_class_weights_multiply_without_changing_the_count():
    """Torch divides by the sum of the weights; here the count is the example's own, so that weights are kept."""
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
    each = functional.cross_entropy(SCORES.mT, LABELS, weight=weight, reduction="none")
    expected = each.sum(1) / (LABELS != -100).sum(1).clamp(min=1)
    torch.testing.assert_close(losses.classification(SCORES, LABELS, weight=weight), expected)


def test_an_example_without_labels_has_loss_zero_and_no_gradient():
    scores = SCORES.clone().requires_grad_(True)
    found = losses.classification(scores, LABELS)
    found.sum().backward()
    assert float(found[3]) == 0
    assert torch.equal(scores.grad[3], torch.zeros(7, 5))
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("loss", [losses.classification, losses.language_model])
def test_no_example_changes_the_loss_of_another(loss):
    other_scores, other_labels = 100 * SCORES, LABELS.flip(0)
    other_scores[0], other_labels[0] = SCORES[0], LABELS[0]
    assert torch.equal(loss(SCORES, LABELS)[0], loss(other_scores, other_labels)[0])
    assert not torch.equal(loss(SCORES, LABELS)[1], loss(other_scores, other_labels)[1])


def test_language_model_is_the_loss_of_transformers_for_each_text_alone():
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    tokens = torch.randint(0, 20, (3, 8), generator=GENERATOR)
    labels = tokens.clone()
    labels[0, 5:] = labels[1, 2:] = -100
    with torch.no_grad():
        found = losses.language_model(model(tokens).logits, labels)
        for number in range(3):
            one = slice(number, number + 1)
            expected = model(tokens[one], labels=labels[one]).loss
            torch.testing.assert_close(found[number], expected)


def test_language_model_takes_labels_that_were_shifted_before():
    shifted = losses.language_model(SCORES[:, :-1], LABELS[:, 1:], shift=False)
    torch.testing.assert_close(losses.language_model(SCORES, LABELS), shifted)
