"""Row i of every layer is example i: models where it is another one, or where some rows are missing, are refused.

Otherwise the parts of one example are clipped under several numbers, and moving or adding one example changes what many
contribute.
"""

from __future__ import annotations

import re

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from one_at_a_time import MODES
from private_loops import Rows, outcome
from sweeps import in_turn

CLIP = 0.02


def words(length, seed):
    return torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(seed))


def texts(examples=40, length=6):
    return Rows([(words(length, n), torch.tensor(n % 2)) for n in range(examples)])


class Recurrent(nn.Module):
    """Reads packed texts, or padded ones."""

    def __init__(self, kind, packed):
        super().__init__()
        torch.manual_seed(0)
        self.packed = packed
        self.embed, self.read, self.out = nn.Embedding(50, 8), kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, tokens):
        x, lengths = self.embed(tokens), torch.full((len(tokens),), 6)
        if not self.packed:
            return self.out(self.read(x)[0][:, -1])
        _, last = self.read(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out((last[0] if isinstance(last, tuple) else last)[-1])


@pytest.mark.parametrize(
    ("mode", "self_test", "kind"), in_turn(list(MODES), [True, False], [DPLSTM, DPGRU, DPRNN])
)
def test_packed_sequences_are_refused_with_the_remedy(kind, self_test, mode):
    """Even equally long ones: sorting does not keep their order."""
    found = outcome(Recurrent(kind, packed=True), texts(), mode, self_test=self_test).refused
    assert found is not None, "was accepted"
    assert re.search(r"'read' is given a PackedSequence.*padded tensor, and mask", found), found


@pytest.mark.parametrize("mode", MODES)
def test_padded_sequences_are_accepted(mode):
    """And one text more, wherever it comes, moves the sum by its own gradient alone."""
    base, more = texts(), texts(41)
    model = Recurrent(DPLSTM, packed=False)
    with_it = outcome(model, Rows([*base[:4], more[40], *base[4:]]), mode, clip_norm=CLIP)
    without = outcome(model, base, mode, clip_norm=CLIP)
    assert float((with_it.total - without.total).norm()) <= CLIP * (1 + 1e-4)


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


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_is_called_with_some_examples_only_is_refused(mode):
    """The 37 rehearsed examples all have two texts, so that the self-test sees nothing."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    x[:, 0] = x[:, 0].abs()
    x[37::2, 0] *= -1
    data = Rows([(row, torch.tensor(n % 4)) for n, row in enumerate(x)])
    found = outcome(TwoTexts(), data, mode, clip_norm=CLIP).refused
    assert found is not None, "was accepted"
    assert re.search(r"'read\.(weight|bias)' has gradients for 38 examples where the batch has 40", found), (
        found
    )
    assert "called with all, its output masked" in found


class Sorted(nn.Module):
    """Sorts a batch by length, as for packing, and puts it back in order at the end."""

    def __init__(self, stable=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.out = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.stable = stable

    def forward(self, tokens):
        order = (tokens != 0).sum(1).sort(descending=True, stable=self.stable).indices
        x = self.embed(tokens)[order]
        return self.out(self.mix(x.mean(1)).tanh()[order.argsort()])


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_sorted_inside_the_model_is_refused(mode):
    """Equally long texts, of which four stay in order and forty do not: a sort that is not stable moves them."""
    found = outcome(Sorted(), texts(), mode, clip_norm=CLIP).refused
    assert found is not None, "was accepted"
    assert re.search(r"self-test: .*'(mix|embed|out)\.", found), found


class OneMoved(nn.Module):
    """Two rows of a large batch change places in one layer, wherever the examples are that stand there."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.out, self.places = nn.Linear(6, 8), nn.Linear(8, 4), (first, second)

    def forward(self, x):
        order, (first, second) = torch.arange(len(x)), self.places
        if len(x) > max(first, second):
            order[[first, second]] = order[[second, first]]
        return self.out(self.read(x[order]).tanh()[order])


@pytest.mark.parametrize(("mode", "places"), in_turn(list(MODES), [(30, 31), (5, 9), (35, 0)]))
def test_two_rows_that_change_places_are_found_wherever_they_are(mode, places):
    """By the norms of copies of an example, of which no two may differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    data = Rows([(row, torch.tensor(n % 4)) for n, row in enumerate(x)])
    found = outcome(OneMoved(*places), data, mode, clip_norm=CLIP).refused
    assert found is not None, "was accepted"
    assert "self-test: the gradient of 'read" in found
