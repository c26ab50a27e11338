"""Parameters without a layer act on every example: each example's gradient is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bandmf.torch import verify
from bandmf.torch.clipping import make_clipping
from bandmf.torch.clipping.recording import shared
from bandmf.torch.clipping.rows import rows
from one_at_a_time import added, assert_clipped_as_single_examples, empty_sums, flat, learn, trained

B, T, D = 4, 3, 6


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


class Model(nn.Module):
    def __init__(self, forward, **own):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        for name, value in own.items():
            setattr(self, name, value)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def score(output):
    return output.flatten(1).sin() @ torch.linspace(-1, 2, output[0].numel()).to(output)


def losses(model, x):
    return score(model(x))


def cls_token(m, x):
    x = torch.cat([m.cls.expand(len(x), -1, -1), m.first(x)], dim=1)
    return m.last((x + m.pos).tanh())


def cls_token_repeated(m, x):
    return m.last(torch.cat((m.first(x), m.cls.repeat(x.shape[0], 1, 1)), 1).tanh() + m.pos)


def cls_and_registers_of_one_call(m, x):
    tokens = torch.cat([m.cls.expand(len(x), -1, -1), m.registers.expand(len(x), -1, -1)], 1)
    return m.last(torch.cat([tokens.to(x.dtype), m.first(x)], 1).tanh())


def positions_before_examples(m, x):
    return m.last((m.first(x) + m.pos[:, 1:]).relu() + (m.pos * 2)[0, 0])


def layer_scale(m, x):
    return m.last(x + m.gamma * m.first(x))


def scale_of_raw_inputs(m, x):
    return m.last(m.first(x * m.gamma.exp()))


def mask_token(m, x):
    x = m.first(x)
    return m.last(torch.where(x[..., :1] > 0, m.cls, x))


def mask_of_numbers(m, x):
    x = m.first(x)
    mask = (x.detach()[..., :1] > 0).to(x.dtype)
    return m.last(x * (1 - mask) + m.cls * mask)


def matrix(m, x):
    return m.last(x @ m.weight + functional.linear(x, m.weight, m.gamma))


def matrix_of_vectors(m, x):
    return m.last(m.first(x.mean(1)) @ m.weight) * (m.first(x.mean(1)) @ m.gamma)[:, None]


def queries(m, x):
    keys = m.first(x)
    asked = m.first(m.queries.unsqueeze(0).expand(len(x), -1, -1))
    return m.last(functional.scaled_dot_product_attention(asked, keys, keys))


def queries_through_a_layer_before_rows(m, x):
    return m.last(m.first(m.queries)[None] * m.first(x).mean(1, keepdim=True))


def bias_of_pairs(m, x):
    h = m.first(x)
    return m.last((h @ h.mT + m.pairs[None]).softmax(-1) @ h)


def through_a_list(m, x):
    return m.last(m.first(x) * m.several[0] + m.several[1])


def normalized(m, x):
    return m.last(m.first(x) @ (m.weight / m.weight.norm(dim=0, keepdim=True)))


def normalizing_function(m, x):
    return m.last(functional.layer_norm(m.first(x), (D,), m.gamma, m.several[0]))


def group_normalizing_function(m, x):
    return m.last(functional.group_norm(m.first(x).mT, 2, m.gamma, m.several[0]).mT)


def einsum(m, x):
    return m.last(torch.einsum("btd,de->bte", m.first(x), m.weight))


def half_used(m, x):
    a, b = m.gamma.chunk(2)
    return m.last(m.first(x) * torch.cat([a, 3 * b]))


def of_the_type_of_examples(m, x):
    pos = m.pos[0].to(x)
    return m.last(m.first(x) + pos[:T] + pos.mean(0) + m.gamma.type_as(x))


def examples_of_the_type_of_a_parameter(m, x):
    return m.last(m.first(x.to(m.gamma)) * m.gamma)


def distances(m, x):
    return m.last(m.first(x)) * torch.cdist(m.first(x), m.cls.expand(len(x), -1, -1))


def dropped_out(m, x):
    return m.last(m.first(x) + functional.dropout(m.pos[:, :1], 0.0, True))


def broadcast_with_examples(m, x):
    mean, scale = torch.broadcast_tensors(m.first(x), m.gamma.exp())
    return torch.distributions.Normal(mean, m.gamma.exp()).log_prob(m.last(x)[..., :1]) * scale


def in_place(m, x):
    x = m.first(x).clone()
    x += m.gamma
    return m.last(x)


def under_checkpointing(m, x):
    return m.last(checkpoint(lambda x: (m.first(x) * m.gamma + m.pos[:, :T]).tanh(), x, use_reentrant=False))


def own():
    return {
        "cls": parameter(1, 1, D), "pos": parameter(1, T + 1, D), "gamma": parameter(D), "weight": parameter(D, D),
        "registers": parameter(1, 2, D), "queries": parameter(5, D), "pairs": parameter(T, T),
        "several": nn.ParameterList([parameter(D), parameter(1, 1, D)]), "unit": Unit(), "read": nn.GRU(D, D),
        "attend": nn.MultiheadAttention(D, 1, batch_first=True),
    }  # fmt: skip


WAYS = [
    cls_token, cls_token_repeated, cls_and_registers_of_one_call, positions_before_examples, layer_scale,
    scale_of_raw_inputs, mask_token, mask_of_numbers, matrix, matrix_of_vectors, queries,
    queries_through_a_layer_before_rows, bias_of_pairs, through_a_list, normalized, normalizing_function,
    group_normalizing_function, einsum, half_used, of_the_type_of_examples, examples_of_the_type_of_a_parameter,
    distances, dropped_out, broadcast_with_examples, in_place, under_checkpointing,
]  # fmt: skip


@pytest.mark.parametrize("examples", [B, T, T + 1, 5, 1])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_bare_parameters_are_clipped_as_one_example_at_a_time(way, examples):
    """Also where there are as many examples as places, tokens or queries."""
    torch.manual_seed(0)
    x = torch.randn(examples, T, D)
    assert_clipped_as_single_examples(Model(way, **own()), losses, x, x.split(1))


def test_bare_parameters_of_a_block_inside_a_model_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Model(layer_scale, gamma=parameter(D)), nn.Tanh())
    x = torch.randn(B, T, D)
    assert_clipped_as_single_examples(model, losses, x, x.split(1))


def test_weights_of_several_losses_train():
    torch.manual_seed(0)
    model = Model(lambda m, x: m.last(m.first(x)), log_vars=parameter(2))

    def weighted(model, x):
        output = model(x).sin().sum(1)
        both = output * torch.exp(-model.log_vars) + model.log_vars
        return both.sum(1) + sum(torch.exp(-model.log_vars[i]) * output[:, i] for i in range(2)) + model.log_vars.norm()

    x = torch.randn(B, T, D)
    assert_clipped_as_single_examples(model, weighted, x, x.split(1))


def test_bare_parameters_in_rows_of_other_owners():
    torch.manual_seed(0)

    def views(model, x):
        with rows(each=2):
            return score(model(x.flatten(0, 1))).view(-1, 2).square().sum(1)

    x = torch.randn(B, 2, T, D)
    assert_clipped_as_single_examples(Model(cls_token, **own()), views, x, x.split(1))


@pytest.mark.parametrize("parametrization", [nn.utils.parametrizations.weight_norm])
def test_parametrized_linear_layers_train(parametrization):
    torch.manual_seed(0)
    model = nn.Sequential(parametrization(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 2))
    x = torch.randn(B, T, D)
    assert_clipped_as_single_examples(model, losses, x, x.split(1))


# --- embeddings that are given numbers once for all examples ------------------------------------------------


class Positions(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.embed, self.place, self.project, self.how = (nn.Embedding(7, D), nn.Embedding(9, D), nn.Linear(D, D), how)

    def forward(self, tokens):
        return self.how(self, self.embed(tokens), torch.arange(tokens.shape[1]))


HOWS = {
    "added": lambda m, x, places: x + m.place(places),
    "with a dimension": lambda m, x, places: x + m.place(places).unsqueeze(0),
    "of one row": lambda m, x, places: x + m.place(places[None]),
    "projected": lambda m, x, places: x * m.project(m.place(places)),
    "of pairs": lambda m, x, places: x + m.place((places[:, None] - places).abs()).mean(0),
}


@pytest.mark.parametrize("examples", [T, T + 1, 5, 1])
@pytest.mark.parametrize("how", HOWS)
def test_positions_given_once_train_even_if_there_are_as_many_as_examples(how, examples):
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (examples, T))
    assert_clipped_as_single_examples(Positions(HOWS[how]), losses, tokens, tokens.split(1))


class Table(nn.Embedding):
    """As in BART: it is given the words of a batch, or places, and gives positions, once for all."""

    def __init__(self, adds_dimension):
        super().__init__(T + 2, D)
        self.adds_dimension = adds_dimension

    def forward(self, tokens, places=None):
        places = torch.arange(tokens.shape[1]) if places is None else places
        found = super().forward(places + 2)
        return found[None] if self.adds_dimension and found.ndim == 2 else found


@pytest.mark.parametrize("examples", [T, T + 1, 5, 1])
@pytest.mark.parametrize("given", [None, torch.arange(T), torch.arange(T)[None]], ids=["words", "places", "a row"])
@pytest.mark.parametrize("adds_dimension", [False, True])
def test_positions_that_a_table_makes_for_a_batch_train(adds_dimension, given, examples):
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (examples, T))
    model = Positions(lambda m, x, places: m.project(x))
    model.table = Table(adds_dimension)

    def placed(model, tokens):
        return score(model.project(model.embed(tokens)) + model.table(tokens, given))

    assert_clipped_as_single_examples(model, placed, tokens, tokens.split(1))


@pytest.mark.parametrize("examples", [T, 5, 1])
def test_a_table_that_is_called_for_two_lengths_trains(examples):
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (examples, T))
    model = Positions(lambda m, x, places: m.project(x))
    model.table = Table(False)

    def placed(model, tokens):
        longer = model.embed(tokens) + model.table(tokens)
        return score(model.project(longer)) + score(longer[:, 1:] * model.table(tokens[:, 1:]))

    assert_clipped_as_single_examples(model, placed, tokens, tokens.split(1))


def test_positions_of_one_row_train_after_texts_of_length_one_were_seen():
    """They stay of length one with more copies, as rows of examples would."""
    torch.manual_seed(0)
    model = Positions(HOWS["of one row"])
    clipping, sums = make_clipping("bookkeeping", model, trained(model), 1e3, False), empty_sums(trained(model))
    learn(clipping, losses, lambda n: torch.ones(n, 1, dtype=torch.long), lambda n: torch.ones(n, T, dtype=torch.long))
    tokens = torch.randint(0, 7, (B, T))
    clipping.add_to(sums, losses, tokens, B, B)
    torch.testing.assert_close(flat(sums), exact_sum(model, losses, tokens).double(), rtol=1e-5, atol=1e-5)


def test_a_trained_part_of_a_frozen_embedding_trains():
    torch.manual_seed(0)

    class Projected(nn.Embedding):
        def __init__(self):
            super().__init__(7, D)
            self.project = nn.Linear(D, D)

        def forward(self, tokens):
            return self.project(super().forward(tokens))

    model = nn.ModuleDict({"embed": Projected(), "scale": Scales(1)})
    model["embed"].weight.requires_grad_(False)
    tokens = torch.randint(0, 7, (B, T))
    way = lambda model, tokens: score(model["scale"](model["embed"](tokens)))  # noqa: E731
    assert_clipped_as_single_examples(model, way, tokens, tokens.split(1))


def test_a_layer_that_draws_by_numpy_and_is_given_nothing_of_an_example_is_refused():
    class Drawn(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(np.random.rand())

    model, constant = nn.ModuleDict({"drawn": Drawn(D, D), "last": nn.Linear(D, 2)}), torch.randn(D)
    way = lambda model, x: score(model["last"](x) @ model["drawn"](constant)[:2])  # noqa: E731
    clipping, x = make_clipping("bookkeeping", model, trained(model), 1.0, False), torch.randn(B, T, D)
    learn(clipping, way, lambda n: x[:1].repeat(n, 1, 1))
    with pytest.raises(ValueError, match="'drawn' draws random numbers and has parameters"):
        clipping.add_to(empty_sums(trained(model)), way, x, B, B)


def test_layers_on_what_frozen_layers_computed_in_low_precision_train():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(D, D) for name in ("frozen", "trained", "last")})
    model["frozen"].requires_grad_(False)
    constant = torch.randn(D)

    def lowered(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            shared = model["trained"](model["frozen"](constant))
        return score(model["last"](x) * shared)

    clipping = make_clipping("bookkeeping", model, trained(model), 1e3, False)
    x, sums = torch.randn(B, T, D), empty_sums(trained(model))
    learn(clipping, lowered, lambda n: x[:1].repeat(n, 1, 1))
    clipping.add_to(sums, lowered, x, B, B)
    torch.testing.assert_close(flat(sums), exact_sum(model, lowered, x).double(), rtol=0, atol=0.05)


def exact_sum(model, losses, x):
    parameters = list(trained(model).values())
    found = torch.autograd.grad(losses(model, x).sum(), parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


class Scales(nn.Module):
    """Scales in a frozen network, whose every layer has what came before it twice."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers)).requires_grad_(False)
        self.scales = nn.ParameterList(parameter(D) for _ in range(layers))

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + (layer(x) * scale).tanh()
        return x


@pytest.mark.parametrize("examples", [T, T + 1, 1])
def test_scales_and_prompts_in_a_network_of_frozen_words_train(examples):
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = (nn.Embedding(9, D).requires_grad_(False) for _ in range(2))
            self.prompt, self.inner = nn.Embedding(2, D), Scales(2)

        def forward(self, tokens):
            prompts = self.prompt(torch.arange(2)[None]).repeat(len(tokens), 1, 1)
            words = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
            return self.inner(torch.cat([prompts, words], 1))

    tokens = torch.randint(0, 9, (examples, T))
    assert_clipped_as_single_examples(Adapted(), losses, tokens, tokens.split(1))


def test_what_parameters_have_in_common_is_computed_once():
    """It was computed anew at each use: a layer more took twice the time."""
    torch.manual_seed(0)
    x = torch.randn(B, T, D)
    assert_clipped_as_single_examples(Scales(24), losses, x, x.split(1))


@pytest.mark.parametrize("examples", [T, T + 1, 1])
def test_categories_of_the_examples_train_even_if_there_are_as_many_as_places(examples):
    torch.manual_seed(0)

    def forward(model, batch):
        tokens, category = batch
        x = model.embed(tokens) + model.place(torch.arange(T))
        return score(model.project(x) + model.project(model.embed(category))[:, None])

    batch = torch.randint(0, 7, (examples, T)), torch.randint(0, 7, (examples,))
    alone = list(zip(*(each.split(1) for each in batch), strict=True))
    assert_clipped_as_single_examples(Positions(None), forward, batch, alone)


# --- what is not known --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [
    lambda m, x: m.last(torch.einsum("btd,de->tbe", m.first(x), m.weight).transpose(0, 1)),
    lambda m, x: m.last(torch.cat([m.first(x), m.cls], 0)[: len(x)]),
    lambda m, x: m.last((m.first(x).transpose(0, 1) + m.pos[0, :T, None]).transpose(0, 1)),
    lambda m, x: m.last(m.gamma[:T] @ m.first(x)),  # from the left
    lambda m, x: m.last(m.unit(m.first(x), m.pos[0, :T])),  # as many places as examples, or not
    lambda m, x: m.last(m.attend(x, x, x, attn_mask=m.pairs)[0]),
    lambda m, x: m.last(m.read(m.cls.expand(-1, len(x), -1), m.first(x[:, 0])[None])[0][0]),  # time first
    lambda m, x: m.last(m.first(m.gamma.expand(3, -1)).sum(0) + m.first(x)),  # three rows, not the examples'
    lambda m, x: m.last((torch.fft.rfft(m.first(x)) * torch.fft.rfft(m.gamma)).abs() @ m.weight[:4]),
    *(
        lambda m, x, use=use: m.last(use(m.first(x), (x[..., :1] > 0).expand_as(x), m.cls.expand(len(x), T, -1)))
        for use in (
            lambda x, chosen, rows: x.masked_scatter(chosen, rows),
            lambda x, chosen, rows: x.index_put((chosen[..., 0].nonzero(as_tuple=True)[0],), rows[:1, 0].squeeze(0)),
            lambda x, chosen, rows: x.index_add(0, torch.arange(len(x)).flip(0), rows),
            lambda x, chosen, rows: x.scatter_add(0, torch.zeros_like(x, dtype=torch.long), rows),
            lambda x, chosen, rows: torch.vstack([x, rows])[: len(x)],
        )
    ),
])  # fmt: skip
def test_operations_that_are_not_known_are_an_error_that_names_the_parameter_and_vmap(way):
    torch.manual_seed(0)
    model, x = Model(way, **own()), torch.randn(5, T, D)
    with pytest.raises(RuntimeError, match="clipping='vmap'") as caught:
        added(model, losses, x, 5)
    assert any(f"{name!r}" in str(caught.value) for name in ("gamma", "weight", "cls", "pos", "pairs", "last.weight"))
    assert all(name not in vars(model) for name in own() if name not in ("read", "attend", "unit"))


def test_a_planted_error_is_caught(monkeypatch):
    """Every example is given the gradient of the next one."""
    right = shared.described
    monkeypatch.setattr(shared, "described", lambda node, g, every: right(node, g.roll(1, 0), every))
    torch.manual_seed(0)
    x = torch.randn(B, T, D)
    with pytest.raises(AssertionError):
        assert_clipped_as_single_examples(Model(cls_token, **own()), losses, x, x.split(1))


# --- examples that are not finite, and examples elsewhere ----------------------------------------------------


class OfCounts(nn.Module):
    """Features without a graph, such as those of a frozen network, meet a parameter."""

    def __init__(self, use):
        super().__init__()
        self.scale, self.head, self.use = parameter(D), nn.Linear(D, 3), use

    def forward(self, counts):
        with torch.no_grad():
            features = self.use(counts)
        return self.head(features * self.scale)


@pytest.mark.parametrize("use", [torch.log, torch.reciprocal, lambda counts: counts / counts])
def test_features_that_are_not_finite_do_nothing_to_others(use):
    torch.manual_seed(0)
    model, counts, labels = OfCounts(use), torch.randint(1, 9, (8, D)).float(), torch.randint(0, 3, (8,))
    counts[-1, 2] = 0

    def of(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    others = added(model, of, [counts[:7], labels[:7]], 7)
    beside = added(model, of, [counts, labels], 8)
    assert float(others.norm()) > 0.1
    assert float((beside - others).norm()) <= 1.0 + 1e-4


class Unit(nn.Module):
    """Without a rule."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(D)

    def forward(self, x, places):
        return x * self.weight + places


def test_layers_that_copies_did_not_call_train():
    """Stochastic depth on raw inputs: verify may have passed without it."""

    def forward(m, x):
        return m.last(m.first(x) + m.second(x) if len(x) > 3 else m.first(x))

    torch.manual_seed(0)
    model, x = Model(forward, second=nn.Linear(D, D)), torch.randn(5, T, D)
    added(model, losses, x, 5)


class Prompted(nn.Module):
    """A learned prompt is put where a text has places for it: all texts have two, but one."""

    def __init__(self):
        super().__init__()
        self.words, self.prompt, self.out = nn.Embedding(20, D), parameter(1, 2, D), nn.Linear(D, 3)

    def forward(self, words):
        x, place = self.words(words), (words == 0)[..., None]
        x = x.masked_scatter(place.expand_as(x), self.prompt.expand(len(x), -1, -1))
        return self.out(x.cumsum(1).tanh().mean(1))


def test_a_text_with_a_place_less_for_a_prompt_shifts_nobody_elses():
    torch.manual_seed(0)
    words = torch.randint(1, 20, (64, 10))
    words[:, :2] = 0
    labels, other = torch.arange(64) % 3, words.clone()
    other[0, 1] = 7
    model = Prompted()

    def of(model, batch):
        return functional.cross_entropy(20 * model(batch[0]), batch[1], reduction="none")

    found = verify(model, of, [(words[n], labels[n]) for n in range(4)])
    assert (found.ok, found.clipping) == (True, "vmap")
    sums = [added(model, of, [each, labels], 64, mode=found.clipping) for each in (words, other)]
    assert float((sums[1] - sums[0]).norm()) <= 2.0 + 1e-4


def heads_first(m, x):
    """Heads, then examples: torch would spread the parameter over the heads."""
    return m.last((m.first(x)[None] * m.heads).tanh())[0]


def test_a_parameter_that_meets_examples_in_another_dimension_is_refused():
    model = Model(heads_first, heads=parameter(1, 1, D))
    with pytest.raises(RuntimeError, match="'heads' meets tensors whose first dimension does not count the examples"):
        added(model, losses, torch.randn(B, D), B)
