"""Losses that are made of the whole batch, however that is done, are refused; those of single examples are not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

import verify_cases as cases
from bandmf.torch import verify

LARGE = 1e6  # no loss comes near it


def refused(losses):
    torch.manual_seed(2)
    return verify(cases.net(), lambda model, batch: losses(model, *batch), cases.vectors(6))


def one_by_one(model, x, y):
    return [functional.cross_entropy(scores, label) for scores, label in zip(model(x), y, strict=True)]


def each(model, x, y):
    return functional.cross_entropy(model(x), y, reduction="none")


def errors(model, x):
    return (model(x) - x[:, :4]).square()


def for_all(loss, y):
    return loss.expand(len(y))


OF_THE_BATCH = {
    "clamped mean": lambda m, x, y: for_all((sum(one_by_one(m, x, y)) / len(y)).clamp(max=LARGE), y),
    "finite mean": lambda m, x, y: for_all(torch.nan_to_num(each(m, x, y).mean()), y),
    "mean over classes": lambda m, x, y: torch.zeros(4).index_add(0, y, each(m, x, y))[y],
    "free bits": lambda m, x, y: for_all(errors(m, x).mean(0).clamp(min=1e-9).sum(), y),
    "less the mean": lambda m, x, y: (loss := each(m, x, y)) - loss.mean(),
    "less the detached mean": lambda m, x, y: (loss := each(m, x, y)) * (loss / loss.detach().mean()).detach(),
    "over the largest": lambda m, x, y: (loss := each(m, x, y)) / loss.detach().max(),
    "neighbors": lambda m, x, y: (loss := each(m, x, y)) + loss.roll(1),
    "neighbors without gradients": lambda m, x, y: each(m, x, y) * (1 + each(m, x, y).detach().roll(1)),
    "softmax over the batch": lambda m, x, y: -m(x).log_softmax(0)[:, 0],
    "counts of classes": lambda m, x, y: each(m, x, y) / y.bincount(minlength=4)[y],
    "number of examples": lambda m, x, y: each(m, x, y) / len(y),
    "by the place": lambda m, x, y: each(m, x, y) * torch.arange(1, len(y) + 1),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_losses_of_the_whole_batch_are_refused(name):
    found = refused(OF_THE_BATCH[name])
    assert not found.ok, "was accepted"
    assert found.problems[0].layer == "losses"


def chosen(model, x, y):
    """Only some examples have a loss; the others have none."""
    there = torch.zeros(len(y))
    return there.index_add(0, (y > 0).nonzero().flatten(), each(model, x, y)[y > 0])


def kept(model, x, y):
    found = torch.zeros(len(y))
    for place, loss in enumerate(one_by_one(model, x, y)):
        found[place] = loss
    return found


def packed(model, x, y):
    """Places of all examples in one row, as many of each as its label says."""
    mask = torch.arange(4) <= y.unsqueeze(1)
    pieces = model(x)[mask].split(mask.sum(1).tolist())
    return torch.stack([piece.logsumexp(0) for piece in pieces]).relu()


def packed_by_places(model, x, y):
    mask = torch.arange(4) <= y.unsqueeze(1)
    row, ends = model(x)[mask], [0, *mask.sum(1).cumsum(0).tolist()]
    return torch.stack([row[a:b].norm() for a, b in pairwise(ends)])


OF_EXAMPLES = {
    "one by one": lambda m, x, y: torch.stack(one_by_one(m, x, y)),
    "kept in a tensor": kept,
    "clamped each": lambda m, x, y: each(m, x, y).clamp(max=3),
    "chosen": chosen,
    "packed": packed,
    "packed by places": packed_by_places,
    "label smoothing": lambda m, x, y: functional.cross_entropy(m(x), y, label_smoothing=0.1, reduction="none"),
    "focal": lambda m, x, y: (1 - torch.exp(-(loss := each(m, x, y)))) ** 2 * loss,
    "class weights": lambda m, x, y: each(m, x, y) * torch.tensor([1.0, 2.0, 3.0, 4.0])[y],
    "spectrum": lambda m, x, y: torch.fft.fft(m(x) - x[:, :4]).abs().square().mean(1),
    "steps first": lambda m, x, y: m(x).view(len(x), 2, 2).transpose(0, 1).tanh().mean(0).relu().mean(1),
    "own threshold": lambda m, x, y: (loss := each(m, x, y)) * (loss.detach() > 1),
}


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_losses_of_single_examples_are_accepted_however_they_are_made(name):
    found = refused(OF_EXAMPLES[name])
    assert found.ok, str(found.problems[0])
