"""Recurrent layers have rules of their own: their outputs are torch's, and each example is clipped by itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bandmf.torch.clipping import make_clipping
from bandmf.torch.clipping.recording import recurrent
from one_at_a_time import assert_clipped_as_single_examples, trained

B, T = 4, 5
KINDS = {
    "RNN": nn.RNN,
    "RNN, relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
}
OPTIONS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers, both directions, no bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}
CASES = {
    **{f"{kind}, {name}": (KINDS[kind], OPTIONS[name]) for kind, name in itertools.product(KINDS, OPTIONS)},
    "LSTM, projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
}  # fmt: skip


class Reader(nn.Module):
    """Uses outputs and final states; times first or second; from a state of its own, or none."""

    def __init__(self, make, batch_first=True, packed=None, started=False, **options):
        super().__init__()
        self.start = nn.Linear(3, 3)
        self.rnn = make(3, 4, batch_first=batch_first, **options)
        self.packed, self.started = packed, started

    def forward(self, x, lengths):
        x, first = self.start(x), self.rnn.batch_first
        state = self._state(x) if self.started else None
        x = x if first else x.transpose(0, 1)
        if self.packed is not None:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.packed)
        output, final = self.rnn(x, state)
        if isinstance(output, PackedSequence):
            output, _ = pad_packed_sequence(output, batch_first=first, total_length=T)
        output = output if first else output.transpose(0, 1)
        final = final if isinstance(final, tuple) else (final,)
        return torch.cat([output.flatten(1), *(each.transpose(0, 1).flatten(1) for each in final)], 1)

    def _state(self, x):
        rnn, cells = self.rnn, isinstance(self.rnn, nn.LSTM)
        count = rnn.num_layers * (2 if rnn.bidirectional else 1)
        seed = x.mean(1)[None, :, :1]
        h = seed.expand(count, -1, rnn.proj_size or rnn.hidden_size)
        return (h, 2 * seed.expand(count, -1, rnn.hidden_size)) if cells else h


def losses(model, batch):
    output = model(*batch)
    return output.sin() @ torch.linspace(-1, 2, output.shape[1]).to(output)


def batch_of(lengths=(T, 4, 3, 1)):
    torch.manual_seed(1)
    return torch.randn(B, T, 3), torch.tensor(lengths)


def alone(batch):
    return list(zip(*(each.split(1) for each in batch), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_recurrent_layers_are_clipped_as_one_example_at_a_time(name):
    torch.manual_seed(0)
    kind, options = CASES[name]
    batch = batch_of()
    assert_clipped_as_single_examples(Reader(kind, **options), losses, batch, alone(batch))


@pytest.mark.parametrize("options", [{"batch_first": False}, {"started": True}, {"packed": True}, {"packed": False}])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_times_first_given_states_and_packed_texts_are_clipped_as_one_example_at_a_time(kind, options):
    torch.manual_seed(0)
    batch = batch_of((T, 4, 3, 1) if options.get("packed") else (2, T, 1, 4))
    model = Reader(KINDS[kind], num_layers=2, bidirectional=True, **options)
    assert_clipped_as_single_examples(model, losses, batch, alone(batch))


def seen_by_losses(model, batch):
    """What the model gives in a private pass."""
    seen = []

    def kept(model, batch):
        seen.append(model(*batch))
        return seen[0].sum(1)

    sums = {name: torch.zeros_like(p) for name, p in trained(model).items()}
    make_clipping("auto", model, trained(model), 1.0, False).add_to(sums, kept, batch, B, B)
    return seen[0].detach()


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_torch(name):
    torch.manual_seed(0)
    kind, options = CASES[name]
    model = Reader(kind, **options)
    torch.testing.assert_close(seen_by_losses(model, batch_of()), model(*batch_of()).detach())


def test_dropout_between_layers_is_that_of_torch():
    torch.manual_seed(0)
    model = Reader(nn.LSTM, num_layers=2, dropout=1.0)
    expected = model(*batch_of()).detach()
    torch.testing.assert_close(seen_by_losses(model, batch_of()), expected)
    model.eval()
    assert not torch.allclose(model(*batch_of()), expected)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_are_clipped_as_one_example_at_a_time(cell):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(3, 4)

        def forward(self, x, _):
            state = None
            for t in range(T):
                state = self.cell(x[:, t], state)
            return torch.cat(state, 1) if isinstance(state, tuple) else state

    torch.manual_seed(0)
    batch = batch_of()
    assert_clipped_as_single_examples(Steps(), losses, batch, alone(batch))


def test_a_planted_error_is_caught(monkeypatch):
    """States of another time in place of those before."""
    right = recurrent._map

    def shifted(weight, bias, suffix):
        rule = right(weight, bias, suffix)
        return lambda layer, a, g: rule(layer, a.roll(int(weight == "weight_hh"), 1), g)

    monkeypatch.setattr(recurrent, "_map", shifted)
    batch = batch_of()
    with pytest.raises(AssertionError):
        assert_clipped_as_single_examples(Reader(nn.GRU), losses, batch, alone(batch))
