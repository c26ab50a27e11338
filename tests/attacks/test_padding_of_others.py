"""Attempts to change what everybody else contributes, by a text that is so long that all others are padded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch.clipping import Outer, make_clipping, norms
from bandmf.torch.clipping.contributions import outer
from bandmf.torch.clipping.norms import rounding
from bandmf.torch.clipping.products import live_places
from one_at_a_time import empty_sums, flat, learn, trained
from sweeps import in_turn, some_long

CLIP, COPIES, LONG, WORDS, WIDTH = 0.1, 32, 120, 40, 32
MODES = ("float32", "bfloat16", "high")


# --- models whose padded places have no part in the loss ------------------------------------------------


class Reader(nn.Module):
    """Tokens through `read`, and the mean over an example's own tokens; zero is padding."""

    def __init__(self, width=WIDTH, loud=1.0, frozen=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.out = nn.Embedding(WORDS, width), nn.Linear(width, 3)
        with torch.no_grad():
            self.embed.weight[0] *= loud
        self.embed.weight.requires_grad_(not frozen)

    def read(self, x, own):
        return x

    def forward(self, tokens):
        own = (tokens != 0)[..., None]
        x = self.read(self.embed(tokens), own)
        return self.out((x * own).sum(1) / own.sum(1))

    def losses(self, scores, tokens):
        return functional.cross_entropy(scores.float(), tokens[:, 0] % 3, reduction="none")


class Linear(Reader):
    def __init__(self, **options):
        super().__init__(**options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def read(self, x, own):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Encoder(Reader):
    def __init__(self, **options):
        super().__init__(**options)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)

    def read(self, x, own):
        return self.layer(x, src_key_padding_mask=~own[..., 0])


class Convolution(Reader):
    """Over the text; what is padded is zero before it, as torch's own padding is."""

    def __init__(self, channels=WIDTH, **options):
        super().__init__(**options)
        self.layer = nn.Conv1d(WIDTH, channels, 3, padding=1)
        self.narrow = nn.Linear(channels, WIDTH)

    def read(self, x, own):
        return self.narrow(self.layer((x * own).mT).mT.tanh())


class Tied(Reader):
    """Predicts every next word with the embedding's own weights."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.mix(self.embed(tokens)).tanh())

    def losses(self, scores, tokens):
        each = functional.cross_entropy(scores[:, :-1].mT.float(), tokens[:, 1:], reduction="none")
        return (each * (tokens[:, 1:] != 0)).sum(1)


MODELS = {
    "linear": Linear,
    "linear, loud padding": lambda: Linear(loud=300.0, frozen=True),
    "embedding": lambda: Reader(loud=30.0),
    "encoder layer": Encoder,
    "tied head": lambda: Tied(loud=30.0),
    "convolution": Convolution,
    "convolution in patches": lambda: Convolution(channels=2800),
}


@contextlib.contextmanager
def precision(mode):
    torch.set_float32_matmul_precision("high" if mode == "high" else "highest")
    try:
        yield torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bfloat16")
    finally:
        torch.set_float32_matmul_precision("highest")


def text(length, seed=5):
    return torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(seed))


def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def added(model, rows, mode, valid=None):
    """What clipping adds for the first `valid` of these examples, in units of the clip norm."""
    parameters, tokens = trained(model), padded(rows)
    sums = empty_sums(parameters)
    with precision(mode) as autocast:

        def losses(model, tokens):
            with autocast:
                scores = model(tokens)
            return model.losses(scores, tokens)

        clipping = make_clipping("auto", model, parameters, CLIP, False)
        learn(clipping, losses, lambda n: padded(rows[:1] * n))
        clipping.add_to(sums, losses, tokens, len(rows), len(rows) if valid is None else valid)
    return flat(sums) / CLIP


def moved(model, mode):
    """How far the sum moves when one long text comes, and how much of that the others do, each."""
    short, long = [text(6)] * COPIES, text(LONG, 6)
    without, together, alone = (added(model, rows, mode) for rows in (short, [*short, long], [long]))
    return float((together - without).norm()), float((together - without - alone).norm()) / COPIES


# --- what one long text does to the others --------------------------------------------------------------

SLOW = ("convolution in patches", "high")
CASES = [case for case in in_turn(list(MODELS), list(MODES)) if getattr(case, "values", case) != SLOW]
# Without those that take as long as all others; a convolution that is not in patches is among these.
QUICK = some_long(CASES, lambda case: case != ("convolution in patches", "float32"))


@pytest.mark.parametrize(("name", "mode"), QUICK)
def test_padding_of_others_does_not_change_what_an_example_contributes(name, mode):
    """Of a text that comes the sum may have C more; of all others nothing that it made them be padded with."""
    far, others = moved(MODELS[name](), mode)
    assert 0.9 < far <= 1 + 1e-4
    # Attention itself rounds otherwise in bfloat16 where there are more places: other gradients, not other factors.
    assert others < (3e-3 if (name, mode) == ("encoder layer", "bfloat16") else 1e-6)


def of_rounding(name, mode):
    """Attention rounds otherwise in bfloat16 where there are more places, so factors differ in their last bits, and
    gradients times factors are rounded to bfloat16: that alone moves a clipped norm by up to 1e-3."""
    return 3e-4 if (name, mode) == ("encoder layer", "bfloat16") else 1e-6


def differences(model, mode):
    """How much the norms that clipping sees of texts alone and padded differ; all are clipped."""
    rows = [text(length, length) for length in (2, 6, 15, 30)]
    alone = [float(added(model, [row], mode).norm()) for row in rows]
    together = [float(added(model, [row, *rows, text(LONG)], mode, 1).norm()) for row in rows]
    assert min(alone) > 0.9  # over-estimates by little
    return [abs(one / other - 1) for one, other in zip(together, alone, strict=True)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_padding_of_others_does_not_change_an_examples_norm(name, mode):
    assert max(differences(MODELS[name](), mode)) < of_rounding(name, mode)


def all_places_count(monkeypatch):
    def everywhere(some, *others):
        return torch.ones(some.shape[:2], dtype=torch.bool)

    monkeypatch.setattr(outer, "live_places", everywhere)
    monkeypatch.setattr(norms, "live_places", everywhere)


def the_longest_text_decides_the_way(monkeypatch):
    monkeypatch.setattr(Outer, "counts", property(lambda outer: [outer.left.shape[1]] * outer.examples))


PLANTED = [
    (all_places_count, "linear, loud padding", "float32"),
    (all_places_count, "tied head", "float32"),
    (all_places_count, "embedding", "high"),
    *((all_places_count, name, "bfloat16") for name in MODELS if name != "embedding"),
    *((the_longest_text_decides_the_way, name, "high") for name in MODELS if name not in ("embedding", SLOW[0])),
]


ORDINARY = [
    ("tied head", "float32"), ("embedding", "high"), ("linear", "bfloat16"), ("encoder layer", "bfloat16"),
    ("linear", "high"), ("convolution", "high"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "name", "mode"), some_long(PLANTED, lambda case: case[1:] in ORDINARY))
def test_bounds_and_ways_that_depend_on_padding_are_caught(plant, name, mode, monkeypatch):
    plant(monkeypatch)
    assert moved(MODELS[name](), mode)[1] > 1e-4
    assert max(differences(MODELS[name](), mode)) > max(1e-4, of_rounding(name, mode))


# --- which places are dead ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_place_is_dead_only_if_what_it_adds_is_zero(dtype):
    left, right = torch.ones(1, 8, 40, dtype=dtype), torch.ones(1, 8, 50, dtype=dtype)
    left[0, 1:7] = 0
    right[0, 7] = -0.0
    left[0, 2, 39] = torch.finfo(dtype).smallest_normal  # its square is zero
    right[0, 3, 49], right[0, 4, 0], right[0, 5, 1] = torch.nan, torch.inf, -torch.inf
    expected = [True, False, True, True, True, True, False, False]
    assert live_places(left, right).tolist() == [expected]


@pytest.mark.parametrize("places", [3, 30])
def test_an_infinite_input_leaves_its_example_out_even_where_there_is_no_gradient(places):
    """Zero times infinity would reach the sum."""
    left, right = torch.randn(2, places, 10), torch.randn(2, places, 12)
    left[0, 1], right[0, 1, 4] = 0, torch.inf
    assert norms.total_squares([], {"w": [Outer(left, right)]}).bound().isfinite().tolist() == [False, True]


def test_a_number_too_large_to_be_squared_does_not_count_where_there_is_no_gradient():
    left, right = torch.randn(2, 3, 10), torch.randn(2, 3, 12)
    expected = norms.total_squares([], {"w": [Outer(left[:, :2], right[:, :2])]}).bound()
    left[:, 2], right[:, 2] = 0, 1e30
    assert torch.equal(norms.total_squares([], {"w": [Outer(left, right)]}).bound(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_examples_that_are_added_in_two_ways_add_up_to_the_sum(dtype):
    """Long and short ones in turn, and one that is dead; padding on both sides."""
    torch.manual_seed(0)
    left, right = torch.randn(6, 30, 10).to(dtype), torch.randn(6, 30, 12).to(dtype)
    for example, (begin, end) in enumerate([(0, 30), (4, 6), (20, 25), (2, 29), (0, 0), (0, 1)]):
        left[example, :begin] = left[example, end:] = 0
    outer, factors, total = Outer(left, right), torch.rand(6), torch.ones(10, 12)
    assert [group.by_gram for group in outer.groups()] == [True, False]
    outer.add_to(total, factors, 2.0)
    each = left.double().mT @ right.double()
    true = 1 + 2 * (factors.double()[:, None, None] * each).sum(0)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(total.double(), true, rtol=tolerance, atol=5 * tolerance)
    found = norms.squares_apart([], {"w": [outer]})["w"].bound()
    size = each.flatten(1).norm(dim=1)
    assert torch.all(found >= size * (1 - 1e-7))
    assert torch.all(found <= size * 1.03 + 1e-30)


# --- sums over very many places -------------------------------------------------------------------------


def test_numbers_added_one_by_one_err_by_no_more_than_is_allowed_on_a_gpu():
    """The worst case: equal numbers, of which every addition rounds in the same direction."""
    on_gpu, largest = SimpleNamespace(is_cuda=True, dtype=torch.float32), 0.0
    for value in np.linspace(1, 2, 41, dtype=np.float32):
        sums = np.full(100_000, value).cumsum(dtype=np.float32).astype(np.float64)
        terms = np.arange(1, len(sums) + 1)
        error = np.abs(sums / (terms * float(value)) - 1)
        largest = max(largest, float((error / rounding.sum_error(on_gpu, terms)).max()))
    assert 0.5 < largest <= 1
