"""Layers whose rows are not the examples: `bandmf.torch.rows` says whose they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bandmf.torch.clipping.rows import rows
from clipping_cases import Odd, Scaled, SelfAttention, Tied, shaken
from one_at_a_time import added, assert_clipped_as_single_examples

B = 4


class Net(nn.Module):
    """Some layers, which the losses call."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def flat_images():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten())


NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "linear over tokens": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (3, 6)),
    "layer norm": (lambda: shaken(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))), (3, 6)),
    "RMS norm": (lambda: shaken(nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 3))), (3, 6)),
    "convolutions and group norm": (lambda: shaken(flat_images()), (2, 5, 5)),
    "attention": (lambda: shaken(SelfAttention(batch_first=True)), (3, 8)),
    "attention, examples second": (lambda: shaken(SelfAttention()), (3, 8)),
    "embedding, tied": (lambda: Tied(), None),
    "without a rule": (lambda: nn.Sequential(nn.Linear(6, 6), Odd(6)), (3, 6)),
    "a parameter beside layers": (lambda: nn.Sequential(nn.Linear(6, 6), Scaled(nn.Linear(6, 6))), (3, 6)),
}


def given(shape, count):
    return torch.randint(0, 7, (count, 5)) if shape is None else torch.randn(count, *shape)


def score(output):
    """One number for each row."""
    weight = torch.linspace(-1, 2, output[0].numel()).to(output)
    return output.flatten(1).sin() @ weight


@pytest.mark.parametrize("name", NETS)
def test_rows_in_a_run_count_for_their_example(name):
    torch.manual_seed(0)
    make, shape = NETS[name]

    def losses(model, x):  # x: (examples, 3, ...)
        with rows(each=3):
            return score(model(x.flatten(0, 1))).view(-1, 3).square().sum(1)

    x = given(shape, 3 * B).unflatten(0, (B, 3))
    assert_clipped_as_single_examples(make(), losses, x, x.split(1))


@pytest.mark.parametrize("name", NETS)
def test_rows_in_blocks_count_for_their_example(name):
    """As the concatenated forward pass of DPO has them."""
    torch.manual_seed(0)
    make, shape = NETS[name]

    def losses(model, pair):
        with rows(parts=2):
            chosen, rejected = score(model(torch.cat(pair))).chunk(2)
        return functional.softplus(rejected - chosen)

    pair = given(shape, B), given(shape, B)
    assert_clipped_as_single_examples(make(), losses, pair, list(zip(*(x.split(1) for x in pair), strict=True)))


SIZES = (2, 0, 3, 1)


def graphs(shape):
    """Examples with other numbers of rows, one of which has none, in a mixed order."""
    owner = torch.repeat_interleave(torch.arange(B), torch.tensor(SIZES))
    order = torch.randperm(len(owner))
    owner, x = owner[order], given(shape, len(owner))
    alone = [(x[owner == n], torch.zeros(SIZES[n], dtype=torch.long), torch.ones(1)) for n in range(B)]
    return (x, owner, torch.ones(B)), alone


@pytest.mark.parametrize("name", NETS)
def test_rows_of_any_owners_count_for_their_example(name):
    torch.manual_seed(0)
    make, shape = NETS[name]

    def losses(model, batch):
        x, owner, per = batch
        if not len(x):
            return sum(p.sum() for p in model.parameters()) * 0 * per
        with rows(owner):
            each = score(model(x))
        return torch.zeros_like(per).index_add(0, owner, each).square()

    batch, alone = graphs(shape)
    assert_clipped_as_single_examples(make(), losses, batch, alone)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x):
        chosen, output = x[:, 0].gt(0).long() + x[:, 1].gt(0).long(), x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            with rows(mine):
                output = output.index_add(0, mine, expert(x[mine]))
        return output


def test_routed_rows_count_for_their_example():
    torch.manual_seed(0)
    x = torch.randn(B, 6)
    assert_clipped_as_single_examples(Experts(), lambda model, x: score(model(x)), x, x.split(1))


def test_packed_texts_count_for_their_example():
    """One row of tokens with several texts in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    owner = torch.tensor([[0, 0, 1, 2, 2, 2, 3]])
    tokens = torch.randint(0, 7, owner.shape)

    def losses(model, batch):
        tokens, owner, per = batch
        with rows(owner):
            each = score(model(tokens)[0])
        return torch.zeros_like(per).index_add(0, owner[0], each).square()

    alone = [(tokens[owner == n][None], owner[owner == n][None] * 0, torch.ones(1)) for n in range(B)]
    assert_clipped_as_single_examples(model, losses, (tokens, owner, torch.ones(B)), alone)


@pytest.mark.parametrize("outside", [True, False])
def test_owners_are_kept_for_recomputation(outside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Odd(5), nn.Linear(5, 3))

    def losses(model, x):
        def inner(x):
            with rows(each=2):
                return model(x)

        if outside:
            with rows(each=2):
                output = checkpoint(model, x.flatten(0, 1), use_reentrant=False)
        else:
            output = checkpoint(inner, x.flatten(0, 1), use_reentrant=False)
        return score(output).view(-1, 2).sum(1)

    x = torch.randn(B, 2, 6)
    assert_clipped_as_single_examples(model, losses, x, x.split(1))


@pytest.mark.parametrize("owner", [[0, 1, 2, 4], [0, -1, 2, 3]])
def test_rows_of_no_example_are_an_error(owner):
    def losses(model, x):
        with rows(torch.tensor(owner)):
            return model(x).sum(1)

    with pytest.raises(ValueError, match=r"^owner: must be between 0 and the number of examples"):
        added(nn.Linear(6, 3), losses, torch.randn(B, 6), B)


def test_other_rows_without_owners_are_an_error_that_names_the_layer_and_no_counts():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    def losses(model, x):
        return model(x.repeat(11, 1)).sum(1)[: len(x)]

    with pytest.raises(RuntimeError, match="'0' has other rows than one for each example") as caught:
        added(model, losses, torch.randn(B, 6), B)
    assert not any(str(number) in str(caught.value) for number in (B, 11 * B))
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize(("given", "sentence"), [
    ({}, "must be given one of"), ({"each": 2, "parts": 2}, "must be given one of"),
    ({"each": 0}, "each=0"), ({"parts": 1.5}, "parts=1.5"),
    ({"owner": torch.ones(3)}, "must be a tensor of whole numbers"),
    ({"owner": [0, 1]}, "must be a tensor of whole numbers"),
])  # fmt: skip
def test_nonsense_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence), rows(**given):
        pass


def test_a_planted_wrong_owner_is_caught():
    """The oracle sees owners that are off by one."""
    torch.manual_seed(0)

    def losses(model, batch):
        x, owner = batch
        with rows(owner.roll(1) if len(x) > 2 else owner):
            each = score(model(x))
        return each.view(-1, 2).sum(1)

    x, owner = torch.randn(2 * B, 6), torch.arange(B).repeat_interleave(2)
    alone = [(each, torch.zeros(2, dtype=torch.long)) for each in x.split(2)]
    with pytest.raises(AssertionError):
        assert_clipped_as_single_examples(nn.Linear(6, 3), losses, (x, owner), alone)
