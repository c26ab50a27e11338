"""Numbers of little precision, from rules, layers or settings: one example moves the sum by no more than its share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.torch import losses
from bandmf.torch.clipping import Bookkeeping, Outer, norms, rule, rules
from bandmf.torch.clipping import Rows as RowsOf
from bandmf.torch.noise.precision import exact, precision
from bandmf.torch.training.step import Stepper
from private_loops import Rows, outcome, plain, small_net, vectors


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


def summed_in_bfloat16(private, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = private.model(batch[0])
    functional.cross_entropy(scores.float(), batch[1], reduction="sum").backward()
    private.optimizer.step()


def test_a_rule_that_gives_half_precision_is_added_up_in_full(own_rule):
    """As it was, a thousand equal examples moved by 1.25, two thousand by 2.5 times the clip norm."""
    own_rule(lambda layer, a, g: {"weight": a * g})
    torch.manual_seed(1)
    base = Rows([(torch.randn(6), torch.tensor(1))] * 1000)
    more = Rows([*base, (torch.randn(6), torch.tensor(0))])
    options = {"clip_norm": 0.05, "loss_reduction": "sum"}
    totals = [outcome(Scaled(), data, "auto", summed_in_bfloat16, **options).total for data in (base, more)]
    assert float((totals[1] - totals[0]).norm()) <= 0.05 * (1 + 1e-4)


class Mixed(nn.Module):
    """A matrix product for every kind of layer whose sum takes one."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.out = nn.Linear(40, 40), nn.Conv1d(5, 6, 3), nn.Linear(6 * 38, 3)

    def forward(self, x):
        return self.out(self.conv(self.first(x).tanh()).flatten(1))


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch"])
def test_a_step_inside_of_autocast_rounds_no_sum(mode):
    """As it was, one example moved the sum by 1.0018 times the clip norm."""

    def all_inside(private, batch):
        private.model(batch[0]).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            private.optimizer.step()

    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        model, data = Mixed(), Rows([(30 * torch.randn(5, 40), torch.tensor(0))])
        moved = outcome(model, data, mode, all_inside, clip_norm=1.0, loss_reduction="sum", self_test=False)
        found.append(float(moved.total.double().norm()))
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


def by_mean(private, tokens):
    losses.classification(private.model(tokens), tokens).mean().backward()
    private.optimizer.step()


def by_example(private, tokens):
    private.backward(losses.classification(private.model(tokens), tokens))
    private.optimizer.step()


def test_private_backward_rounds_nothing_by_the_number_of_examples():
    """A mean divides before gradients are rounded to bfloat16; then one text more moves all others."""
    generator = torch.Generator().manual_seed(0)
    text, other = torch.randint(0, 20, (2, 8), generator=generator)
    data = Rows([text] * 1000), Rows([*[text] * 1000, other])
    moved = {}
    for loop in (by_mean, by_example):
        without, with_it = (outcome(Words(), rows, "auto", loop, clip_norm=0.05).total for rows in data)
        moved[loop] = float((with_it - without).norm()) / 0.05
    assert moved[by_example] <= 1 + 1e-4
    assert moved[by_mean] > 2, "documented in docs/guarantees.md"


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
    model = Scaled()
    clipping = Bookkeeping(model, {"scale.weight": model.scale.weight}, 1.0, False)
    clipping.record(5)
    model(torch.randn(5, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"rule: gave gradients of shape .*must be \(5, 8\)"):
        clipping.add_to({"scale.weight": torch.zeros(8)}, 5, 5, 1.0)


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
    assert outcome(small_net(), vectors(), "auto").refused is None


def by_mean_in(dtype, scaler=None):
    def loop(private, batch):
        with torch.autocast("cpu", dtype=dtype):
            scores = private.model(batch[0])
        loss = functional.cross_entropy(scores.float(), batch[1])
        if scaler is None:
            loss.backward()
            private.optimizer.step()
            return
        scaler.scale(loss).backward()
        scaler.step(private.optimizer)
        scaler.update()

    return loop


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_a_mean_in_float16_is_refused_with_a_scale_or_without(scale):
    """Gradients divided by the number of examples vanish there: one more moved 635 times the clip norm.

    With a scale they leave its range or not by the number of examples: it moved 46 times the clip norm.
    """
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    loop = by_mean_in(torch.float16, scaler)
    refused = outcome(small_net(), vectors(), "auto", loop, clip_norm=1.0).refused
    assert refused.startswith("loss: a mean in float16 divides gradients by 7")  # in a rehearsal
    assert refused.endswith("loss_reduction='sum'")


def test_a_mean_in_bfloat16_says_once_what_it_costs(recwarn):
    outcome(small_net(), vectors(), "auto", by_mean_in(torch.bfloat16), clip_norm=1.0)
    assert len([one for one in recwarn if "a mean loss in half precision" in str(one.message)]) == 1


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


def each(private, batch):
    private.optimizer.zero_grad()
    private.backward(functional.cross_entropy(private.model(batch[0]), batch[1], reduction="none"))
    private.optimizer.step()


def made_sure(model, x):
    """The model is so sure of x that its gradient, divided by more than so many, is below what float16 has."""
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0] * 8, [-1.0] * 8, [0.0] * 8, [0.0] * 8]))
        model.head.bias.copy_(torch.tensor([0.0, 0.0, -100.0, -100.0]))
        scores = model(x[None])[0]
        model.head.bias[0] += 12 - scores[0] + scores[1]
        return int(float(1 - model(x[None])[0].double().softmax(-1)[0]) / 2**-25)


def moved_by_one_more(loop, count_of=range(-1, 4), **options):
    """The most that one example moves the sum, in clip norms, where gradients begin to vanish; or the refusal."""
    model = Adapted(torch.float16)
    others, totals, x = vectors(), [], torch.ones(6)
    rows = made_sure(model, x)
    for more in count_of:
        data = Rows([*others, *[(x, torch.tensor(0))] * (rows + more - len(others))])
        found = outcome(model, data, "auto", loop, clip_norm=1e-5, **options)
        if found.refused:
            return found.refused
        totals.append(found.total)
    return max(float((b - a).norm()) / 1e-5 for a, b in pairwise(totals))


def test_a_mean_whose_gradients_pass_through_frozen_float16_layers_is_refused(monkeypatch):
    """One example moved the sum by 771 times the clip norm, with peft's LoRA in float32 on a base in float16."""
    assert moved_by_one_more(plain).startswith("loss: a mean in float16 divides gradients by 7")
    unchecked = moved_by_one_more(plain, self_test=False)
    assert unchecked.startswith("loss: a mean in float16"), "without the self-test too"
    assert moved_by_one_more(each) <= 1 + 1e-4
    monkeypatch.setattr(Stepper, "_mean_in_half_precision", lambda stepper, rows: None)
    assert moved_by_one_more(plain, self_test=False) > 100, "the attack works where nothing is refused"


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_a_frozen_float16_layer_in_front_of_all_that_is_trained_takes_a_mean(mode):
    """No gradient passes through it."""
    assert outcome(Adapted(torch.float16, behind=False), vectors(16), mode).refused is None


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_adapters_of_a_bfloat16_base_are_accepted_and_a_mean_is_warned_of(mode, recwarn):
    """They were refused: rounding in frozen layers was not expected."""
    assert outcome(Adapted(torch.bfloat16), vectors(32), mode, each).refused is None
    assert not [one for one in recwarn if "a mean loss in half precision" in str(one.message)]
    assert outcome(Adapted(torch.bfloat16), vectors(32), mode).refused is None
    assert len([one for one in recwarn if "a mean loss in half precision" in str(one.message)]) == 1


def test_a_cast_by_hand_between_layers_of_float32_counts_too():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_net()

        def forward(self, x):
            return self.inner(x).half().mul(2).float()

    assert outcome(Cast(), vectors(16), "auto").refused.startswith("loss: a mean in float16")
    assert outcome(Cast(), vectors(16), "auto", each).refused is None


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_autocast_around_a_layer_that_stays_in_float32_is_noticed_without_the_self_test(mode):
    """An embedding does: its gradients are of float32, and came through layers in float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(16, 4).requires_grad_(False))
    data = Rows([(torch.tensor([n % 20, n % 7]), torch.tensor(n % 4)) for n in range(8)])
    loop = by_mean_in(torch.float16)
    assert outcome(model, data, mode, loop, self_test=False).refused.startswith("loss: a mean in float16")
