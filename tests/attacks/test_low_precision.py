"""Numbers of little precision, from rules, layers or settings: one example moves the sum by no more than its share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import verify
from bandmf.torch.clipping import Outer, norms, rule, rules
from bandmf.torch.clipping import Rows as RowsOf
from bandmf.torch.noise.precision import exact, precision
from one_at_a_time import MODES, added


def each(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none").view(len(x), -1).mean(1)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight.to(x.dtype)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(6, 8).requires_grad_(False), Scale(8)
        self.out = nn.Linear(8, 2).requires_grad_(False)

    def forward(self, x):
        return self.out(self.scale(self.first(x)))


@pytest.fixture
def own_rule():
    """Registers a rule for Scale, as a user would."""
    yield rule(Scale)
    rules._RULES.pop(Scale, None)


def in_bfloat16(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(batch[0])
    return functional.cross_entropy(scores.float(), batch[1], reduction="none")


def test_a_rule_that_gives_half_precision_is_added_up_in_full(own_rule):
    """As it was, a thousand equal examples moved by 1.25, two thousand by 2.5 times the clip norm."""
    own_rule(lambda layer, a, g: {"weight": a * g})
    torch.manual_seed(1)
    x = torch.cat([torch.randn(1, 6).expand(1000, 6), torch.randn(1, 6)])
    y = torch.tensor([1] * 1000 + [0])
    totals = [added(Scaled(), in_bfloat16, (x[:n], y[:n]), n, clip_norm=0.05) for n in (1000, 1001)]
    assert 0.04 < float((totals[1] - totals[0]).norm()) <= 0.05 * (1 + 1e-4)


class Mixed(nn.Module):
    """A matrix product for every kind of layer whose sum takes one."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.out = nn.Linear(40, 40), nn.Conv1d(5, 6, 3), nn.Linear(6 * 38, 3)

    def forward(self, x):
        return self.out(self.conv(self.first(x).tanh()).flatten(1))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_inside_of_autocast_rounds_no_sum(mode):
    """As it was, one example moved the sum by 1.0018 times the clip norm."""

    def outside(model, x):
        with torch.autocast("cpu", enabled=False):
            return model(x).sum(1)

    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = Mixed(), 30 * torch.randn(1, 5, 40)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(float(added(model, outside, x, 1, mode=mode).norm()))
    assert max(found) <= 1 + 1e-6
    assert min(found) > 1 - 1e-4


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.out = nn.Embedding(20, 32), nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(self.mid(self.embed(tokens)).tanh()).float()


def by_mean(model, batch):
    return each(model, batch) / len(batch[0])


def total(model, losses, batch, clip_norm):
    """The clipped sum; of a mean, times the number of examples."""
    count = len(batch[0])
    scale = count if losses is by_mean else 1
    return scale * added(model, losses, batch, count, clip_norm=clip_norm / scale)


def test_nothing_is_rounded_by_the_number_of_examples():
    """A mean divides before gradients are rounded to bfloat16; then one text more moves all others."""
    generator = torch.Generator().manual_seed(0)
    text, other = torch.randint(0, 20, (2, 1, 8), generator=generator)
    tokens, moved = torch.cat([text.expand(1000, 8), other]), {}
    for losses in (by_mean, each):
        totals = [total(Words(), losses, (tokens[:n], tokens[:n]), 0.05) for n in (1000, 1001)]
        moved[losses] = float((totals[1] - totals[0]).norm()) / 0.05
    assert moved[each] <= 1 + 1e-4
    assert moved[by_mean] > 2


WRONG = {
    "examples added up": lambda a, g: (a * g).sum(0, keepdim=True).expand(len(g), -1)[:1].repeat(1, len(g)),
    "examples last": lambda a, g: (a * g).T,
    "an Outer of fewer rows": lambda a, g: Outer((a * g)[:-1, None], torch.ones(len(g) - 1, 1, 1)),
    "an Outer of one row and many": lambda a, g: Outer((a * g)[:, None], torch.ones(1, 1, 1)),
    "Rows of fewer examples": lambda a, g: RowsOf(torch.zeros(len(g) - 1, 1, dtype=torch.long), (a * g)[:-1, None]),
    "Totals of fewer examples": lambda a, g: rules.total((a * g)[:-1, None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_rule_must_give_a_row_for_each_example(own_rule, kind):
    own_rule(lambda layer, a, g: {"weight": WRONG[kind](a, g)})
    with pytest.raises(ValueError, match=r"rule: that of 'scale.weight' does not give one gradient of shape \(8,\)"):
        added(Scaled(), lambda model, x: model(x).sum(1), torch.randn(5, 6), 5)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 2e-5, 1e-6])
def test_the_norm_of_a_tied_embedding_counts_numbers_that_float16_does_not_have(size):
    """Their inner product was taken in float16: up to 1.41 times the norm was added."""
    right = (torch.randn(1, 1, 512, generator=torch.Generator().manual_seed(0)).sign() * 2e-4).half()
    left = torch.zeros(1, 1, 20).half()
    left[0, 0, 3] = size
    both = [Outer(left, right), RowsOf(torch.tensor([[3]]), left[0, 0, 3].float() * right.float())]
    total = torch.zeros(20, 512)
    for term in both:
        term.add_to(total, torch.ones(1), 1.0)
    assert float(total.norm()) <= float(norms.total_squares([], {"tied": both}).bound())


@pytest.fixture
def new_settings():
    """Torch's settings of precision by device, which are put back."""
    places = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv]
    before = [place.fp32_precision for place in places]
    yield places
    for place, chosen in zip(places, before, strict=True):
        place.fp32_precision = chosen


@pytest.mark.parametrize(("number", "chosen", "expected"), [(0, "tf32", "high"), (1, "bf16", "medium")])
def test_a_precision_that_was_chosen_for_one_device_is_honored(new_settings, number, chosen, expected):
    """Torch raises an error where it is asked for it in the old way."""
    new_settings[number].fp32_precision = chosen
    assert precision() == expected
    with exact():
        assert precision() == "highest"
    assert new_settings[number].fp32_precision == chosen
    x = torch.randn(3, 6)
    assert 0 < float(added(nn.Linear(6, 4), each, (x, torch.arange(3)), 3).norm()) <= 3


# --- frozen layers in half precision ------------------------------------------------------------------------


class Adapted(nn.Module):
    """An adapter in float32 between frozen layers of another type, as LoRA has them."""

    def __init__(self, dtype, behind=True):
        super().__init__()
        torch.manual_seed(3)
        self.base, self.head = nn.Linear(6, 8).to(dtype), nn.Linear(8, 4)
        self.adapter = nn.Linear(8, 8, bias=False)
        self.base.requires_grad_(False)
        if behind:
            self.head.to(dtype).requires_grad_(False)

    def forward(self, x):
        inner = torch.tanh(self.base(x.to(self.base.weight.dtype)))
        inner = inner.float() + self.adapter(inner.float())
        return self.head(inner.to(self.head.weight.dtype)).float()


def made_sure(model, x):
    """The model is so sure of x that its gradient, divided by more than so many, is below what float16 has."""
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0] * 8, [-1.0] * 8, [0.0] * 8, [0.0] * 8]))
        model.head.bias.copy_(torch.tensor([0.0, 0.0, -100.0, -100.0]))
        scores = model(x[None])[0]
        model.head.bias[0] += 12 - scores[0] + scores[1]
        return int(float(1 - model(x[None])[0].double().softmax(-1)[0]) / 2**-25)


def moved_by_one_more(losses, count_of=range(-1, 4)):
    """The most that one example moves the sum, in clip norms, where gradients begin to vanish."""
    generator = torch.Generator().manual_seed(1)
    model, x = Adapted(torch.float16), torch.ones(6)
    rows, totals = made_sure(model, x), []
    others = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    for more in count_of:
        same = rows + more - 8
        batch = torch.cat([others[0], x.expand(same, 6)]), torch.cat([others[1], torch.zeros(same).long()])
        totals.append(total(model, losses, batch, 1e-5))
    return max(float((b - a).norm()) / 1e-5 for a, b in pairwise(totals))


def test_gradients_that_pass_through_frozen_float16_layers_are_not_divided_by_the_number_of_examples():
    """A mean moved the sum by 771 times the clip norm, with LoRA in float32 on a base in float16: verify refuses it."""
    assert moved_by_one_more(each) <= 1 + 1e-4
    assert moved_by_one_more(by_mean) > 100
    examples = [(torch.randn(6), torch.tensor(n)) for n in range(4)]
    assert "divides by something counted" in str(verify(Adapted(torch.float16), by_mean, examples).problems[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("behind", [True, False])
def test_adapters_of_a_base_in_half_precision_are_accepted(dtype, behind):
    examples = [(torch.randn(6), torch.tensor(n)) for n in range(4)]
    assert verify(Adapted(dtype, behind), each, examples).ok
