"""Direct preference optimization: two forward passes, and one of both answers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import Training, rows
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan

WORDS, PROMPT, ANSWER, PADDING, IGNORED = 12, 3, 5, 0, -100


class Policy(nn.Module):
    """A small causal language model, for texts that are padded at their ends."""

    def __init__(self, width=16):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(PROMPT + ANSWER, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words, mask):
        time = words.shape[1]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(time, time, dtype=torch.bool).triu(1)
        x = self.words(words) + self.positions(positions)
        return self.head(self.body(x, mask=causal, src_key_padding_mask=mask == 0))


def some_preferences(examples=48):
    """Prompts with two answers: the better one has words of the upper half. Only answers are scored."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(examples):
        prompt = torch.randint(1, WORDS, (PROMPT,), generator=generator)
        pair = {}
        for name, low, high in (("chosen", 6, WORDS), ("rejected", 1, 6)):
            length = int(torch.randint(2, ANSWER + 1, (), generator=generator))
            answer = torch.randint(low, high, (length,), generator=generator)
            pair[f"{name}_input_ids"] = torch.cat([prompt, answer])
            pair[f"{name}_labels"] = torch.cat([torch.full((PROMPT,), IGNORED), answer])
        pairs.append(pair)
    return pairs


def collate(pairs):
    """Chosen and rejected texts, each padded to the longest of its kind, with masks."""
    batch = {}
    for name in pairs[0]:
        value = IGNORED if name.endswith("labels") else PADDING
        batch[name] = nn.utils.rnn.pad_sequence([pair[name] for pair in pairs], True, value)
    for kind in ("chosen", "rejected"):
        batch[f"{kind}_mask"] = (batch[f"{kind}_input_ids"] != PADDING).long()
    return batch


def log_probabilities(logits, labels):
    """(texts,): of the words that are scored."""
    labels, logits = labels[:, 1:], logits[:, :-1]
    scored = labels != IGNORED
    each = logits.log_softmax(-1).gather(2, labels.where(scored, 0).unsqueeze(2)).squeeze(2)
    return (each * scored).sum(1)


def separate(model, batch):
    """Two forward passes."""
    return tuple(
        log_probabilities(model(batch[f"{kind}_input_ids"], batch[f"{kind}_mask"]), batch[f"{kind}_labels"])
        for kind in ("chosen", "rejected")
    )


def concatenated(model, batch):
    """One forward pass of both, padded alike: faster, with twice as many rows as examples."""
    both = {}
    longest = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    for name, value in (("input_ids", PADDING), ("mask", 0), ("labels", IGNORED)):
        parts = [batch[f"{kind}_{name}"] for kind in ("chosen", "rejected")]
        both[name] = torch.cat([functional.pad(x, (0, longest - x.shape[1]), value=value) for x in parts])
    with rows(parts=2):
        logits = model(both["input_ids"], both["mask"])
    return log_probabilities(logits, both["labels"]).chunk(2)


def preference_losses(reference, forward, beta=0.5):
    def losses(model, batch):
        chosen, rejected = forward(model, batch)
        with torch.no_grad():
            reference_chosen, reference_rejected = forward(reference, batch)
        ratio = (chosen - rejected) - (reference_chosen - reference_rejected)
        return -functional.logsigmoid(beta * ratio)

    return losses


@torch.no_grad()
def reward_accuracy(model, reference, forward, pairs):
    model.eval()
    batch = collate(pairs)
    chosen, rejected = (a - b for a, b in zip(forward(model, batch), forward(reference, batch), strict=True))
    model.train()
    return float((chosen > rejected).float().mean())


def train_dpo(forward):
    torch.manual_seed(0)
    policy, data = Policy(), some_preferences()
    reference = copy.deepcopy(policy).eval()
    losses = preference_losses(reference, forward)
    before = mean_loss(policy, losses, data, collate)
    assert_first_sum_is_autograds(policy, losses, data, collate)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    plan, accuracies = quiet_plan(data, steps=12, batch_size=16), []
    training = Training(
        policy, losses, optimizer, data, plan, clip_norm=1.0, scheduler=schedule, collate=collate, micro_batch=8
    )
    for step in training:
        if step % 4 == 0:
            accuracies.append(reward_accuracy(policy, reference, forward, data))
    assert step == 12
    assert accuracies[-1] > 0.9
    assert mean_loss(policy, losses, data, collate) < before


@pytest.mark.parametrize("forward", [pytest.param(separate, marks=pytest.mark.long), concatenated])
def test_dpo(forward):
    train_dpo(forward)


def test_both_ways_of_dpo_are_one_loss():
    torch.manual_seed(0)
    policy, batch = Policy(), collate(some_preferences(6))
    for one, other in zip(separate(policy, batch), concatenated(policy, batch), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
