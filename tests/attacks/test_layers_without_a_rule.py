"""Layers that are described by torch.func: no example is differentiated with what belongs to another."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bandmf.torch.clipping import make_clipping
from one_at_a_time import Case, clipped, empty_sums, exact, flat, learn, probe_losses, trained

CLIP, WIDTH = 0.3, 6


class Gated(nn.Module):
    """Given by its creator what to do with an input beside the first."""

    def __init__(self, use):
        super().__init__()
        self.gate, self.matrix = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.use = use

    def forward(self, x, *, mask):
        return (functional.linear(self.use(x, mask), self.matrix) * self.gate).sigmoid()


class Reader(nn.Module):
    """Tokens, zeros of which are padding, and a mask that is made of them."""

    def __init__(self, mask, use):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gated, self.out = nn.Embedding(9, WIDTH), Gated(use), nn.Linear(WIDTH, 3)
        self.mask = mask

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.out(self.gated(x, mask=self.mask(tokens, x)).cumsum(1).tanh().mean(1))


def rows_if_padded(tokens, x):
    """As transformers does it: one row where nothing is padded."""
    mask = (tokens != 0).to(x)
    return mask[:1] if bool(mask.all()) else mask


def causal(tokens, x):
    return torch.ones(x.shape[1], x.shape[1]).tril().to(x)


def table_or_rows(tokens, x):
    """Of two dimensions in both cases; what they do to an example is the same."""
    return (tokens != 0).to(x) if bool((tokens == 0).any()) else torch.eye(x.shape[1]).to(x)


def by_table_or_rows(x, mask):
    table = torch.equal(mask, torch.eye(x.shape[1]).to(x))
    return mask @ x if table else x * mask[: len(x), :, None]


MASKS = {
    "rows where something is padded": (rows_if_padded, lambda x, mask: x * mask[..., None]),
    "the first rows": (rows_if_padded, lambda x, mask: x * mask.expand(max(len(x), len(mask)), -1)[: len(x), :, None]),
    "a table": (causal, lambda x, mask: mask @ x),
    "numbers of places": (lambda tokens, x: torch.arange(x.shape[1]).to(x), lambda x, mask: x * mask[:, None]),
    "a table of one row": (lambda tokens, x: causal(tokens, x)[None], lambda x, mask: mask @ x),
    "heads as long as many batches": (lambda tokens, x: torch.linspace(1, 2, 4).to(x), lambda x, mask: x * mask.sum()),
    "a table or rows": (table_or_rows, by_table_or_rows),
}  # fmt: skip


def texts(rows, places, padded):
    generator = torch.Generator().manual_seed(10 * rows + places)
    tokens = torch.randint(1, 9, (rows, places), generator=generator)
    for number in range(rows) if padded else ():
        tokens[number, places - number % 3 :] = 0
    return tokens


def clipping_of(model):
    return make_clipping("bookkeeping", model, trained(model), CLIP, False)


def assert_as_one_at_a_time(clipping, model, *inputs, losses=probe_losses):
    case, sums = Case(model, inputs, losses), empty_sums(trained(model))

    def of_batch(model, batch):
        return losses(model, *batch)

    learn(clipping, of_batch, lambda n: tuple(x[:1].repeat_interleave(n, 0) for x in inputs))
    clipping.add_to(sums, of_batch, inputs, case.rows, case.rows)
    expected = clipped(exact(case), CLIP)
    assert float((flat(sums) - expected).norm()) < 1e-4 * CLIP * case.rows


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("first", [4, 5])
def test_masks_may_have_one_row_or_one_for_each_example_and_differ_from_batch_to_batch(kind, first):
    """The lengths of batch and texts cross: 4 is as long as 4, as 5, and so on."""
    model = Reader(*MASKS[kind])
    clipping = clipping_of(model)
    assert "torch.func, at more cost: gated" in clipping.explain()
    batches = [(first, 5, False), (4, 4, False), (7, 5, True), (1, 5, False), (5, 5, True), (5, 5, False), (6, 4, True)]
    for rows, places, padded in batches:
        assert_as_one_at_a_time(clipping, model, texts(rows, places, padded))


@pytest.mark.parametrize("loud", [1.0, 1e4])
def test_an_input_with_several_rows_for_each_example_is_refused(loud):
    """Taken for a table, each example would have the first rows, which are of others; a large one hides nothing."""

    def of_two_heads(tokens, x):
        return (tokens % 3 * loud ** (tokens[:, :1] == tokens[0, 0])).to(x).repeat_interleave(2, 0)

    def use(x, mask):
        heads = x.repeat_interleave(2, 0) * mask[: 2 * len(x), :, None]
        return heads.view(len(x), 2, *x.shape[1:]).sum(1)

    model = Reader(of_two_heads, use)
    clipping = clipping_of(model)
    with pytest.raises(ValueError, match=r"'gated' cannot be called again with one example.*register a rule"):
        assert_as_one_at_a_time(clipping, model, texts(6, 5, False))


class Told(nn.Module):
    """A mask that comes by an attribute, which no call shows."""

    def __init__(self):
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.ones(WIDTH)), None

    def forward(self, x):
        return x * self.weight * self.mask


def test_something_of_the_whole_batch_that_is_no_input_is_refused():
    model = nn.Sequential(Told())
    clipping = clipping_of(model)
    x = torch.randn(5, WIDTH)
    model[0].mask = (x > 0).float()
    with pytest.raises(ValueError, match=r"gives another shape for one example than for its row.*register a rule"):
        assert_as_one_at_a_time(clipping, model, x)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, factors):
        for factor in factors:
            x = x * factor
        return x * self.weight


def test_an_iterator_which_is_empty_the_second_time_is_refused():
    model = nn.ModuleDict({"steps": Steps()})

    def losses(model, x):
        return model["steps"](x, iter([2.0, 3.0])).sum(1)

    with pytest.raises(ValueError, match="iterator"):
        assert_as_one_at_a_time(clipping_of(model), model, torch.randn(3, WIDTH), losses=losses)


# --- operations in place --------------------------------------------------------------------------------


class Adds(nn.Module):
    """Changes its input, on which its gradient depends."""

    def __init__(self, how):
        super().__init__()
        self.bias, self.matrix = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.randn(4, WIDTH))
        self.how = how

    def forward(self, x):
        return functional.linear(self.how(x, self.bias), self.matrix).tanh() * 1


def added(x, bias):
    x += bias
    return x


def relu_in_place(x, bias):
    return functional.relu(x, inplace=True) + bias


def through_a_view(x, bias):
    x.view(-1)[:3] += bias[0]
    return x


@pytest.mark.parametrize("how", [added, relu_in_place, through_a_view])
def test_a_layer_that_changes_its_input_is_refused_by_name(how):
    model = nn.Sequential(Adds(how))
    with pytest.raises(RuntimeError, match="'0' changes its input in place"):
        assert_as_one_at_a_time(clipping_of(model), model, torch.randn(5, WIDTH))


class Ends(nn.Module):
    """A layer whose last operation may need its own output in the backward pass."""

    def __init__(self, last):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(WIDTH)), last

    def forward(self, x):
        return self.last(x * self.weight)


LAST = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "exp": torch.exp,
    "relu": torch.relu,
    "a view": lambda x: x.tanh().view(*x.shape),
    "nothing": lambda x: x,
    "parts": lambda x: torch.cat([part * 2 for part in x.sigmoid().chunk(2, -1)], -1),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_last_operation_of_a_layer_may_need_its_output(last, checkpointed):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Ends(LAST[last]), nn.Linear(WIDTH, 3))

    def losses(model, x):
        return (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).sin().sum(1)

    assert_as_one_at_a_time(clipping_of(model), model, torch.randn(5, WIDTH), losses=losses)


@pytest.mark.parametrize("last", LAST)
def test_operations_in_place_after_a_layer_are_right_or_refused(last):
    """As without recording: autograd knows whether the output is needed once more."""
    torch.manual_seed(1)
    layers = nn.Linear(WIDTH, WIDTH), Ends(LAST[last]), nn.Hardtanh(inplace=True), nn.Linear(WIDTH, 3)
    model = nn.Sequential(*layers)
    clipping = clipping_of(model)
    if last in ("nothing", "parts"):
        assert_as_one_at_a_time(clipping, model, torch.randn(5, WIDTH))
        return
    with pytest.raises(RuntimeError, match="inplace"):
        assert_as_one_at_a_time(clipping, model, torch.randn(5, WIDTH))


class Passes(nn.Module):
    """Gives its input on, and its result twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        result = (x * self.weight).exp()
        return x, result, result[:, :1]


@pytest.mark.parametrize("changed", [None, 0, 1, 2])
def test_outputs_that_share_memory_are_not_changed_unseen(changed):
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.passes = nn.Linear(WIDTH, WIDTH), Passes()

        def forward(self, x):
            x = self.first(x) * 1
            outputs = list(self.passes(x))
            if changed is not None:
                outputs[changed].mul_(2)
            return outputs[0] * outputs[1] + outputs[2] + x

    model = Model()
    clipping = clipping_of(model)
    if changed is None:
        assert_as_one_at_a_time(clipping, model, torch.randn(5, WIDTH))
        return
    with pytest.raises(RuntimeError, match="inplace"):
        assert_as_one_at_a_time(clipping, model, torch.randn(5, WIDTH))


def test_operations_in_place_after_layers_with_a_rule_are_not_refused():
    layers = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 4)
    model = nn.Sequential(*layers)
    assert_as_one_at_a_time(clipping_of(model), model, torch.randn(5, WIDTH))
