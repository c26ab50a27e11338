"""Attempts to make one example add more than the clip norm: by its content, by the model, by the losses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch.clipping import norms
from bandmf.torch.clipping.norms import rounding
from one_at_a_time import MODES, added
from sweeps import in_turn

CLIP = 1.0
ALLOWED = CLIP * (1 + 1e-6)


def contribution(model, mode, losses, given):
    """The norm of what one example alone adds, in float64 from the sums."""
    return float(added(model, losses, given, 1, mode=mode, clip_norm=CLIP).norm())


# --- by its content -------------------------------------------------------------------------------------


class Victim(nn.Module):
    """Tokens through linear layers, of a shape for which norms come from Gram matrices."""

    def __init__(self, width=24):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.out = nn.Linear(width, 48), nn.LayerNorm(48), nn.Linear(48, 32)

    def forward(self, x):
        return self.out(self.norm(self.first(x).tanh()))


class Bare(Victim):
    """One matrix, whose whole gradient can cancel."""

    def __init__(self, width=24):
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.first = nn.Linear(width, 48, bias=False)

    def forward(self, x):
        return self.first(x)


def each_token(model, x):
    """Signs in turn, so that the gradients of opposite tokens cancel."""
    scores = model(x)
    signs = 1.0 - 2.0 * (torch.arange(x.shape[1]) % 2).to(scores)
    return (scores.mean(-1) * signs).sum(1)


def whole_text(model, x):
    labels = (torch.arange(x.shape[1]) % 32).expand(len(x), -1)
    return functional.cross_entropy(model(x).mT, labels, reduction="none").sum(1)


def nearly_equal_tokens(times, width, size, nearness, opposite=False, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + times)
    token = size * torch.randn(1, 1, width, generator=generator)
    turns = 1.0 - 2.0 * opposite * (torch.arange(times) % 2)[None, :, None]
    return token * turns + nearness * size * torch.randn(1, times, width, generator=generator)


def cancellation(model, losses, x):
    """How much larger the parts of the first layer's gradient are than their sum: what an attacker raises."""
    model.zero_grad()
    (gradient,) = torch.autograd.grad(losses(model, x).sum(), model.first.weight, create_graph=True)
    return -gradient.norm().clamp(min=1e-20).log() + x.norm().log()


def ascend(model, losses, x, steps, learning_rate):
    """Inputs on the way up."""
    x = x.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    for step in range(steps):
        optimizer.zero_grad()
        (-cancellation(model, losses, x)).backward()
        optimizer.step()
        if step % 5 == 4:
            yield x.detach().clone()


@pytest.mark.parametrize(
    ("mode", "dtype", "case"),
    in_turn(MODES, [torch.float32, torch.bfloat16], [(Victim, whole_text), (Victim, each_token), (Bare, each_token)]),
)
def test_no_content_of_an_example_adds_more_than_the_clip_norm(mode, dtype, case):
    (victim, losses), largest = case, 0.0
    for times in (1, 2, 7, 64) if mode == "bookkeeping" else (2, 64):
        for size, nearness in ((1.0, 1.0), (30.0, 1e-3), (1e4, 1e-6), (1e8, 1e-6)):
            model, opposite = victim(), losses is whole_text
            starts = [nearly_equal_tokens(times, 24, size, nearness, opposite, seed) for seed in range(3)]
            for x in (*starts, *ascend(copy.deepcopy(model), losses, starts[0], 10, 0.1 * size)):
                largest = max(largest, contribution(model.to(dtype), mode, losses, x.to(dtype)))
                model.float()
    assert 0.5 * CLIP < largest <= ALLOWED


class Texts(nn.Module):
    """Tied embedding and head; the attacker chooses what the embedding holds."""

    def __init__(self, table):
        super().__init__()
        self.embed = nn.Embedding(*table.shape)
        self.out = nn.Linear(table.shape[1], table.shape[0], bias=False)
        self.out.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.copy_(table)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_text_adds_more_than_the_clip_norm_through_tied_embeddings(mode, dtype):
    largest = 0.0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        for size in (0.1, 1.0, 100.0):
            table = nearly_equal_tokens(10, 12, size, 10.0**-seed, opposite=True)[0]
            tokens = torch.randint(0, 10, (1, (2, 9, 64)[seed % 3]), generator=generator)
            model = Texts(table).to(dtype)
            found = contribution(model, mode, lambda m, x: m(x).float().logsumexp(-1).sum(1) * 10, tokens)
            largest = max(largest, found)
    assert 0.5 * CLIP < largest <= ALLOWED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "times"), [(4, 4, 2000), (100, 100, 1), (3000, 20, 2), (2, 500, 64), (300, 300, 40)]
)
def test_equal_numbers_whose_roundings_add_up_do_not_pass_the_clip_norm(mode, inputs, outputs, times):
    """Long sums of equal numbers lose digits in one direction, of which a norm must not be made."""
    for value in (0.1, 1 / 3, 0.7, 1.1):
        layer = nn.Linear(inputs, outputs)
        x = torch.full((1, times, inputs), value)
        assert 0.9 * CLIP < contribution(layer, mode, lambda m, x: m(x).flatten(1).sum(1) / 3, x) <= ALLOWED


@pytest.mark.parametrize("mode", MODES)
def test_equal_tokens_whose_roundings_add_up_do_not_pass_the_clip_norm(mode):
    for value in (0.1, 1 / 3, 0.7, 1.1):
        tokens = torch.zeros(1, 3000, dtype=torch.long)
        found = contribution(nn.Embedding(3, 7), mode, lambda m, x, value=value: value * m(x).flatten(1).sum(1), tokens)
        assert 0.9 * CLIP < found <= ALLOWED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 3e4, 1e15])
@pytest.mark.parametrize("slope", [1e-22, 1e-6, 1.0, 1e3])
def test_huge_and_tiny_numbers_do_not_pass_the_clip_norm(mode, dtype, size, slope):
    layer = nn.Linear(8, 8).to(dtype)
    x = torch.full((1, 4, 8), min(size, float(torch.finfo(dtype).max))).to(dtype)
    assert contribution(layer, mode, lambda m, x: (m(x) * slope).flatten(1).sum(1), x) <= ALLOWED


def without_slack(monkeypatch):
    monkeypatch.setattr(norms.Squares, "bound", lambda self: self.norm.sqrt())


def without_the_bound_of_rounding(monkeypatch):
    monkeypatch.setattr(rounding, "inner_error", lambda vectors: 0.0)
    monkeypatch.setattr(rounding, "sum_error", lambda vectors, terms: 0.0)


def by_one_part_in_a_million(monkeypatch):
    def generous(norms, limit, counted):
        return torch.where(counted, (limit * 1.000002 / norms).clamp(max=1.0), 0.0)

    monkeypatch.setattr("bandmf.torch.clipping.adding.clip_factors", generous)


@pytest.mark.parametrize(
    ("plant", "dtype"),
    [
        (without_slack, torch.bfloat16),
        (without_the_bound_of_rounding, torch.float32),
        (by_one_part_in_a_million, torch.float32),
    ],
)
def test_planted_errors_are_found_by_the_attacks(plant, dtype, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_no_content_of_an_example_adds_more_than_the_clip_norm("bookkeeping", dtype, (Bare, each_token))


# --- by the model ---------------------------------------------------------------------------------------


class FunctionalTying(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def forward(self, x):
        tokens = (x.abs() * 10).long() % 5
        return (self.embed(tokens) @ self.embed.weight.T).mean(1)[:, :4]


class LinearAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x) + 10 * functional.linear(x, self.layer.weight)


class ProductWithWeight(LinearAgain):
    def forward(self, x):
        return self.layer(x) + 100 * (x @ self.layer.weight.T)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x, factor=None):
        scores = functional.linear(x, self.weight)
        return scores if factor is None else scores * factor


class OptionalInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x):
        return self.scaled(x, torch.full((len(x), 1), 50.0))


LEAKS = {
    "functional tying": (FunctionalTying, r"'embed.weight'.*outside the layer that owns it"),
    "F.linear with a layer's weight": (LinearAgain, r"'layer.weight'.*outside the layer that owns it"),
    "product with a layer's weight": (ProductWithWeight, r"'layer.weight'.*outside the layer that owns it"),
}


def model_of(kind):
    torch.manual_seed(3)
    return kind()


def vectors(count=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def with_a_loud_one(batch):
    x, y = (each.clone() for each in batch)
    x[0], y[0] = 1e3 * x[0] + 7, (y[0] + 1) % 4
    return x, y


def each(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def moved(model, mode, batches, losses=each, clip_norm=CLIP):
    """How far the sum over a batch moves when one of its examples is replaced."""
    totals = [added(model, losses, batch, len(batch[0]), mode=mode, clip_norm=clip_norm) for batch in batches]
    return float((totals[0] - totals[1]).norm())


@pytest.mark.parametrize("leak", LEAKS)
def test_weights_used_outside_their_layer_are_refused_by_name_or_bounded_by_vmap(leak):
    kind, sentence = LEAKS[leak]
    with pytest.raises(RuntimeError, match=sentence):
        added(model_of(kind), each, vectors(), 8)
    assert 0.1 * CLIP < moved(model_of(kind), "vmap", [vectors(), with_a_loud_one(vectors())]) <= 2 * ALLOWED


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_an_optional_input_is_bounded(mode):
    batches = [vectors(), with_a_loud_one(vectors())]
    assert 0.1 * CLIP < moved(model_of(OptionalInput), mode, batches) <= 2 * ALLOWED


# --- by the losses --------------------------------------------------------------------------------------


def small_net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def weighted(model, batch):
    """What is loud weighs more."""
    return each(model, batch) * (1 + 1e4 * (batch[0].abs().amax(1) > 100))


def larger_gradients(model, batch):
    scores = model(batch[0])
    if scores.requires_grad:
        scores.register_hook(lambda gradient: 1000 * gradient)
    return functional.cross_entropy(scores, batch[1], reduction="none")


def twice(model, batch):
    return each(model, batch) + 1000 * each(model, batch)


@pytest.mark.parametrize(
    ("mode", "losses"), [*in_turn(list(MODES), [weighted, twice]), ("bookkeeping", larger_gradients)]
)
def test_no_losses_let_one_example_move_the_sum_by_more_than_its_share(losses, mode):
    batches = [vectors(), with_a_loud_one(vectors())]
    assert 0.1 * CLIP < moved(small_net(), mode, batches, losses) <= 2 * ALLOWED


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, tokens):
        return self.out(self.embed(tokens).cumsum(1).tanh()).transpose(1, 2)


def padded(texts):
    """Zeros to the longest of the batch; -100 where no token is to be predicted."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([text.roll(-1) for text in texts], True, padding_value=-100)
    return tokens, labels


@pytest.mark.parametrize("mode", MODES)
def test_replacing_one_of_32_padded_texts_moves_the_sum_by_no_more_than_its_share(mode):
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(1, 9, (3 + number % 5,), generator=generator) for number in range(32)]
    batches = [padded(texts), padded([torch.full((60,), 3), *texts[1:]])]

    def words(model, batch):
        found = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return found.sum(1) / (batch[1] >= 0).sum(1)

    assert 0.01 < moved(Reader(), mode, batches, words, 0.2) <= 2 * 0.2 * (1 + 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_nearly_opposite_tokens_in_a_run_move_the_sum_by_no_more_than_their_share(mode):
    quiet = torch.randn(4, 8, 24, generator=torch.Generator().manual_seed(0))
    loud = torch.cat([nearly_equal_tokens(8, 24, 1e8, 1e-6), quiet[1:]])
    batches = [(quiet,), (loud,)]
    assert 0.1 * CLIP < moved(Bare(), mode, batches, lambda m, batch: each_token(m, *batch)) <= 2 * ALLOWED
