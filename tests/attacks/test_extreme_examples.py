"""An example outside of the others' range must not change their gradients: found though the data have none."""

from __future__ import annotations

import re
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bandmf.torch.training.self_test import extremes
from bandmf.torch.training.self_test.choice import traits_of
from bandmf.torch.training.self_test.extremes import halved
from bandmf.torch.training.self_test.guarded import Guards
from torch import nn
from torch.nn import functional

from one_at_a_time import MODES
from private_loops import Rows, outcome, plain, private_of, vectors
from sweeps import in_turn


def bright_pictures(examples=16):
    """Each has the same largest and smallest value, as many real ones do."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0.0, 1.0])
    inner = torch.rand(examples, 4, generator=generator)
    return Rows([(torch.cat([ends, inner[i]]), torch.tensor(i % 4)) for i in range(examples)])


def open_net():
    """Nothing in it is bounded."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def loop_of(loss):
    def loop(private, batch):
        private.optimizer.zero_grad()
        loss(private.model, *batch).backward()
        private.optimizer.step()

    return loop


def assert_refused(sentence, *arguments, **options):
    found = outcome(*arguments, **options).refused
    assert found is not None, "was accepted"
    assert re.search(sentence, found), found


# --- scales of a whole batch ----------------------------------------------------------------------------


def by_largest(model, x, y):
    return functional.cross_entropy(model(x / x.abs().max()), y)


def by_range(model, x, y):
    return functional.cross_entropy(model((x - x.min()) / (x.max() - x.min())), y)


class Quantized(nn.Module):
    """Activations of eight bits, with one scale for the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    @staticmethod
    def rounded(x):
        scale = 127 / x.detach().abs().max()
        return x + ((x * scale).round() / scale - x).detach()

    def forward(self, x):
        return self.last(self.rounded(self.first(self.rounded(x)).tanh()))


@pytest.mark.parametrize(("mode", "loss"), in_turn(list(MODES), [by_largest, by_range]))
def test_inputs_divided_by_the_largest_value_of_the_batch_are_refused(loss, mode):
    assert_refused("depends on the place", open_net(), bright_pictures(), mode, loop_of(loss))


@pytest.mark.parametrize("mode", MODES)
def test_activations_rounded_with_one_scale_for_the_batch_are_refused(mode):
    assert_refused("self-test", Quantized(), vectors(16), mode)


def test_without_halves_it_would_be_accepted(monkeypatch):
    """So it is they that show it."""
    monkeypatch.setattr(extremes, "halved", lambda example: example)
    assert outcome(open_net(), bright_pictures(), "auto", loop_of(by_largest)).refused is None


# --- losses that are cut off ----------------------------------------------------------------------------


def mean_loss(model, x, y):
    return functional.cross_entropy(model(x), y)


CUT = {
    "NanToNum": lambda *given: torch.nan_to_num(mean_loss(*given)),
    "Clamp": lambda *given: mean_loss(*given).clamp(max=1e6),
    "Where": lambda *given: torch.where((loss := mean_loss(*given)).isfinite(), loss, 0.0),
    "Minimum": lambda *given: 2 * torch.minimum(mean_loss(*given), torch.tensor(1e6)),
    "MaskedFill": lambda *given: (loss := mean_loss(*given)).masked_fill(loss > 1e6, 0.0) / 3,
    "Abs": lambda *given: (mean_loss(*given) - 0.01).abs() + 0.01,
    "Log1P": lambda *given: torch.log1p(mean_loss(*given)),
    "LeakyRelu": lambda *given: -functional.leaky_relu(100 - mean_loss(*given)),
    "Min": lambda *given: torch.stack([mean_loss(*given), torch.tensor(1e6)]).min(),
    "SmoothL1Loss": lambda *given: functional.smooth_l1_loss(mean_loss(*given), torch.tensor(0.0), beta=1e6),
}
PARTS = {
    "Clamp": lambda model, x, _: model(x).square().mean(0).clamp(max=1e6).sum(),
    "NanToNum": lambda model, x, _: torch.nan_to_num(
        torch.stack([part.mean() for part in model(x).square().T])
    ).sum(),
}


@pytest.mark.parametrize(("name", "mode"), in_turn(list(CUT), list(MODES)))
def test_a_loss_of_the_whole_batch_that_is_cut_off_is_refused(name, mode):
    sentence = rf"the loss of the whole batch goes through {name}.*each example's own loss"
    assert_refused(sentence, open_net(), vectors(), mode, loop_of(CUT[name]))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_loss_that_are_cut_off_are_refused(name):
    assert_refused(
        f"the loss of the whole batch goes through {name}",
        open_net(),
        vectors(),
        "auto",
        loop_of(PARTS[name]),
    )


@pytest.mark.parametrize("batch", [4, 8])
def test_as_many_cut_off_losses_as_examples_are_refused(batch):
    """Of eight steps in time, say."""

    def loss(model, x, y):
        scores = model(x)
        return sum(functional.cross_entropy(scores * step, y).clamp(max=1e6) for step in range(1, 9))

    assert_refused(
        "goes through Clamp", open_net(), vectors(16), "auto", loop_of(loss), physical_batch_size=batch
    )


def test_losses_that_are_cut_off_example_by_example_are_accepted():
    def by_rows(model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none").clamp(max=1.5).mean()

    def one_by_one(model, x, y):
        scores = model(x)
        losses = [functional.cross_entropy(score, label) for score, label in zip(scores, y, strict=True)]
        return sum(torch.nan_to_num(each).clamp(max=1.5) for each in losses) / len(losses)

    def some(model, x, y):
        """Only those with an object, say."""
        scores = model(x)
        hinges = [functional.relu(1 - scores[i, y[i]]) for i in range(len(y)) if y[i] > 0]
        return (mean_loss(model, x, y) * len(y) + sum(hinges)) / len(y)

    def of_tokens(model, x, y):
        """Of those that are scored, in one long row."""
        scored = y > 0
        each = functional.cross_entropy(model(x)[scored], y[scored], reduction="none").clamp(max=1.5)
        return each.sum() / len(y)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return 2 * loss

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def by_a_function(model, x, y):
        return Doubled.apply(mean_loss(model, x, y))

    for loss in (by_rows, one_by_one, some, of_tokens, by_a_function):
        assert outcome(open_net(), vectors(), "auto", loop_of(loss)).refused is None


def test_backward_is_torchs_own_again_afterwards():
    usual = torch.autograd.backward
    outcome(open_net(), vectors(), "auto", loop_of(CUT["Clamp"]))
    assert torch.autograd.backward is usual
    guards = Guards()
    assert torch.autograd.backward is not usual
    guards.end()
    assert torch.autograd.backward is usual


# --- what extremes must not break -----------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6), nn.Sigmoid())

    def forward(self, x):
        assert x.shape[1:] == (6,)
        return self.inner(x)


def test_targets_stay_where_losses_want_them():
    """Binary cross entropy fails if a target is not between 0 and 1."""

    def loss(model, x, _):
        return functional.binary_cross_entropy(model(x), x)

    assert outcome(Autoencoder(), bright_pictures(), "auto", loop_of(loss)).refused is None


def test_models_may_check_the_range_of_the_data():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = open_net()

        def forward(self, x):
            assert 0 <= float(x.min()) <= float(x.max()) <= 1
            return self.inner(x)

    assert outcome(Checked(), bright_pictures(), "auto").refused is None


def test_halves_keep_whole_numbers_and_what_is_unknown():
    other = object()
    example = {
        "x": torch.tensor([0.5, 1.0]), "id": 7, "y": [torch.tensor(3.5), 0.5], "z": (np.float32(4.5), other),
        "t": "text", "mask": np.array([0.0, 1.0]), "bytes": torch.tensor([255], dtype=torch.uint8), "nan": float("nan"),
    }  # fmt: skip
    found = halved(example)
    assert found["x"].tolist() == [0.25, 0.5]
    assert example["x"].tolist() == [0.5, 1.0]
    assert (found["id"], float(found["y"][0]), found["y"][1]) == (7, 3.5, 0.5)
    assert found["z"] == (4.5, other)
    assert found["t"] == "text"
    assert found["mask"].tolist() == [0, 1]
    assert found["bytes"].tolist() == [255]


# --- data that do not bear it -----------------------------------------------------------------------------


def with_targets(targets, rows=None):
    rows = vectors(20, classes=4) if rows is None else rows
    return Rows([(x, target) for (x, _), target in zip(rows, targets, strict=True)])


CLASSES = {0.5 * (number + 1): number for number in range(4)}  # ratings of half stars, as classes


def by_rating(model, x, rating):
    return functional.cross_entropy(model(x), (2 * rating).long() - 1)


def collated_ratings(rows):
    return torch.stack([x for x, _ in rows]), torch.tensor([CLASSES[float(rating)] for _, rating in rows])


def by_box(model, x, box):
    box = torch.stack([side.float() for side in box], 1)
    assert bool((box[:, 2:] > box[:, :2]).all()), "a box has no size"
    return functional.mse_loss(model(x), box)


def by_chances(model, x, chances):
    chances = torch.stack([chance.float() for chance in chances], 1)
    assert torch.allclose(chances.sum(1), torch.ones(len(x))), "no probabilities"
    return functional.cross_entropy(model(x), chances)


def by_unit(model, x, y):
    assert torch.allclose(x.norm(dim=1), torch.ones(len(x))), "no unit vectors"
    return functional.cross_entropy(model(x), y)


RATINGS = [0.5 * (1 + number % 4) for number in range(20)]
BEAR = {
    "ratings": (with_targets(map(torch.tensor, RATINGS)), by_rating, None),
    "ratings of Python": (with_targets(RATINGS), by_rating, None),
    "ratings by a table": (with_targets(RATINGS), by_largest, collated_ratings),
    "boxes": (with_targets([[10.0 + n, 5.0, 12.5 + n, 8.5] for n in range(20)]), by_box, None),
    "chances": (with_targets([torch.rand(4).softmax(0).tolist() for n in range(20)]), by_chances, None),
    "unit vectors": (Rows([(functional.normalize(x, dim=0), y) for x, y in vectors(20)]), by_unit, None),
}


@pytest.mark.parametrize("kind", BEAR)
def test_data_that_must_have_their_size_keep_it(kind):
    """Each of these loops ended in an error about values that are not in the data."""
    data, loss, collate = BEAR[kind]
    if collate is not None:
        loss = mean_loss
    found = outcome(open_net(), data, "auto", loop_of(loss), loader_options={"collate_fn": collate})
    assert found.refused is None


GRID = Rows([(torch.tensor([0.1 * (1 + n % 3)] * 6), torch.tensor(n % 4)) for n in range(20)])


def one_pass(private, loop=plain):
    for batch in private.loader:
        loop(private, batch)


def on_the_grid(x):
    if not torch.isclose(x, GRID[0][0] * (x / 0.1).round()).all():
        raise KeyError("not on the grid")
    return x


def test_a_collate_function_that_fails_on_halves_gets_whole_examples():
    def collate(rows):
        return on_the_grid(torch.stack([x for x, _ in rows])), torch.stack([y for _, y in rows])

    with pytest.warns(
        UserWarning, match=r"no examples at half their size.*the collate function fails.*KeyError"
    ):
        found = outcome(open_net(), GRID, "auto", loader_options={"collate_fn": collate})
    assert found.refused is None


def test_a_model_that_fails_on_halves_says_what_they_are_and_gets_none_in_the_next_pass():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = open_net()

        def forward(self, x):
            return self.inner(on_the_grid(x))

    private = private_of(Checked(), GRID)
    with pytest.raises(KeyError, match="not on the grid") as found:
        one_pass(private)
    assert any("a rehearsal of make_private's self-test" in note for note in found.value.__notes__)
    with pytest.warns(UserWarning, match="no examples at half their size are rehearsed"):
        one_pass(private)
    assert private.finished


def test_a_refused_loop_is_refused_in_the_next_pass_too():
    private, loop = private_of(open_net(), bright_pictures()), loop_of(by_largest)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="depends on the place"):
            one_pass(private, loop)


# --- examples that are objects ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Own(dict):
    pass


OBJECTS = {
    "frozen dataclass": Example,
    "dataclass with slots": Slots,
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "dict of a class of its own": lambda x, y: Own(x=x, y=y),
    "namespace": lambda x, y: SimpleNamespace(x=x, y=y),
}


def part(example, name):
    return example[name] if isinstance(example, dict | UserDict) else getattr(example, name)


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_halved_so_that_a_scale_of_the_batch_shows(kind):
    """It was accepted, and one bright example moved the sum by 4.65 times the clip norm."""
    make = OBJECTS[kind]
    data = Rows([make(x, y) for x, y in bright_pictures()])
    half = halved(data[0])
    assert type(half) is type(data[0])
    assert torch.equal(2 * part(half, "x"), part(data[0], "x"))
    assert float(part(data[0], "x").max()) == 1, "the example itself is as it was"
    options = {"collate_fn": lambda rows: tuple(torch.stack([part(r, name) for r in rows]) for name in "xy")}
    assert_refused(
        "depends on the place", open_net(), data, "auto", loop_of(by_largest), loader_options=options
    )
    assert outcome(open_net(), data, "auto", loader_options=options).refused is None


def test_objects_are_chosen_by_what_is_in_them():
    assert set(traits_of(Example(torch.zeros(3), torch.tensor(7)))) == {
        ("x", "shape", (3,)), ("y", "shape", ()), ("y", "is", 7),
    }  # fmt: skip


def test_examples_that_cannot_be_in_one_batch_are_rehearsed_one_at_a_time():
    """Pictures of different sizes, by physical batches of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    data = Rows([(torch.rand(1, 4 + number, 5), torch.tensor(number % 4)) for number in range(6)])
    assert outcome(model, data, "auto", physical_batch_size=1).refused is None


@pytest.mark.parametrize("ending", ["close", "make anew"])
def test_an_error_in_a_rehearsal_leaves_nothing_behind_even_if_the_iterator_is_kept(ending):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    usual, hooks = torch.autograd.backward, [len(m._forward_hooks) for m in model.modules()]
    private = private_of(model, vectors())
    batches = iter(private.loader)
    for _ in range(3):
        plain(private, next(batches))
    next(batches)
    assert torch.autograd.backward is not usual
    if ending == "close":
        private.close()
    else:
        private_of(model, vectors(), self_test=False)
    assert torch.autograd.backward is usual
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    model.train()
    assert not torch.equal(model(torch.ones(1, 6)), model(torch.ones(1, 6)))  # dropout is on


def test_ordinary_models_are_accepted_with_the_same_sum():
    """The rehearsals change nothing."""
    data = bright_pictures()
    with_test = outcome(open_net(), data, "auto")
    without = outcome(open_net(), data, "auto", plain, self_test=False)
    assert with_test.refused is None
    torch.testing.assert_close(with_test.total, without.total, rtol=0, atol=1e-20)  # the noise is below that


# --- losses that are right, though not plain means ------------------------------------------------------


def of_parts(model, x, y):
    """A loss for each task, kept in a tensor."""
    kept = torch.zeros(3)
    kept[0], kept[1] = mean_loss(model, x, y), 0.1 * model(x).square().mean()
    return kept.sum()


RIGHT = {
    "one minus a mean": lambda model, x, y: 1 - functional.cosine_similarity(model(x), x[:, :4]).mean(),
    "products": lambda model, x, y: torch.einsum(
        "b,b->", torch.full((len(y),), 1 / len(y)), functional.cross_entropy(model(x), y, reduction="none")
    ),
    "between two": lambda model, x, y: torch.lerp(mean_loss(model, x, y), model(x).square().mean(), 0.3),
    "parts": of_parts,
    "norms one by one": lambda model, x, y: sum(row.norm() for row in model(x).split([1] * len(y))) / len(y),
    "chosen places": lambda model, x, y: (
        functional.mse_loss(model(x)[y > 0], x[y > 0, :4], reduction="sum") / len(y)
    ),
    "probabilities": lambda model, x, y: functional.kl_div(
        model(x).log_softmax(-1), x[:, :4].softmax(-1), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_losses_that_are_linear_in_the_examples_are_accepted(name):
    assert outcome(open_net(), vectors(16), "auto", loop_of(RIGHT[name])).refused is None


def cut(model, x):
    return functional.mse_loss(model(x), x[:, :4]).clamp(max=1e6)


WRONG = {
    "broadcast": lambda model, x, y: (
        functional.cross_entropy(model(x), y, reduction="none") + cut(model, x)
    ).mean(),
    "chosen places": lambda model, x, y: (
        functional.cross_entropy(model(x)[y > 0], y[y > 0], reduction="sum").clamp(max=1e6) / len(y)
    ),
    "finite parts": lambda model, x, y: (
        parts := torch.stack([mean_loss(model, x, y), model(x).square().mean()])
    )[parts.isfinite()].sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_are_cut_off_behind_something_are_refused(name):
    assert_refused(
        "the loss of the whole batch goes through", open_net(), vectors(16), "auto", loop_of(WRONG[name])
    )


def test_losses_by_private_backward_are_looked_at_too():
    def loop(private, batch):
        x, y = batch
        private.optimizer.zero_grad()
        losses = functional.cross_entropy(private.model(x), y, reduction="none") + cut(private.model, x)
        private.backward(losses)
        private.optimizer.step()

    assert_refused("goes through Clamp", open_net(), vectors(16), "bookkeeping", loop)


def test_guards_of_a_run_that_is_gone_do_not_take_those_of_another_away():
    usual = torch.autograd.backward
    first, second = Guards(), Guards()
    first.end()
    first.end()
    second.begin(19)
    torch.nan_to_num((2 * torch.ones(19, requires_grad=True)).mean()).backward()
    assert "NanToNum" in second.problem()
    second.end()
    assert torch.autograd.backward is usual
