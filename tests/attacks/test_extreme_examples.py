"""An example outside of the range of the others must not change their gradients: found though the data have none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch.training import loader, self_test
from bandmf.torch.training.self_test.extremes import HUGE, enlarge, halved
from bandmf.torch.training.self_test.guarded import Guards
from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, vectors


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
    """Activations of sixteen bits, with one scale for the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    @staticmethod
    def rounded(x):
        scale = 32767 / x.detach().abs().max()
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


def test_without_extremes_both_would_be_accepted(monkeypatch):
    """So it is they that show it."""
    monkeypatch.setattr(loader, "halved", lambda example: example)
    monkeypatch.setattr(
        self_test, "enlarge", lambda model, row, rows: model.register_forward_hook(lambda *_: None)
    )
    assert outcome(open_net(), bright_pictures(), "auto", loop_of(by_largest)).refused is None
    assert outcome(Quantized(), vectors(16), "auto").refused is None


# --- losses that are cut off ----------------------------------------------------------------------------


def mean_loss(model, x, y):
    return functional.cross_entropy(model(x), y)


CUT = {
    "NanToNum": lambda *given: torch.nan_to_num(mean_loss(*given)),
    "Clamp": lambda *given: mean_loss(*given).clamp(max=1e6),
    "Where": lambda *given: torch.where((loss := mean_loss(*given)).isfinite(), loss, 0.0),
    "Minimum": lambda *given: 2 * torch.minimum(mean_loss(*given), torch.tensor(1e6)),
    "MaskedFill": lambda *given: (loss := mean_loss(*given)).masked_fill(loss > 1e6, 0.0) / 3,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CUT)
def test_a_loss_of_the_whole_batch_that_is_cut_off_is_refused(name, mode):
    sentence = rf"the loss of the whole batch goes through {name}.*each example's own loss"
    assert_refused(sentence, open_net(), vectors(), mode, loop_of(CUT[name]))


@pytest.mark.parametrize("mode", MODES)
def test_the_logarithm_of_a_mean_loss_is_refused(mode):
    def loss(model, x, y):
        return torch.log1p(mean_loss(model, x, y))

    assert_refused("self-test", open_net(), Rows([vectors()[0]] * 8), mode, loop_of(loss))


def test_losses_that_are_cut_off_example_by_example_are_accepted():
    def by_rows(model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none").clamp(max=1.5).mean()

    def one_by_one(model, x, y):
        scores = model(x)
        losses = [functional.cross_entropy(score, label) for score, label in zip(scores, y, strict=True)]
        return sum(torch.nan_to_num(each).clamp(max=1.5) for each in losses) / len(losses)

    for loss in (by_rows, one_by_one):
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


class OfBytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = open_net()

    def forward(self, x):
        assert x.dtype is torch.uint8
        return self.inner(x / 255)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_pictures_in_bytes_are_accepted(kind):
    rows = np.random.default_rng(0).integers(0, 256, (16, 6), dtype=np.uint8)
    data = Rows([(kind(row), number % 4) for number, row in enumerate(rows)])
    assert outcome(OfBytes(), data, "auto").refused is None

    def by_largest_byte(model, x, y):
        return functional.cross_entropy(model.inner(x / x.max()), y)

    rows[:, 0] = 255
    data = Rows([(kind(row), number % 4) for number, row in enumerate(rows)])
    assert_refused("depends on the place", OfBytes(), data, "auto", loop_of(by_largest_byte))


def test_halves_keep_whole_numbers_and_what_is_unknown():
    other = object()
    example = {
        "x": torch.ones(2),
        "id": 7,
        "y": [torch.tensor(3), 0.5],
        "z": (np.float32(4), other),
        "t": "text",
    }
    found = halved(example)
    assert torch.equal(found["x"], torch.full((2,), 0.5))
    assert torch.equal(example["x"], torch.ones(2))
    assert (found["id"], int(found["y"][0]), found["y"][1]) == (7, 3, 0.25)
    assert found["z"] == (2.0, other)
    assert found["t"] == "text"


def test_one_row_of_what_the_model_is_given_is_huge():
    model, seen = open_net(), []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    handle = enlarge(model, 1, 3)
    x = torch.ones(3, 6)
    model(x)
    handle.remove()
    model(x)
    assert seen[0][:, 0].tolist() == [1, 1, 1]  # hooks of before come first
    factors = []
    model.register_forward_pre_hook(lambda _, given: factors.append(given[0][:, 0].tolist()))
    handle = enlarge(model[0], 1, 3)
    model[0].register_forward_pre_hook(lambda _, given: factors.append(given[0][:, 0].tolist()))
    model(x)
    assert factors == [[1, 1, 1], [1, HUGE, 1]]


def test_ordinary_models_are_accepted_with_the_same_sum():
    """The rehearsals change nothing."""
    data = bright_pictures()
    with_test = outcome(open_net(), data, "auto")
    without = outcome(open_net(), data, "auto", plain, self_test=False)
    assert with_test.refused is None
    torch.testing.assert_close(with_test.total, without.total, rtol=0, atol=1e-20)  # the noise is below that
