"""Speech: CTC on the features of utterances of different lengths, by convolutions and a GRU."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from bandmf.torch import Training
from ports.harness import assert_first_sum_is_autograds, mean_loss, quiet_plan

FEATURES, LETTERS, BLANK, LONGEST = 6, 5, 0, 24


def some_utterances(examples=48):
    """Each letter sounds for four frames; one to five letters, no two alike in a row."""
    generator = torch.Generator().manual_seed(0)
    sounds, utterances = torch.randn(LETTERS, FEATURES, generator=generator), []
    for _ in range(examples):
        steps = torch.randint(1, LETTERS - 1, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator)
        letters = steps.cumsum(0) % (LETTERS - 1) + 1
        frames = sounds[letters].repeat_interleave(4, 0)
        utterances.append((frames + 0.1 * torch.randn(frames.shape, generator=generator), letters))
    return utterances


def collate(utterances):
    """Spectrograms, padded to one length for all batches, letters, and the lengths of both."""
    frames, letters = zip(*utterances, strict=True)
    lengths = torch.tensor([len(each) for each in frames])
    padded = pad_sequence(list(frames), batch_first=True)
    padded = functional.pad(padded, (0, 0, 0, LONGEST - padded.shape[1]))
    letter_lengths = torch.tensor([len(each) for each in letters])
    return padded, lengths, pad_sequence(list(letters), batch_first=True), letter_lengths


class Recognizer(nn.Module):
    """Two convolutions over time, one with stride 2, a GRU that reads both ways, and the letters of each frame."""

    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Conv1d(FEATURES, width, 3, padding=1)
        self.second, self.norm = nn.Conv1d(width, width, 3, stride=2, padding=1), nn.LayerNorm(width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(2 * width, LETTERS)

    def forward(self, frames):
        x = functional.gelu(self.second(functional.gelu(self.first(frames.transpose(1, 2))))).transpose(1, 2)
        x, _ = self.gru(self.norm(x))
        return functional.log_softmax(self.head(self.drop(x)), -1)


def ctc_losses(model, batch):
    frames, lengths, letters, letter_lengths = batch
    scores = model(frames).transpose(0, 1)  # time first, as torch's loss has it
    each = functional.ctc_loss(scores, letters, (lengths + 1) // 2, letter_lengths, BLANK, reduction="none")
    return each / letter_lengths


@torch.no_grad()
def letter_errors(model, utterances):
    """The share of utterances whose greedy transcript is wrong."""
    model.eval()
    frames, lengths, *_ = collate(utterances)
    wrong = 0
    for scores, length, (_, letters) in zip(model(frames), (lengths + 1) // 2, utterances, strict=True):
        heard = scores[:length].argmax(-1).unique_consecutive()
        wrong += heard[heard != BLANK].tolist() != letters.tolist()
    model.train()
    return wrong / len(utterances)


def test_ctc_with_convolutions_and_gru():
    torch.manual_seed(0)
    model, data = Recognizer(), some_utterances()
    before = mean_loss(model, ctc_losses, data, collate)
    assert_first_sum_is_autograds(copy.deepcopy(model).eval(), ctc_losses, data, collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = quiet_plan(data, steps=18, batch_size=16)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=plan.steps + 1)
    training = Training(model, ctc_losses, optimizer, data, plan, clip_norm=1.0, scheduler=schedule, collate=collate)
    errors = []
    for step in training:
        if step % 6 == 0:
            errors.append(letter_errors(model, data))
    assert step == 18
    assert len(errors) == 3
    assert mean_loss(model, ctc_losses, data, collate) < 0.8 * before
