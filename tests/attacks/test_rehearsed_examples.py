"""What is rehearsed must show how examples depend on each other: different ones, with gradients, in large batches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from bandmf.torch.clipping import Bookkeeping
from bandmf.torch.clipping.refusals import UnsupportedError
from bandmf.torch.training.self_test import CANDIDATES
from bandmf.torch.training.self_test.choice import by_difference
from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, private_of, small_net, vectors


def rows(labels, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return Rows([(torch.randn(6, generator=generator), torch.tensor(label)) for label in labels])


def assert_refused(sentence, *arguments, **options):
    found = outcome(*arguments, **options).refused
    assert found is not None, "was accepted"
    assert re.search(sentence, found), found


def train(private, loop=plain):
    for batch in private.loader:
        loop(private, batch)


# --- which examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_class_weights_with_a_mean_over_the_batch_are_refused(mode):
    """Though the first examples have the same class: the mean divides by the weights of all."""
    weight = torch.tensor([1.0, 1.0, 1.0, 50.0])

    def loop(private, batch):
        functional.cross_entropy(private.model(batch[0]), batch[1], weight=weight).backward()
        private.optimizer.step()

    data = rows([0] * 60 + [3])
    assert_refused("depends on the other examples", small_net(), data, mode, loop, clip_norm=3.0)


class Placed(nn.Module):
    """Texts that are padded on the left, with places counted from there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.out = nn.Embedding(40, 8), nn.Embedding(64, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        own = (tokens != 0)[..., None]
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1])[None])
        return self.out((x.tanh() * own).sum(1) / own.sum(1))


def padded_left(texts):
    return pad_sequence([text.flip(0) for text in texts], batch_first=True).flip(1)


def last_word(private, tokens):
    functional.cross_entropy(private.model(tokens), tokens[:, -1] % 2).backward()
    private.optimizer.step()


def test_left_padding_with_absolute_places_is_refused():
    """Though the first texts are equally long."""
    generator = torch.Generator().manual_seed(0)
    data = Rows([torch.randint(1, 40, (5 if n < 8 else 3,), generator=generator) for n in range(12)])
    options = {"loader_options": {"collate_fn": padded_left}, "clip_norm": 0.01}
    assert_refused("self-test", Placed(), data, "auto", last_word, **options)


def mixed_up(batch):
    """Mixup of larger batches."""
    x, y = default_collate(batch)
    return (0.5 * x + 0.5 * x.roll(1, 0) if len(x) > 4 else x), y


@pytest.mark.parametrize("mode", MODES)
def test_mixup_in_the_collate_function_is_refused(mode):
    options = {"loader_options": {"collate_fn": mixed_up}, "clip_norm": 0.1}
    assert_refused("self-test", small_net(), rows([0, 1, 2, 3] * 10), mode, **options)


def test_the_examples_that_are_rehearsed_first_differ_in_shape_labels_and_padding():
    examples = [(torch.ones(3), 0)] * 5 + [(torch.ones(4), 0), (torch.ones(3), 1)]
    assert set(by_difference(examples)[:3]) == {0, 5, 6}
    labels = [[7, 7, 7]] * 5 + [[7, 7, -100], [7, -100, -100]]
    assert set(by_difference([{"labels": each} for each in labels])[:3]) == {0, 5, 6}
    odd = [object(), None, "text", b"", 3.5, [], {}, (), torch.zeros(2).to_sparse(), [[1], ["a"]]]
    assert sorted(by_difference(odd)) == list(range(len(odd)))


def test_a_bounded_number_of_examples_is_loaded_for_the_rehearsals():
    class Counted(Rows):
        loaded = 0

        def __getitem__(self, index):
            Counted.loaded += 1
            return super().__getitem__(index)

    private = private_of(small_net(), Counted(rows([0, 1] * 100)))
    next(iter(private.loader))
    assert Counted.loaded == CANDIDATES


# --- with gradients -------------------------------------------------------------------------------------


class Centered(nn.Module):
    """A mean over the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(x + self.inner(x - x.mean(0)).tanh())


def margin(private, batch):
    functional.multi_margin_loss(private.model(batch[0]), batch[1]).backward()
    private.optimizer.step()


def met(labels):
    """Examples whose margin is met by far, so that they have no gradient."""
    inverse = torch.linalg.pinv(Centered().out.weight.detach())
    return [(40 * inverse[:, label], torch.tensor(label)) for label in labels]


@pytest.mark.parametrize("mode", MODES)
def test_examples_without_a_gradient_are_not_what_is_compared(mode):
    data = Rows([*met([0, 1, 2, 3, 0, 1]), *rows([0, 1, 2, 3] * 5)])
    assert_refused("self-test", Centered(), data, mode, margin)


@pytest.mark.parametrize("mode", MODES)
def test_a_self_test_of_nothing_but_zero_gradients_says_that_it_compared_nothing(mode):
    private = private_of(Centered(), Rows(met([0, 1, 2, 3] * 2)), clipping=mode)
    with pytest.warns(UserWarning, match="zero or not finite, so nothing was compared"):
        train(private, margin)
    assert private.stepper.self_test.compared == 0
    assert "nothing has checked" in private.explain()


def test_several_examples_are_compared_after_auto_has_gone_to_hooks(monkeypatch):
    def cannot(*_):
        raise UnsupportedError("a layer cannot be described")

    monkeypatch.setattr(Bookkeeping, "norms", cannot)
    private = private_of(small_net(), vectors(), clipping="auto")
    with pytest.warns(UserWarning, match="a layer cannot be described"):
        train(private)
    assert "Opacus" in private.explain()
    assert private.stepper.self_test.compared == 3
