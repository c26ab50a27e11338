"""Norms and clipped sums against plain autograd in float64, one example at a time, for every kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bandmf.torch.clipping import Outer, Rows, make_clipping, norms, rules
from bandmf.torch.clipping.contributions import Patches, patches
from bandmf.torch.clipping.norms import rounding, squares_apart
from clipping_cases import CASES, ROWS, Low, Odd, Optional, Scale, SelfAttention, Twice, numbers, shaken
from one_at_a_time import Case, errors, exact, found

NOTHING_CANCELS = 1e-5
ROUNDING = 1e-6


def assert_right(seen, most=NOTHING_CANCELS):
    assert seen.gradient < min(most, 1e-4), seen
    assert seen.above < most, seen
    assert seen.total < most, seen
    assert seen.below < ROUNDING, seen


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer_is_clipped_as_one_example_at_a_time(name):
    torch.manual_seed(0)
    assert_right(errors(CASES[name]()))


@pytest.mark.parametrize("name", ["linear of three dimensions", "tied embedding", "conv2d, all options"])
def test_float64_models_are_clipped_as_one_example_at_a_time(name):
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.double()
    case.inputs = tuple(x.double() if x.is_floating_point() else x for x in case.inputs)
    seen = errors(case)
    assert_right(seen)
    assert seen.gradient < 1e-7  # the rounding of the sums, which are float32


def test_per_layer_every_parameter_is_clipped_to_its_share():
    torch.manual_seed(0)
    case = CASES["tied embedding with bias"]()
    parameters = dict(case.model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    limit = 0.1 / len(parameters) ** 0.5
    seen = found(case, clip_norm=0.1, per_layer=True)
    for gradients, total in zip(exact(case).split(sizes, 1), seen.sums.values(), strict=True):
        each = gradients.norm(dim=1, keepdim=True)
        assert float(each.min()) > limit
        expected = (gradients * limit / each).sum(0)
        torch.testing.assert_close(total.flatten().double(), expected, rtol=1e-4, atol=1e-7)


def test_large_convolutions_are_clipped_in_portions(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL", 0)
    monkeypatch.setattr(patches, "IN_CACHE", 1500)
    torch.manual_seed(0)
    case = CASES["conv2d, same and dilated"]()
    case.model.layer = nn.Conv2d(4, 40, 5, padding="same", dilation=2)
    described = rules.convolution(case.model.layer, case.inputs[0], torch.zeros(ROWS, 40, 7, 6))["weight"]
    assert isinstance(described, Patches)
    assert len(list(described.portions())) > 1
    assert_right(errors(case))


def test_the_norm_of_many_linear_maps_of_one_shape_is_found_by_either_formula(monkeypatch):
    torch.manual_seed(0)
    case = Case(nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)]), (numbers(3, 12),))
    for few in (3, 0):
        monkeypatch.setattr(Outer, "few", few)
        assert_right(errors(case))


# --- planted errors -------------------------------------------------------------------------------------


def without_cross_terms_of_tied(monkeypatch):
    apart = norms._of_terms
    monkeypatch.setattr(norms, "_of_tied", lambda terms: apart([terms[0]]) + apart([terms[1]]))


def without_cross_terms_of_calls(monkeypatch):
    def apart(small, terms):
        found = [norms._of_tensor(pack.flat) for pack in small]
        found += [norms._of_terms([term]) for several in terms.values() for term in several]
        return sum(found[1:], found[0])

    monkeypatch.setattr("bandmf.torch.clipping.adding.total_squares", apart)
    monkeypatch.setattr("bandmf.torch.clipping.bookkeeping.join", lambda terms: terms)


def padding_ignored(monkeypatch):
    def embedding(layer, a, g):
        return {"weight": Rows(a.reshape(len(a), -1), g.reshape(len(a), -1, g.shape[-1]))}

    monkeypatch.setitem(rules._RULES, nn.Embedding, embedding)


def one_token_of_each_kind(monkeypatch):
    monkeypatch.setattr(norms, "_same", lambda a, b: torch.eye(a.shape[1], dtype=torch.bool).expand(len(a), -1, -1))


def bias_forgotten(monkeypatch):
    monkeypatch.setitem(rules._RULES, nn.Linear, lambda layer, a, g: {"weight": Outer(g, a)})


def dilation_forgotten(monkeypatch):
    unfold = patches.unfold

    def spoiled(given):
        layer = type("Spoiled", (), {**vars(given.layer), "dilation": tuple(1 for _ in given.layer.dilation)})
        return unfold(replace(given, layer=layer))

    monkeypatch.setattr(patches, "unfold", spoiled)


def epsilon_forgotten(monkeypatch):
    monkeypatch.setattr(rules, "_epsilon", lambda layer, a: 0.0)


def masks_forgotten(monkeypatch):
    monkeypatch.setattr("bandmf.torch.clipping.recording.attention.Attention._mask", lambda *_: None)


def key_for_value(monkeypatch):
    from bandmf.torch.clipping.recording import attention

    part = attention._part
    monkeypatch.setattr(attention, "_part", lambda number, width: part(min(number, 1), width))


def only_the_first_call(monkeypatch):
    monkeypatch.setattr("bandmf.torch.clipping.bookkeeping.join", lambda terms: terms[:1])


PLANTED = [
    (without_cross_terms_of_tied, "tied embedding"),
    (without_cross_terms_of_calls, "linear called three times"),
    (without_cross_terms_of_calls, "attention called three times"),
    (padding_ignored, "embedding with padding"),
    (padding_ignored, "tied embedding with padding"),
    (one_token_of_each_kind, "embedding of repeated tokens"),
    (bias_forgotten, "linear of two dimensions"),
    (dilation_forgotten, "conv2d, same and dilated"),
    (epsilon_forgotten, "Llama's RMSNorm"),
    (masks_forgotten, "attention, causal"),
    (masks_forgotten, "attention, padded"),
    (key_for_value, "cross attention"),
    (only_the_first_call, "layer without a rule called three times"),
]


@pytest.mark.parametrize(("plant", "name"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_errors_are_caught(plant, name, monkeypatch):
    plant(monkeypatch)
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        assert_right(errors(CASES[name]()))


# --- random models --------------------------------------------------------------------------------------

WIDTH = 8


class Turned(nn.Module):
    """A layer over the channels of (examples, times, channels)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


PIECES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "wider": lambda: nn.Sequential(nn.Linear(WIDTH, 21), nn.GELU(), nn.Linear(21, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "group norm": lambda: Turned(nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: Turned(nn.InstanceNorm1d(WIDTH, affine=True, eps=0.1)),
    "conv": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "grouped": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=2)),
    "attention": lambda: SelfAttention(batch_first=True, mask="causal"),
    "attention, batch second": lambda: SelfAttention(use_weights=False, padded=False),
    "odd": lambda: Odd(WIDTH),
    "optional": lambda: Optional(WIDTH),
    "scale": lambda: Scale(WIDTH),
    "low rank": lambda: Low(WIDTH, WIDTH),
    "twice": lambda: Twice(nn.Linear(WIDTH, WIDTH)),
    "norm twice": lambda: Twice(nn.LayerNorm(WIDTH)),
}


class Composed(nn.Module):
    """Tokens, pieces with a way around them, and an output layer, tied or not; pieces may come again."""

    def __init__(self, pieces, order, tied, padded):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0 if padded else None)
        self.pieces = nn.ModuleList(PIECES[name]() for name in pieces)
        self.order = order
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for number in self.order:
            x = x + self.pieces[number](x).tanh()  # a way around, or norms in a row leave nothing but rounding
        return self.out(self.norm(x))


@st.composite
def composed(draw):
    pieces = draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4))
    again = draw(st.lists(st.integers(0, len(pieces) - 1), max_size=2))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    order = [*range(len(pieces)), *again]
    model = shaken(Composed(pieces, order, draw(st.booleans()), draw(st.booleans())))
    times = draw(st.integers(2, 9))
    return Case(model, (torch.randint(0, 11, (draw(st.integers(1, 4)), times)),))


@settings(max_examples=80)
@given(composed())
def test_random_models_are_clipped_as_one_example_at_a_time(case):
    assert_right(errors(case))


@pytest.mark.long
@settings(max_examples=4000)
@given(composed())
def test_many_random_models_are_clipped_as_one_example_at_a_time(case):
    """Among so many there are some that cancel, as equal tokens do: their norms are over-estimated, never below."""
    assert_right(errors(case), most=0.01)


# --- where sums cancel ----------------------------------------------------------------------------------


def opposite(times, width, nearness, size, generator):
    """Pairs of vectors that nearly cancel, and some that do not."""
    half = torch.randn(3, -(-times // 2), width, generator=generator) * size
    near = -half * (1 + nearness * torch.randn((*half.shape[:2], 1), generator=generator))
    near = near + nearness * size * torch.randn(half.shape, generator=generator)
    return torch.cat([half, near], 1)[:, :times]


def alike(times, width, nearness, size, generator):
    half = opposite(times, width, nearness, size, generator)
    return torch.cat([half[:, : -(-times // 2)], -half[:, -(-times // 2) :]], 1)


@st.composite
def cancelling(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    p, q = draw(st.sampled_from([1, 3, 40, 300])), draw(st.sampled_from([2, 50, 200]))
    times, dead = draw(st.integers(1, 40)), draw(st.integers(0, 30))
    nearness = 10.0 ** draw(st.integers(-8, 0))
    size = 10.0 ** draw(st.integers(-2, 4))
    dtype = draw(st.sampled_from(dtypes))
    left = opposite(times, p, nearness, min(size, 100.0), generator).to(dtype)
    right = alike(times, q, nearness, min(size, 100.0), generator).to(dtype)
    loud = 100 * torch.randn(3, dead, q, generator=generator).to(dtype)  # padding, anywhere
    order = torch.randperm(times + dead, generator=generator)
    left = torch.cat([left, left.new_zeros(3, dead, p)], 1)[:, order]
    return left, torch.cat([right, loud], 1)[:, order], generator


def added(terms, shape):
    """What the terms of one parameter add with factor one, exactly: in float64."""
    whole = 0
    for term in terms:
        if isinstance(term, Outer):
            whole = whole + term.left.double().mT @ term.right.double()
        else:
            values = term.values.double()
            empty = torch.zeros(term.examples, *shape, dtype=torch.float64)
            whole = whole + empty.scatter_add(1, term.indices[:, :, None].expand_as(values), values)
    return whole.flatten(1).norm(dim=1)


def assert_not_below(terms, shape):
    bound = squares_apart([], {"w": terms})["w"]
    true = added(terms, shape)
    low = true * (1 - ROUNDING) - bound.norm.double().sqrt()
    assert float((low / true.clamp(min=1e-30)).max()) <= 0


@settings(max_examples=200)
@given(cancelling())
def test_the_norm_of_a_sum_that_cancels_is_never_below_the_true_one(case):
    left, right, _ = case
    assert_not_below([Outer(left, right)], (left.shape[2], right.shape[2]))


@settings(max_examples=100)
@given(cancelling())
def test_the_norm_of_equal_tokens_that_cancel_is_never_below_the_true_one(case):
    left, _, generator = case
    indices = torch.randint(0, 2, left.shape[:2], generator=generator)
    assert_not_below([Rows(indices, left)], (2, left.shape[2]))


@settings(max_examples=100)
@given(cancelling())
def test_the_norm_of_an_embedding_that_cancels_against_its_head_is_never_below_the_true_one(case):
    """The head's gradient is the opposite of the embedding's, up to the rounding of its dtype."""
    left, right, generator = case
    vocabulary = 5
    indices = torch.randint(0, vocabulary, left.shape[:2], generator=generator)
    picked = nn.functional.one_hot(indices, vocabulary).to(right.dtype)
    rows = Rows(indices, right)
    noisy = -right * (1 + 1e-3 * left[..., :1].sign())
    assert_not_below([Outer(picked, noisy), rows], (vocabulary, right.shape[2]))
    assert_not_below([Outer(picked, -right), rows], (vocabulary, right.shape[2]))


def test_without_the_bound_of_the_rounding_error_norms_would_be_too_small(monkeypatch):
    """The planted error of the tests above."""
    monkeypatch.setattr(rounding, "inner_error", lambda vectors: 0.0)
    generator = torch.Generator().manual_seed(0)
    left, right = opposite(2, 300, 1e-6, 1.0, generator), alike(2, 300, 1e-6, 1.0, generator)
    with pytest.raises(AssertionError):
        assert_not_below([Outer(left, right)], (300, 300))


def test_over_estimation_is_small_for_ordinary_gradients():
    generator = torch.Generator().manual_seed(0)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        left = torch.randn(4, 32, 200, generator=generator).to(dtype)
        right = torch.randn(4, 32, 200, generator=generator).to(dtype)
        found = squares_apart([], {"w": [Outer(left, right)]})["w"]
        ratio = found.bound().double() / added([Outer(left, right)], (200, 200))
        assert 1 <= float(ratio.min()) <= float(ratio.max()) < 1 + most


# --- what is added, to float32 sums ---------------------------------------------------------------------


def largest_share(layer, given, limits):
    """The most that an example of equal numbers adds, over its limit, for limits whose quotients all round."""
    model = nn.Sequential(layer)
    parameters, most = dict(model.named_parameters()), 0.0
    for limit in limits:
        clipping = make_clipping("bookkeeping", model, parameters, limit, False)
        sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
        clipping.add_to(sums, lambda model, x: model(x).flatten(1).sum(1), given, 1, 1)
        total = torch.cat([each.flatten().double() for each in sums.values()])
        most = max(most, float(total.norm()) / limit)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_repeated_a_thousand_times_adds_no_more_than_the_clip_norm(dtype):
    layer, tokens = nn.Embedding(2, 1).to(dtype), torch.zeros(1, 1000, dtype=torch.long)
    assert largest_share(layer, tokens, [1 + k / 12 for k in range(6)]) <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("places", "kernel", "channels"),
    [(500, 64, 80), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((3000, 150, 32), (2000, 64, 80)))],
)
def test_a_convolution_over_many_places_adds_no_more_than_the_clip_norm(dtype, places, kernel, channels):
    layer = nn.Conv1d(channels, 900, kernel, bias=False).to(dtype)
    given = torch.ones(1, channels, places, dtype=dtype)
    limits = [1 + k / 12 for k in range(12 if places > 500 else 2)]
    assert largest_share(layer, given, limits) <= 1 + 1e-6
