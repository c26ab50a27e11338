"""Row i of every layer is example i: models where it is another one are refused.

Otherwise the parts of one example are clipped under several numbers, and moving or adding one example changes what many
contribute.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import verify_cases as cases
from bandmf.torch import rows, verify


class Sorted(nn.Module):
    """Sorts a batch by length, as for packing, and puts it back in order at the end."""

    def __init__(self, stated=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.stated = stated

    def forward(self, tokens, lengths):
        order = lengths.sort(descending=True).indices
        x = self.embed(tokens).sum(1)[order]
        if self.stated:
            with rows(order):
                mixed = self.mix(x)
        else:
            mixed = self.mix(x)
        return self.out(mixed.tanh()[order.argsort()])


def masked(batch):
    """Padding is a token that adds the same to all; here all texts have the same length in tokens."""
    return {"tokens": torch.stack([tokens for tokens, _ in batch]), "lengths": torch.stack([n for _, n in batch])}


def texts(lengths):
    return [(torch.randint(1, 20, (6,)), torch.tensor(length)) for length in lengths]


ORDERS = [(3, 7, 5, 4), (7, 5, 4, 3), (3, 4, 5, 7), (2, 1), (1, 2)]


@pytest.mark.parametrize("lengths", ORDERS)
def test_a_batch_that_is_sorted_inside_the_model_is_refused(lengths):
    """Even if the examples happen to be in that order already."""
    found = verify(Sorted(), cases.last_state, texts(lengths), collate=masked)
    assert [each.layer for each in found.problems] == ["mix"]
    assert "sees the batch in another order" in found.problems[0].reason
    assert "bandmf.torch.rows(order)" in found.problems[0].remedy


@pytest.mark.parametrize("lengths", ORDERS)
def test_a_batch_that_is_sorted_and_says_so_is_accepted(lengths):
    assert verify(Sorted(stated=True), cases.last_state, texts(lengths), collate=masked).ok


@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_texts_in_a_recurrent_layer_are_accepted(batch_first):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.read = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=batch_first)
            self.out = nn.Linear(8, 4)

        def forward(self, tokens, lengths):
            x = self.embed(tokens)
            states = self.read(x)[0] if batch_first else self.read(x.transpose(0, 1))[0].transpose(0, 1)
            return self.out(states[torch.arange(len(tokens)), lengths - 1])

    assert verify(Reader(), cases.last_state, cases.texts(), collate=cases.padded).ok
