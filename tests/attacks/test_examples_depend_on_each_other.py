"""Models by which one example changes the gradients of others, beyond those of verify_cases: each is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import verify_cases as cases
from bandmf.torch import verify


def assert_refused(model, sentence, examples=None, losses=cases.each, collate=None, **options):
    found = verify(model, losses, cases.vectors() if examples is None else examples, collate=collate, **options)
    assert not found.ok, "was accepted"
    text = " | ".join(map(str, found.problems))
    assert re.search(sentence, text), text


def pictured(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), layer, nn.Flatten(), nn.Linear(216, 4))


BATCH_NORMS = {
    "trainable": lambda: nn.BatchNorm2d(6),
    "frozen": lambda: nn.BatchNorm2d(6).requires_grad_(False),
    "affine=False": lambda: nn.BatchNorm2d(6, affine=False),
    "track_running_stats=False": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "in evaluation mode without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False).eval(),
    "synchronized": lambda: nn.SyncBatchNorm(6),
}


@pytest.mark.parametrize("form", BATCH_NORMS)
def test_batch_norm_is_refused_in_every_form(form):
    sentence = r"1 is (Sync)?BatchNorm.* mixes the examples of a batch.*nn\.GroupNorm"
    assert_refused(pictured(BATCH_NORMS[form]()), sentence, cases.pictures())


def test_batch_norm_that_the_losses_switch_back_is_found():
    """Its class says nothing, as it is in evaluation mode at the start."""
    model = pictured(nn.BatchNorm2d(6).requires_grad_(False).eval())

    def losses(model, batch):
        return cases.each(model.train(), batch)

    assert_refused(model, r"1\.running_mean.* changes|mixes", cases.pictures(), losses)
    assert not model[1].training


def test_batch_norm_with_fixed_statistics_is_accepted():
    model = pictured(nn.BatchNorm2d(6).requires_grad_(False).eval())
    assert verify(model, cases.each, cases.pictures()).ok


def test_instance_norm_with_running_statistics_is_refused():
    model = pictured(nn.InstanceNorm2d(6, track_running_stats=True))
    assert_refused(model, r"1 is InstanceNorm2d.*track_running_stats=False", cases.pictures())


class Tokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(7, 6, **options), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.embed((x.abs() * 10).long() % 7).mean(1))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_depend_on_all_tokens_of_a_batch_are_refused(option):
    (name,) = option
    assert_refused(Tokens(**option), rf"embed is Embedding, whose {name}.*make it without")


def test_a_token_mean_is_refused_even_where_all_texts_are_as_long():
    """It divides by the number of examples, which is secret."""
    examples = cases.texts((5, 5, 5, 5))
    assert_refused(cases.Reader(), r"counted over the whole batch", examples, cases.batch_mean, cases.padded)


class Reordered(nn.Module):
    """Examples change places between layers."""

    def __init__(self):
        super().__init__()
        self.inner = cases.net()

    def forward(self, x):
        return self.inner[2:](self.inner[:2](x).flip(0)).flip(0)


def test_examples_that_change_places_are_refused():
    assert_refused(Reordered(), r"sees the batch in another order")


class TwoTexts(nn.Module):
    """A layer is called once with all examples, and once with those that have a second text."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.out = nn.Linear(6, 8), nn.Linear(16, 4)

    def forward(self, x):
        first, has_second = self.read(x).tanh(), (x[:, 0] > 0).nonzero().flatten()
        second = torch.zeros_like(first).index_copy(0, has_second, self.read(-x[has_second]).tanh())
        return self.out(torch.cat([first, second], 1))


def test_a_layer_that_is_called_with_some_examples_only_is_refused_by_book_keeping_and_takes_one_by_one():
    torch.manual_seed(0)
    examples = cases.vectors()
    for place, (x, _) in enumerate(examples):
        x[0] = x[0].abs() * (-1) ** place
    assert_refused(TwoTexts(), r"'?read'?.*rows", examples, clipping="bookkeeping")
    assert verify(TwoTexts(), cases.each, examples).clipping == "one-by-one"


class Teacher(nn.Module):
    """Without gradients, and outside the model: its batch norm is in training mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))

    @torch.no_grad()
    def forward(self, x):
        return self.inner(torch.cat([x, torch.ones(2, 6)]))[: len(x)].softmax(1)


def test_a_teacher_that_mixes_examples_without_gradients_is_found():
    torch.manual_seed(0)
    teacher = Teacher()

    def losses(model, batch):
        return functional.cross_entropy(model(batch[0]), teacher(batch[0]), reduction="none")

    assert_refused(cases.net(), r"changes with the other examples, though no gradient passes", losses=losses)


class Recalling(torch.autograd.Function):
    """Gives each row the mean gradient of all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mean(0, keepdim=True).expand_as(gradient)


def test_a_backward_function_that_mixes_examples_is_found():
    def losses(model, batch):
        return functional.cross_entropy(Recalling.apply(model(batch[0])), batch[1], reduction="none")

    assert_refused(cases.net(), r"adds up examples after the last layer", losses=losses)
