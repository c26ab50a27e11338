"""What all examples share is as long as the batch by chance: it must not be taken for rows of the examples.

`verify` cannot see it, as its batches have other sizes; each test compares with single examples, or takes one away.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch.clipping import make_clipping
from bandmf.torch.clipping.recording import calls
from one_at_a_time import assert_clipped_as_single_examples, empty_sums, flat, learn, trained

CLIP, LENGTH = 0.1, 16


def clipping_of(model):
    return make_clipping("auto", model, trained(model), CLIP, False)


def clipped_sum(model, losses, batch, examples, clipping):
    torch.manual_seed(1)
    sums = empty_sums(trained(model))
    assert not int(clipping.add_to(sums, losses, batch, examples, examples))
    return flat(sums)


class Reader(nn.Module):
    """Positions as nanoGPT has them, which alone are trained, and lengths that are no tensor."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.out = nn.Embedding(50, 8), nn.Embedding(LENGTH, 8), nn.Linear(8, 1)
        for module in (self.words, self.out):
            module.requires_grad_(False)

    def forward(self, words, lengths):
        there = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
        hidden = self.words(words) * 0.1 * there[..., None] + self.positions(torch.arange(LENGTH))
        return (self.out(hidden.tanh())[..., 0] * there).sum(1)


def positions(count):
    words = torch.full((LENGTH + 2, LENGTH), 7)
    model, lengths = Reader(), [LENGTH] * (LENGTH + 2)
    losses = lambda model, batch: 100 * model(**batch)  # noqa: E731
    return model, losses, lambda kept: {"words": words[kept], "lengths": [lengths[n] for n in kept]}


def positions_in_a_batch_of_another_class(count):
    model, losses, batch_of = positions(count)
    return model, losses, lambda kept: Strange(batch_of(kept))


class Strange:
    """A batch of a class of its own."""

    def __init__(self, batch):
        self.batch = batch

    def keys(self):
        return self.batch.keys()

    def __getitem__(self, name):
        return self.batch[name]


class Prototypes(nn.Module):
    """One table, called with what an example is, and with all classes."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(LENGTH, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.out(self.table(ids).detach()) @ self.table(torch.arange(LENGTH)).T


def prototypes(count):
    ids, labels = torch.full((LENGTH + 8,), 3), torch.full((LENGTH + 8,), 5)
    losses = lambda model, batch: functional.cross_entropy(20 * model(batch[0]), batch[1], reduction="none")  # noqa: E731
    return Prototypes(), losses, lambda kept: [ids[kept], labels[kept]]


class Shifted(nn.Module):
    """A layer without a rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, table):
        return x + self.weight * table


class Tabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.shifted = Shifted()
        self.register_buffer("table", torch.randn(LENGTH, 4))

    def forward(self, x):
        return self.shifted(x, self.table).sum((1, 2))


def tables(count):
    x = torch.zeros(LENGTH + 4, LENGTH, 4)
    return Tabled(), lambda model, batch: 100 * model(batch[0]), lambda kept: [x[kept]]


class Labeled(nn.Module):
    """Texts of all labels, which are as many as there are examples, beside the example's own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)

    def forward(self, own, labels):
        return self.words(own).mean(1).detach() @ self.words(labels).mean(1).T


def labels(count):
    """The collate function puts them into every batch."""
    own, of_all = torch.full((LENGTH + 2, 3), 7), torch.arange(2 * LENGTH).view(LENGTH, 2)
    losses = lambda model, batch: 100 * model(*batch)[:, 0]  # noqa: E731
    return Labeled(), losses, lambda kept: (own[kept], of_all)


class ByLetters(Labeled):
    """A call for each place: how many there are depends on the batch."""

    def forward(self, own, labels):
        read = torch.stack([self.words(own[:, place]) for place in range(own.shape[1])], 1)
        return read.mean(1).detach() @ self.words(labels[:, 0]).T


def labels_after_letters(count):
    _, losses, batch_of = labels(count)

    def longer_at_first(kept):
        own, of_all = batch_of(kept)
        return (own.repeat(1, 3) if len(kept) < LENGTH - 1 else own), of_all

    return ByLetters(), losses, longer_at_first


class Users(nn.Module):
    """A layer is given a table of the users that occur, as many as examples where each occurs once."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)
        self.register_buffer("table", torch.randint(1, 9, (50, 3)))

    def forward(self, users):
        which, back = torch.unique(users, return_inverse=True)
        table = self.table[which]
        found = self.layer(table if isinstance(self.layer, nn.EmbeddingBag) else table.float()[..., None])
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found.flatten(1)[back][:, :4])


class Own(nn.Linear):
    """A layer without a rule."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("layer", [
    lambda: nn.Linear(1, 4), lambda: nn.GRU(1, 4, batch_first=True), lambda: nn.EmbeddingBag(9, 4), lambda: Own(1, 4)
], ids=["linear", "recurrent", "bag", "without a rule"])  # fmt: skip
def test_a_table_of_unknown_length_is_not_taken_for_rows(layer):
    model = Users(layer())
    losses = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
    users, labels = torch.randperm(50)[:40], torch.arange(40) % 3
    clipping = clipping_of(model)
    learn(clipping, losses, lambda n: [users[:1].repeat(n), labels[:1].repeat(n)])
    with pytest.raises(RuntimeError, match="'layer' has other rows than one for each example"):
        clipped_sum(model, losses, [users, labels], 40, clipping)


class Constant(nn.Module):
    """A layer that is given a buffer, as long as the batch by chance."""

    def __init__(self, layer, calls):
        super().__init__()
        self.layer, self.calls, self.first = layer, calls, nn.Linear(4, 4)
        self.register_buffer("table", torch.randint(0, 9, (LENGTH, 3)))

    def forward(self, x):
        table = self.table if isinstance(self.layer, nn.EmbeddingBag) else self.table.to(x.dtype)
        return self.first(x) @ self.calls(self.layer, table).T


CONSTANT = {
    "bag": (lambda: nn.EmbeddingBag(9, 4), lambda bag, table: bag(table)),
    "recurrent": (lambda: nn.GRU(1, 4, batch_first=True), lambda gru, table: gru(table[..., None])[0][:, -1]),
    "recurrent, time first": (lambda: nn.GRU(1, 4), lambda gru, table: gru(table[..., None])[0][:, -1]),
    "attention": (lambda: nn.MultiheadAttention(3, 1, batch_first=True),
                  lambda attend, table: torch.cat([attend(*[table[None]] * 3)[0][0], table[:, :1]], 1)),
    "linear": (lambda: nn.Linear(3, 4), lambda linear, table: linear(table)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANT)
def test_what_a_layer_makes_of_a_constant_counts_for_every_example(name):
    torch.manual_seed(0)
    layer, call = CONSTANT[name]
    x, labels = torch.randn(LENGTH, 4), torch.arange(LENGTH)
    losses = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
    single = [[x[n : n + 1], labels[n : n + 1]] for n in range(LENGTH)]
    assert_clipped_as_single_examples(Constant(layer(), call), losses, [x, labels], single)


PROGRAMS = [positions, positions_in_a_batch_of_another_class, prototypes, tables, labels, labels_after_letters]


@pytest.mark.parametrize("before", [None, 7])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_example_less_changes_the_sum_by_its_own_gradient(program, before):
    """Also after a batch of another size, from which much is known."""
    assert moved_by_one_example(program, before) <= CLIP * (1 + 1e-4)


def moved_by_one_example(program, before):
    torch.manual_seed(0)
    model, losses, batch_of = program(LENGTH)

    def of(examples):
        clipping = clipping_of(model)
        learn(clipping, losses, lambda n: batch_of([0] * n))
        if before is not None:
            clipped_sum(model, losses, batch_of(list(range(before))), before, clipping)
        return clipped_sum(model, losses, batch_of(list(range(examples))), examples, clipping)

    return float((of(LENGTH) - of(LENGTH - 1)).norm())


class Flagged(Tabled):
    """The first place of a text is marked."""

    def forward(self, x):
        marks = (torch.arange(x.shape[1]) == 0).float()[:, None].expand(-1, 4)
        return self.shifted(x, marks).sum((1, 2))


def test_a_table_of_which_one_row_counts_is_not_taken_for_rows_after_texts_of_one_word():
    """They show nothing; and of what is cut wrongly, one example alone has a gradient."""
    torch.manual_seed(0)
    model, x, losses = Flagged(), torch.randn(LENGTH, LENGTH, 4), lambda model, batch: 100 * model(batch[0])

    def of(examples):
        clipping = clipping_of(model)
        learn(clipping, losses, lambda n: [x[:1, :1].repeat(n, 1, 1)])
        return clipped_sum(model, losses, [x[:examples]], examples, clipping)

    assert (of(LENGTH) - of(LENGTH - 1)).norm() <= CLIP * (1 + 1e-4)


def test_a_guess_by_lengths_would_be_seen(monkeypatch):
    """What these tests look for is there if lengths decide."""
    monkeypatch.setattr(calls.Calls, "has_rows", lambda self, layer, path, dimension: dimension == 0)
    assert moved_by_one_example(positions, None) > 1.5 * CLIP
    assert moved_by_one_example(prototypes, None) > 1.5 * CLIP
    assert moved_by_one_example(labels, None) > 1.5 * CLIP
