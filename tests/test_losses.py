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


# --- the private criterion ------------------------------------------------------------------------------


def private_criterion(criterion, rows=4, mean=True):
    return losses.ExampleCriterion(criterion, lambda: rows, mean)


CRITERIA = {
    "cross entropy": (nn.CrossEntropyLoss(), SCORES.mT, LABELS.clamp(min=0)),
    "cross entropy, smooth": (nn.CrossEntropyLoss(label_smoothing=0.1), SCORES.mT, LABELS.clamp(min=0)),
    "squares": (nn.MSELoss(), SCORES, torch.zeros_like(SCORES)),
    "absolute": (nn.L1Loss(), SCORES[:, 0, 0], torch.zeros(4)),
    "binary": (nn.BCEWithLogitsLoss(), SCORES, (SCORES > 0.3).float()),
    "likelihood": (nn.NLLLoss(), SCORES.log_softmax(-1).mT, LABELS.clamp(min=0)),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), SCORES.log_softmax(-1), SCORES.softmax(-1)),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_where_all_examples_count_alike_the_private_criterion_is_the_criterion(name):
    criterion, *arguments = CRITERIA[name]
    torch.testing.assert_close(private_criterion(criterion)(*arguments), criterion(*arguments))


def test_the_private_criterion_divides_by_each_examples_own_count():
    expected = losses.classification(SCORES, LABELS)
    torch.testing.assert_close(private_criterion(nn.CrossEntropyLoss())(SCORES.mT, LABELS), expected.mean())
    by_name = private_criterion(nn.CrossEntropyLoss())(input=SCORES.mT, target=LABELS)
    torch.testing.assert_close(by_name, expected.mean())
    total = private_criterion(nn.CrossEntropyLoss(), mean=False)(SCORES.mT, LABELS)
    torch.testing.assert_close(total, expected.sum())


def test_the_private_criterion_takes_all_tokens_in_a_row():
    """Scores as (examples x tokens, classes), as language models are often written."""
    found = private_criterion(nn.CrossEntropyLoss())(SCORES.reshape(-1, 5), LABELS.reshape(-1))
    torch.testing.assert_close(found, losses.classification(SCORES, LABELS).mean())


FLAT = {
    "a view": (lambda x: x.view(-1, 5), lambda y: y.view(-1)),
    "reshaped": (lambda x: x.reshape(-1, 5), lambda y: y.reshape(-1)),
    "flattened": (lambda x: x.flatten(0, 1).float(), lambda y: y.flatten()),
    "shifted": (lambda x: x[:, :-1].reshape(-1, 5), lambda y: y[:, 1:].reshape(-1)),
    "shifted and copied": (lambda x: x[:, :-1].contiguous().view(-1, 5), lambda y: y[:, 1:].contiguous().view(-1)),
    "half": (lambda x: x.bfloat16().view(-1, 5).float() / 2, lambda y: y.view(-1)),
}  # fmt: skip


@pytest.mark.parametrize("form", FLAT)
def test_tokens_in_a_row_are_grouped_by_example_and_time_first_is_refused(form):
    """Grouped as if examples came first, the counts of many would depend on the labels of one."""
    scores, labels = FLAT[form]
    given = nn.Parameter(SCORES.clone())
    found = private_criterion(nn.CrossEntropyLoss())(scores(given), labels(LABELS))
    expected = losses.classification(scores(given).view(4, -1, 5), labels(LABELS).view(4, -1))
    torch.testing.assert_close(found, expected.mean())
    time_first = given.transpose(0, 1).reshape(-1, 5)
    with pytest.raises(ValueError, match=r"another order.*scores\.transpose\(0, 1\)"):
        private_criterion(nn.CrossEntropyLoss())(time_first, LABELS.T.reshape(-1))


def test_time_first_is_accepted_where_every_example_has_the_same_count():
    given, labels = nn.Parameter(SCORES.clone()), LABELS.clamp(min=0)
    found = private_criterion(nn.CrossEntropyLoss())(
        given.transpose(0, 1).reshape(-1, 5), labels.T.reshape(-1)
    )
    torch.testing.assert_close(found, nn.CrossEntropyLoss()(given.mT, labels))


def test_the_reduction_within_an_example_is_that_of_the_criterion():
    found = private_criterion(nn.MSELoss(reduction="sum"), mean=False)(SCORES, torch.zeros_like(SCORES))
    torch.testing.assert_close(found, SCORES.square().sum())


def test_a_function_that_averages_over_the_examples_is_refused():
    with pytest.raises(ValueError, match=r'must not average over them: use reduction="none"'):
        private_criterion(functional.cross_entropy)(SCORES.mT, LABELS)


def test_the_criterion_that_was_given_is_not_changed():
    criterion = nn.CrossEntropyLoss()
    private_criterion(criterion)
    assert criterion.reduction == "mean"
