"""Losses may be added up in any way; what is done to the sum must be linear. Whose each number is, the graph tells."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from private_loops import outcome, vectors

LARGE = 1e6  # no loss of a rehearsal comes near it


def net(features=4):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, features))


def refusal(loss, model=None, examples=16, **options):
    def loop(private, batch):
        private.optimizer.zero_grad()
        loss(private.model, *batch).backward()
        private.optimizer.step()

    return outcome(model or net(), vectors(examples), "auto", loop, **options).refused


def one_by_one(model, x, y):
    return [functional.cross_entropy(scores, label) for scores, label in zip(model(x), y, strict=True)]


def each(model, x, y):
    return functional.cross_entropy(model(x), y, reduction="none")


def errors(model, x):
    return (model(x) - x[:, :4]).square()


def positive(model, x, y):
    return model(x)[y > 0], y[y > 0]


def kept(model, x, y):
    found = torch.zeros(len(y))
    for place, loss in enumerate(one_by_one(model, x, y)):
        found[place] = loss
    return found


# --- cut off --------------------------------------------------------------------------------------------


def rows_of_one(model, x, y):
    scores = model(x)
    total = sum(functional.cross_entropy(scores[i : i + 1], y[i : i + 1]) for i in range(len(y)))
    return (total / len(y)).clamp(max=LARGE)


def where_finite(model, x, y):
    loss = sum(functional.mse_loss(a, b) for a, b in zip(model(x), x[:, :4], strict=True)) / len(y)
    return torch.where(loss.isfinite(), loss, torch.zeros(()))


def some_in_a_list(model, x, y):
    losses = [loss for loss, label in zip(one_by_one(model, x, y), y, strict=True) if label > 0]
    return (torch.stack(losses).sum() / len(y)).clamp(max=LARGE)


def pieces_of_different_lengths(model, x, y):
    pieces = [scores[: int(label) + 1].square() for scores, label in zip(model(x), y, strict=True)]
    return (torch.cat(pieces).sum() / len(y)).clamp(max=LARGE)


def chunks(model, x, y):
    pairs = zip(model(x).split(3), y.split(3), strict=True)
    return sum(functional.cross_entropy(*pair, reduction="sum").clamp(max=LARGE) for pair in pairs) / len(y)


def overlapping(model, x, y):
    scores = model(x).square()
    return sum(scores[i : i + 2].sum().clamp(max=LARGE) for i in range(len(y))) / len(y)


def set_by_a_mask(model, x, _):
    parts = errors(model, x).mean(0) + 0
    parts[parts > LARGE] = 0
    return parts.sum()


CUT_OFF = {
    "one by one": lambda m, x, y: torch.nan_to_num(sum(one_by_one(m, x, y)) / len(y)),
    "minimum": lambda m, x, y: torch.minimum(sum(errors(m, x)).sum() / len(y), torch.tensor(LARGE)),
    "rows of one": rows_of_one,
    "where finite": where_finite,
    "some in a list": some_in_a_list,
    "pieces of different lengths": pieces_of_different_lengths,
    "chunks": chunks,
    "overlapping": overlapping,
    "set by a mask": set_by_a_mask,
    "kept in a tensor": lambda m, x, y: torch.nan_to_num(kept(m, x, y).mean()),
    "classes": lambda m, x, y: torch.zeros(4).index_add(0, y, each(m, x, y)).clamp(max=LARGE).sum() / len(y),
    "sums of features": lambda m, x, y: sum(part.clamp(max=LARGE) for part in errors(m, x).mean(0)),
    "part of several": lambda m, x, y: torch.stack([each(m, x, y).mean(), m(x).mean()])[0].clamp(max=LARGE),
    "after a broadcast": lambda m, x, y: (each(m, x, y) + errors(m, x).mean()).clamp(max=LARGE).mean(),
    "of chosen rows": lambda m, x, y: positive(m, x, y)[0].square().sum(0).clamp(max=LARGE).sum() / len(y),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_what_was_added_up_in_some_other_way_and_cut_off_is_refused(name):
    found = refusal(CUT_OFF[name])
    assert found is not None, "was accepted"
    assert "the loss of the whole batch goes through" in found


@pytest.mark.parametrize(("batch", "features"), [(2, 8), (4, 12), (5, 20), (8, 28), (8, 56), (16, 26)])
def test_features_of_a_multiple_of_the_batch_do_not_hide_what_is_cut_off(batch, features):
    """As of free bits: the mean over a batch of each latent's divergence, but at least so much."""

    def free_bits(model, x, _):
        return model(x).square().mean(0).clamp(min=1e-9).sum()

    found = refusal(free_bits, net(features), physical_batch_size=batch)
    assert found is not None, "was accepted"
    assert "goes through Clamp" in found


# --- right ----------------------------------------------------------------------------------------------


def selected(model, x, y):
    scores = model(x)
    mask = (y > 0).unsqueeze(-1).expand_as(scores)
    return functional.cross_entropy(scores.masked_select(mask).view(-1, 4), y[y > 0], reduction="sum") / len(
        y
    )


def chosen_twice(model, x, y):
    scores, labels = positive(model, x, y)
    return functional.cross_entropy(scores[labels > 1], labels[labels > 1], reduction="sum") / len(y)


def packed(model, x, y):
    """Places of all examples in one row, as many of each as its label says."""
    mask = torch.arange(4) <= y.unsqueeze(1)
    pieces = model(x)[mask].split(mask.sum(1).tolist())
    return torch.stack([piece.logsumexp(0) for piece in pieces]).relu().mean()


def packed_by_places(model, x, y):
    mask = torch.arange(4) <= y.unsqueeze(1)
    row, ends = model(x)[mask], [0, *mask.sum(1).cumsum(0).tolist()]
    return sum(row[a:b].norm() for a, b in pairwise(ends)) / len(y)


def within(model, x, _):
    """Contrasts of two views of each example."""
    one, two = model(x), model(-x)
    pairs = [functional.cosine_similarity(one, two), functional.cosine_similarity(one, x[:, :4])]
    return -(torch.stack(pairs, 1) / 0.1).log_softmax(1)[:, 0].mean()


RIGHT = {
    "a slice of features": lambda m, x, y: errors(m, x).mean(0)[1:].mean(),
    "a list of features": lambda m, x, y: errors(m, x).mean(0)[[0, 2]].mean(),
    "features by index": lambda m, x, y: errors(m, x).mean(0).index_select(0, torch.tensor([0, 2])).mean(),
    "selected": selected,
    "chosen twice": chosen_twice,
    "chosen and flat": lambda m, x, y: positive(m, x, y)[0].reshape(-1).abs().sum() / len(y),
    "real part": lambda m, x, y: torch.fft.fft(m(x) - x[:, :4]).mul(1 + 1j).mean().real,
    "cut off one by one": lambda m, x, y: sum(loss.clamp(max=3) for loss in one_by_one(m, x, y)) / len(y),
    "cut off in a tensor": lambda m, x, y: kept(m, x, y).clamp(max=3).mean(),
    "label smoothing": lambda m, x, y: functional.cross_entropy(m(x), y, label_smoothing=0.1),
    "focal": lambda m, x, y: ((1 - torch.exp(-(loss := each(m, x, y)))) ** 2 * loss).mean(),
    "classes": lambda m, x, y: (torch.zeros(4).index_add(0, y, each(m, x, y)) * y.new_ones(4)).sum() / len(y),
    "packed": packed,
    "packed by places": packed_by_places,
    "within an example": within,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_accepted_however_they_are_added_up(name):
    assert refusal(RIGHT[name]) is None


@pytest.mark.parametrize("batch", [2, 7])
def test_features_and_steps_of_a_multiple_of_the_batch_do_not_make_right_losses_wrong(batch):
    def steps_first(model, x, _):
        steps = model(x).view(len(x), 14, 2).transpose(0, 1)
        return steps.tanh().mean(0).relu().mean() + sum(row.norm() for row in model(x)) / len(x)

    assert refusal(steps_first, net(28), physical_batch_size=batch) is None
