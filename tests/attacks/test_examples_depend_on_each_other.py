"""Models and losses by which one example changes the gradients of others: each is refused, with a remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from bandmf.randomness.key import Key
from bandmf.torch.training.generators import Generators
from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, private_of, small_net, vectors, with_one_replaced
from sweeps import in_turn


def assert_refused(model, sentence, mode, loop=plain, data=None, **options):
    found = outcome(model, vectors() if data is None else data, mode, loop, **options).refused
    assert found is not None, "was accepted"
    assert re.search(sentence, found), found


def pictures(examples=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 6, 4, 4, generator=generator)
    return Rows([(x[i], torch.tensor(i % 4)) for i in range(examples)])


def pictured(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(6, 6, 3), layer, nn.Flatten(), nn.Linear(24, 4))


# --- known by their kind --------------------------------------------------------------------------------


def frozen(layer):
    return layer.requires_grad_(False)


BATCH_NORMS = {
    "trainable": lambda: nn.BatchNorm2d(6),
    "frozen": lambda: frozen(nn.BatchNorm2d(6)),
    "affine=False": lambda: nn.BatchNorm2d(6, affine=False),
    "track_running_stats=False": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "in evaluation mode without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False).eval(),
    "synchronized": lambda: nn.SyncBatchNorm(6),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", BATCH_NORMS)
def test_batch_norm_is_refused_in_every_form(form, mode):
    sentence = r"model: 1 is (Sync)?BatchNorm.* mixes the examples of a batch.*nn\.GroupNorm"
    assert_refused(pictured(BATCH_NORMS[form]()), sentence, mode, data=pictures())


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_that_is_switched_back_later_is_refused(mode):
    model = pictured(frozen(nn.BatchNorm2d(6)).eval())

    def loop(private, batch):
        private.model.train()
        plain(private, batch)

    assert_refused(
        model, r"'?1(\.running_mean|\.num_batches_tracked)?'? .*nn\.GroupNorm", mode, loop, pictures()
    )


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_with_fixed_statistics_is_accepted(mode):
    assert outcome(pictured(frozen(nn.BatchNorm2d(6)).eval()), pictures(), mode).refused is None


@pytest.mark.parametrize("mode", MODES)
def test_instance_norm_with_running_statistics_is_refused(mode):
    model = pictured(nn.InstanceNorm2d(6, track_running_stats=True))
    assert_refused(model, r"1 is InstanceNorm2d.*track_running_stats=False", mode, data=pictures())


class Tokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(7, 6, **options), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.embed((x.abs() * 10).long() % 7).mean(1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_depend_on_all_tokens_of_a_batch_are_refused(option, mode):
    (name,) = option
    assert_refused(Tokens(**option), rf"embed is Embedding, whose {name}.*make it without", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_with_their_replacement(kind, mode):
    model = nn.Sequential(kind(6, 4, batch_first=True))
    sentence = rf"model: 0 is {kind.__name__}.*opacus\.layers\.DP{kind.__name__}"
    assert_refused(model, sentence, mode)


# --- seen while they run --------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that remembers the data."""

    def __init__(self, exchanged=False):
        super().__init__()
        self.inner, self.exchanged = small_net(), exchanged
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if self.exchanged:
            self.seen = self.seen + x.detach().mean(0)
        else:
            self.seen += x.detach().mean(0)
        return self.inner(x)


class Rewriting(nn.Module):
    """A parameter that is changed by the data, in place."""

    def __init__(self, unseen=False):
        super().__init__()
        self.inner, self.unseen = small_net(), unseen

    def forward(self, x):
        with torch.no_grad():
            if self.unseen:
                self.inner[0].bias.data.add_(x.mean())  # torch does not count changes through .data
            else:
                self.inner[0].bias += x.mean()
        return self.inner(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize("exchanged", [True, False])
def test_a_buffer_that_changes_in_forward_is_refused_by_name(mode, self_test, exchanged):
    sentence = r"'seen' changed between the start of a batch and its step"
    assert_refused(Counting(exchanged), sentence, mode, self_test=self_test)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("self_test", [True, False])
def test_a_parameter_that_changes_in_forward_is_refused_by_name(mode, self_test):
    sentence = r"'inner\.0\.bias' changed between the start of a batch and its step"
    assert_refused(Rewriting(), sentence, mode, self_test=self_test)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_changes_through_its_data_is_refused_by_name(mode):
    sentence = r"'inner\.0\.bias' changed between the start of a batch and its step"
    assert_refused(Rewriting(unseen=True), sentence, mode)


# --- found by the self-test -----------------------------------------------------------------------------


def texts(lengths=(2, 9, 3, 4, 7, 5)):
    generator = torch.Generator().manual_seed(5)
    return Rows([torch.randint(1, 9, (length,), generator=generator) for length in lengths])


def padded(rows):
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row.roll(-1) for row in rows], batch_first=True, padding_value=-100)
    return tokens, labels


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, tokens):
        return self.out(self.embed(tokens).cumsum(1).tanh()).transpose(1, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_averaged_over_all_tokens_is_refused_with_the_remedy(mode):
    sentence = r"depends on the other examples.*its own count.*bandmf\.torch\.losses"
    options = {"loader_options": {"collate_fn": padded}}
    assert_refused(Reader(), sentence, mode, plain, texts(), **options)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_averaged_over_all_tokens_is_accepted_where_all_texts_are_as_long(mode):
    options = {"loader_options": {"collate_fn": padded}}
    assert outcome(Reader(), texts([5] * 6), mode, **options).refused is None


def summed(private, batch):
    x, y = batch
    functional.cross_entropy(private.model(x), y, reduction="sum").backward()
    private.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("loop", "given", "right"), [(summed, "mean", "sum"), (plain, "sum", "mean")])
def test_a_wrong_loss_reduction_is_refused_with_the_right_one(mode, loop, given, right):
    sentence = f"loss_reduction='{given}'.*make_private needs loss_reduction='{right}'"
    assert_refused(small_net(), sentence, mode, loop, loss_reduction=given)
    assert outcome(small_net(), vectors(), mode, loop, loss_reduction=right).refused is None


class HomeMadeNorm(nn.Module):
    """Batch norm without a buffer, of which no class tells."""

    def __init__(self):
        super().__init__()
        self.inner = small_net()

    def forward(self, x):
        return self.inner((x - x.mean(0)) / (1 + x.std(0, unbiased=False)))


def in_batch_negatives(private, batch):
    """Every example is to be told apart from the others of its batch."""
    x, _ = batch
    there = private.model(x)
    functional.cross_entropy(there @ there.detach().T, torch.arange(len(x))).backward()
    private.optimizer.step()


class FunctionalTying(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)

    def forward(self, x):
        return (self.embed((x.abs() * 10).long() % 5) @ self.embed.weight.T).mean(1)[:, :4]


class Positions(nn.Module):
    """Places without a batch, as many as there are examples: not to be taken for them."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(0)
        self.place, self.out = nn.Embedding(times, 6), nn.Linear(6, 4)

    def forward(self, x):
        places = self.place(torch.arange(self.place.num_embeddings))
        return self.out((x[:, None] + places).tanh()).mean(1)


@pytest.mark.parametrize("mode", MODES)
def test_a_home_made_batch_norm_is_refused(mode):
    assert_refused(HomeMadeNorm(), r"self-test: .*(depend on each other|depends on the other examples)", mode)


class Reordered(nn.Module):
    """Examples change places between layers, and what belongs to one is found under two numbers."""

    def __init__(self):
        super().__init__()
        self.inner = small_net()

    def forward(self, x):
        half = self.inner[:2](x)
        return self.inner[2:](half.flip(0)).flip(0)


@pytest.mark.parametrize("mode", MODES)
def test_examples_that_change_places_are_refused(mode):
    assert_refused(Reordered(), r"self-test: .*depend on each other", mode)


@pytest.mark.parametrize("mode", MODES)
def test_in_batch_negatives_are_refused(mode):
    assert_refused(
        small_net(), r"self-test: .*(in-batch negatives|depends on the other)", mode, in_batch_negatives
    )


@pytest.mark.parametrize("mode", MODES)
def test_functional_tying_is_refused_by_the_name_of_the_weight(mode):
    assert_refused(FunctionalTying(), r"'embed\.weight'.*outside the layer that owns it", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [4, 8])
def test_places_that_have_no_batch_are_not_taken_for_examples(mode, times):
    """Four, as in the self-test, and eight, as in the batch."""
    assert_refused(Positions(times), r"'(place|out)\.weight'.* (batch|examples)", mode)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_no_reason_to_refuse_even_where_the_loop_calls_train(mode):
    def loop(private, batch):
        private.model.train()
        plain(private, batch)

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    assert outcome(model, vectors(), mode, loop).refused is None


@pytest.mark.parametrize("mode", MODES)
def test_the_self_test_sees_what_dropout_would_hide(mode):
    model = nn.Sequential(nn.Dropout(0.5), HomeMadeNorm())
    assert_refused(model, r"self-test: .*(depend on each other|depends on the other)", mode)


def test_random_numbers_outside_of_dropout_get_a_sentence_of_their_own():
    def loop(private, batch):
        x, y = batch
        plain(private, (x + torch.randn_like(x), y))

    assert_refused(
        small_net(), "random numbers are drawn in evaluation mode too.*self_test=False", "auto", loop
    )
    assert outcome(small_net(), vectors(), "auto", loop, self_test=False).refused is None


@pytest.mark.parametrize("mode", MODES)
def test_rehearsals_leave_no_trace(mode, monkeypatch):
    """The first step after the self-test is the step without one, random numbers included."""
    monkeypatch.setattr(
        Generators, "secret", lambda self, *what: Key(bytes(32)).derive(str(what)).secret
    )  # that of two runs
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    totals, states = [], []
    for self_test in (True, False):
        torch.manual_seed(7)
        totals.append(outcome(model, vectors(), mode, self_test=self_test).total)
        states.append(torch.get_rng_state())
    assert torch.equal(*totals)
    assert torch.equal(*states)


def test_rehearsals_take_no_step_and_are_counted():
    private = private_of(small_net(), vectors(), steps=2)
    expected = private.loader.rehearsals
    taken = []
    for batch in private.loader:
        plain(private, batch)
        taken.append(private.steps_taken)
    assert expected > 0
    assert taken == [0] * expected + [1]
    assert private.loader.rehearsals == 0


class OverTheBatch(nn.Module):
    """A mean over the batch, by hand."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net(x - x.mean(0))


@pytest.mark.parametrize(("mode", "spoiled"), in_turn(["bookkeeping", "hooks", "functorch"], [0, 3, None]))
def test_examples_that_depend_on_each_other_are_found_beside_one_that_is_not_finite(mode, spoiled):
    """A NaN among the rehearsed examples must not make the comparison pass."""
    data = vectors()
    if spoiled is not None:
        data = with_one_replaced(data, (torch.full((6,), float("nan")), data[spoiled][1]), spoiled)
    refused = outcome(OverTheBatch(), data, mode).refused
    assert refused is not None
    assert "depend on each other" in refused


def train(private):
    for batch in private.loader:
        plain(private, batch)


def test_a_self_test_that_could_compare_nothing_says_so():
    nothing = Rows([(torch.full((6,), float("nan")), torch.tensor(k % 4)) for k in range(8)])
    private = private_of(small_net(), nothing)
    with pytest.warns(UserWarning, match="nothing was compared"):
        train(private)
    assert "nothing has checked" in private.explain()


class OverTheBatchInTraining(nn.Module):
    """Statistics of the batch in training mode alone, behind dropout."""

    def __init__(self, drop):
        super().__init__()
        self.net, self.drop = small_net(), drop

    def forward(self, x):
        if self.training:
            x = x - x.mean(0)
        return self.net(self.drop(x))


class Functional(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.1, self.training)


@pytest.mark.parametrize(("mode", "drop"), in_turn(list(MODES), [nn.Dropout(0.1), Functional()]))
def test_dropout_does_not_hide_statistics_of_the_batch(mode, drop):
    assert_refused(OverTheBatchInTraining(drop), "depend on each other", mode)


class Deviation(nn.Module):
    """Torch's deviation of a batch of one is not a number."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net((x - x.mean(0)) / (x.std(0) + 1e-3))


@pytest.mark.parametrize("mode", MODES)
def test_a_deviation_over_the_batch_is_refused_though_it_is_not_finite_alone(mode):
    assert_refused(Deviation(), "depend on each other", mode)


class Masked(nn.Module):
    """A layer without a rule that is given a table which belongs to no example."""

    def __init__(self, places):
        super().__init__()
        self.weight, self.places = nn.Parameter(torch.ones(places)), places

    def forward(self, x, table):
        return (x * self.weight) @ table


class WithTable(nn.Module):
    def __init__(self, places=6):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.head = Masked(places), nn.Linear(places, 4)
        self.table = torch.randn(places, places)

    def forward(self, x):
        return self.head(self.mask(x, self.table))


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_table_as_long_as_the_batch_by_chance_is_not_cut(rows):
    """One example more or less changes the sum by its own gradient alone."""
    data = vectors(8)
    model = WithTable()
    found = outcome(model, Rows([data[k] for k in range(rows)]), "bookkeeping")
    fewer = outcome(model, Rows([data[k] for k in range(rows - 1)]), "bookkeeping")
    assert found.refused is None
    assert float((found.total - fewer.total).norm()) <= 1 + 1e-5
