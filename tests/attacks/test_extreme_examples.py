"""An example outside of the others' range must not change their gradients: found though the data have none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch.training import loader
from bandmf.torch.training.self_test.extremes import halved
from bandmf.torch.training.self_test.guarded import Guards
from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, private_of, vectors


def bright_pictures(examples=16):
    """Each has the same largest and smallest value, as many real ones do."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0.0, 1.0])
    inner = torch.rand(examples, 4, generator=generator)
    return Rows([(torch.cat([ends, inner[i]]), torch.tensor(i % 4)) for i in range(examples)])


def open_net():
    """Nothing in it is bounded."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def loop_of(loss):
    def loop(private, batch):
        private.optimizer.zero_grad()
        loss(private.model, *batch).backward()
        private.optimizer.step()

    return loop


def assert_refused(sentence, *arguments, **options):
    found = outcome(*arguments, **options).refused
    assert found is not None, "was accepted"
    assert re.search(sentence, found), found


# --- scales of a whole batch ----------------------------------------------------------------------------


def by_largest(model, x, y):
    return functional.cross_entropy(model(x / x.abs().max()), y)


def by_range(model, x, y):
    return functional.cross_entropy(model((x - x.min()) / (x.max() - x.min())), y)


class Quantized(nn.Module):
    """Activations of eight bits, with one scale for the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    @staticmethod
    def rounded(x):
        scale = 127 / x.detach().abs().max()
        return x + ((x * scale).round() / scale - x).detach()

    def forward(self, x):
        return self.last(self.rounded(self.first(self.rounded(x)).tanh()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [by_largest, by_range])
def test_inputs_divided_by_the_largest_value_of_the_batch_are_refused(loss, mode):
    assert_refused("depends on the place", open_net(), bright_pictures(), mode, loop_of(loss))


@pytest.mark.parametrize("mode", MODES)
def test_activations_rounded_with_one_scale_for_the_batch_are_refused(mode):
    assert_refused("self-test", Quantized(), vectors(16), mode)


def test_without_halves_it_would_be_accepted(monkeypatch):
    """So it is they that show it."""
    monkeypatch.setattr(loader, "halved", lambda example: example)
    assert outcome(open_net(), bright_pictures(), "auto", loop_of(by_largest)).refused is None


# --- losses that are cut off ----------------------------------------------------------------------------


def mean_loss(model, x, y):
    return functional.cross_entropy(model(x), y)


CUT = {
    "NanToNum": lambda *given: torch.nan_to_num(mean_loss(*given)),
    "Clamp": lambda *given: mean_loss(*given).clamp(max=1e6),
    "Where": lambda *given: torch.where((loss := mean_loss(*given)).isfinite(), loss, 0.0),
    "Minimum": lambda *given: 2 * torch.minimum(mean_loss(*given), torch.tensor(1e6)),
    "MaskedFill": lambda *given: (loss := mean_loss(*given)).masked_fill(loss > 1e6, 0.0) / 3,
    "Abs": lambda *given: (mean_loss(*given) - 0.01).abs() + 0.01,
    "Log1P": lambda *given: torch.log1p(mean_loss(*given)),
    "LeakyRelu": lambda *given: -functional.leaky_relu(100 - mean_loss(*given)),
    "Min": lambda *given: torch.stack([mean_loss(*given), torch.tensor(1e6)]).min(),
    "SmoothL1Loss": lambda *given: functional.smooth_l1_loss(mean_loss(*given), torch.tensor(0.0), beta=1e6),
}
PARTS = {
    "Clamp": lambda model, x, _: model(x).square().mean(0).clamp(max=1e6).sum(),
    "NanToNum": lambda model, x, _: torch.nan_to_num(
        torch.stack([part.mean() for part in model(x).square().T])
    ).sum(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CUT)
def test_a_loss_of_the_whole_batch_that_is_cut_off_is_refused(name, mode):
    sentence = rf"the loss of the whole batch goes through {name}.*each example's own loss"
    assert_refused(sentence, open_net(), vectors(), mode, loop_of(CUT[name]))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_loss_that_are_cut_off_are_refused(name):
    assert_refused(
        f"the loss of the whole batch goes through {name}",
        open_net(),
        vectors(),
        "auto",
        loop_of(PARTS[name]),
    )


@pytest.mark.parametrize("batch", [4, 8])
def test_as_many_cut_off_losses_as_examples_are_refused(batch):
    """Of eight steps in time, say."""

    def loss(model, x, y):
        scores = model(x)
        return sum(functional.cross_entropy(scores * step, y).clamp(max=1e6) for step in range(1, 9))

    assert_refused(
        "goes through Clamp", open_net(), vectors(16), "auto", loop_of(loss), physical_batch_size=batch
    )


def test_losses_that_are_cut_off_example_by_example_are_accepted():
    def by_rows(model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none").clamp(max=1.5).mean()

    def one_by_one(model, x, y):
        scores = model(x)
        losses = [functional.cross_entropy(score, label) for score, label in zip(scores, y, strict=True)]
        return sum(torch.nan_to_num(each).clamp(max=1.5) for each in losses) / len(losses)

    def some(model, x, y):
        """Only those with an object, say."""
        scores = model(x)
        hinges = [functional.relu(1 - scores[i, y[i]]) for i in range(len(y)) if y[i] > 0]
        return (mean_loss(model, x, y) * len(y) + sum(hinges)) / len(y)

    def of_tokens(model, x, y):
        """Of those that are scored, in one long row."""
        scored = y > 0
        each = functional.cross_entropy(model(x)[scored], y[scored], reduction="none").clamp(max=1.5)
        return each.sum() / len(y)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return 2 * loss

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def by_a_function(model, x, y):
        return Doubled.apply(mean_loss(model, x, y))

    for loss in (by_rows, one_by_one, some, of_tokens, by_a_function):
        assert outcome(open_net(), vectors(), "auto", loop_of(loss)).refused is None


def test_backward_is_torchs_own_again_afterwards():
    usual = torch.autograd.backward
    outcome(open_net(), vectors(), "auto", loop_of(CUT["Clamp"]))
    assert torch.autograd.backward is usual
    guards = Guards()
    assert torch.autograd.backward is not usual
    guards.end()
    assert torch.autograd.backward is usual


# --- what extremes must not break -----------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6), nn.Sigmoid())

    def forward(self, x):
        assert x.shape[1:] == (6,)
        return self.inner(x)


def test_targets_stay_where_losses_want_them():
    """Binary cross entropy fails if a target is not between 0 and 1."""

    def loss(model, x, _):
        return functional.binary_cross_entropy(model(x), x)

    assert outcome(Autoencoder(), bright_pictures(), "auto", loop_of(loss)).refused is None


def test_models_may_check_the_range_of_the_data():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = open_net()

        def forward(self, x):
            assert 0 <= float(x.min()) <= float(x.max()) <= 1
            return self.inner(x)

    assert outcome(Checked(), bright_pictures(), "auto").refused is None


def test_halves_keep_whole_numbers_and_what_is_unknown():
    other = object()
    example = {
        "x": torch.tensor([0.5, 1.0]), "id": 7, "y": [torch.tensor(3.0), 0.5], "z": (np.float32(4.5), other),
        "t": "text", "mask": np.array([0.0, 1.0]), "bytes": torch.tensor([255], dtype=torch.uint8), "nan": float("nan"),
    }  # fmt: skip
    found = halved(example)
    assert found["x"].tolist() == [0.25, 0.5]
    assert example["x"].tolist() == [0.5, 1.0]
    assert (found["id"], float(found["y"][0]), found["y"][1]) == (7, 3, 0.25)
    assert found["z"] == (2.25, other)
    assert found["t"] == "text"
    assert found["mask"].tolist() == [0, 1]
    assert found["bytes"].tolist() == [255]


def test_examples_that_cannot_be_in_one_batch_are_rehearsed_one_at_a_time():
    """Pictures of different sizes, by physical batches of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    data = Rows([(torch.rand(1, 4 + number, 5), torch.tensor(number % 4)) for number in range(6)])
    assert outcome(model, data, "auto", physical_batch_size=1).refused is None


@pytest.mark.parametrize("ending", ["close", "make anew"])
def test_an_error_in_a_rehearsal_leaves_nothing_behind_even_if_the_iterator_is_kept(ending):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    usual, hooks = torch.autograd.backward, [len(m._forward_hooks) for m in model.modules()]
    private = private_of(model, vectors())
    batches = iter(private.loader)
    for _ in range(3):
        plain(private, next(batches))
    next(batches)
    assert torch.autograd.backward is not usual
    if ending == "close":
        private.close()
    else:
        private_of(model, vectors(), self_test=False)
    assert torch.autograd.backward is usual
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    model.train()
    assert not torch.equal(model(torch.ones(1, 6)), model(torch.ones(1, 6)))  # dropout is on


def test_ordinary_models_are_accepted_with_the_same_sum():
    """The rehearsals change nothing."""
    data = bright_pictures()
    with_test = outcome(open_net(), data, "auto")
    without = outcome(open_net(), data, "auto", plain, self_test=False)
    assert with_test.refused is None
    torch.testing.assert_close(with_test.total, without.total, rtol=0, atol=1e-20)  # the noise is below that


# --- losses that are right, though not plain means ------------------------------------------------------


def of_parts(model, x, y):
    """A loss for each task, kept in a tensor."""
    kept = torch.zeros(3)
    kept[0], kept[1] = mean_loss(model, x, y), 0.1 * model(x).square().mean()
    return kept.sum()


RIGHT = {
    "one minus a mean": lambda model, x, y: 1 - functional.cosine_similarity(model(x), x[:, :4]).mean(),
    "products": lambda model, x, y: torch.einsum(
        "b,b->", torch.full((len(y),), 1 / len(y)), functional.cross_entropy(model(x), y, reduction="none")
    ),
    "between two": lambda model, x, y: torch.lerp(mean_loss(model, x, y), model(x).square().mean(), 0.3),
    "parts": of_parts,
    "norms one by one": lambda model, x, y: sum(row.norm() for row in model(x).split([1] * len(y))) / len(y),
    "chosen places": lambda model, x, y: (
        functional.mse_loss(model(x)[y > 0], x[y > 0, :4], reduction="sum") / len(y)
    ),
    "probabilities": lambda model, x, y: functional.kl_div(
        model(x).log_softmax(-1), x[:, :4].softmax(-1), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_losses_that_are_linear_in_the_examples_are_accepted(name):
    assert outcome(open_net(), vectors(16), "auto", loop_of(RIGHT[name])).refused is None


def cut(model, x):
    return functional.mse_loss(model(x), x[:, :4]).clamp(max=1e6)


WRONG = {
    "broadcast": lambda model, x, y: (
        functional.cross_entropy(model(x), y, reduction="none") + cut(model, x)
    ).mean(),
    "chosen places": lambda model, x, y: (
        functional.cross_entropy(model(x)[y > 0], y[y > 0], reduction="sum").clamp(max=1e6) / len(y)
    ),
    "finite parts": lambda model, x, y: (
        parts := torch.stack([mean_loss(model, x, y), model(x).square().mean()])
    )[parts.isfinite()].sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_are_cut_off_behind_something_are_refused(name):
    assert_refused(
        "the loss of the whole batch goes through", open_net(), vectors(16), "auto", loop_of(WRONG[name])
    )


def test_losses_by_private_backward_are_looked_at_too():
    def loop(private, batch):
        x, y = batch
        private.optimizer.zero_grad()
        losses = functional.cross_entropy(private.model(x), y, reduction="none") + cut(private.model, x)
        private.backward(losses)
        private.optimizer.step()

    assert_refused("goes through Clamp", open_net(), vectors(16), "bookkeeping", loop)


def test_guards_of_a_run_that_is_gone_do_not_take_those_of_another_away():
    usual = torch.autograd.backward
    first, second = Guards(), Guards()
    first.end()
    first.end()
    second.begin(19)
    torch.nan_to_num((2 * torch.ones(19, requires_grad=True)).mean()).backward()
    assert "NanToNum" in second.problem()
    second.end()
    assert torch.autograd.backward is usual
